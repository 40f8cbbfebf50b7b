"""A teacher that is kept across runs: starting its keeper, and ending it. Prefect is not
imported."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from opd_core.config import ExperimentConfig, OPDTeacherConfig
from opd_core.errors import ConfigError, ServingError
from opd_core.lifecycle.children import environment_without_marks
from opd_core.lifecycle.ledger import LEDGER_FILE, is_held
from opd_core.lifecycle.logs import log_tail
from opd_core.lifecycle.process import ProcessId, kill_exactly
from opd_core.lifecycle.reaper import reap
from opd_core.lifecycle.receipt_text import left_over
from opd_core.lifecycle.records import read_receipt
from opd_core.lifecycle.registry import Registry
from opd_core.preflight.facts import load_tokenizer
from opd_core.preflight.machine import check_devices, lock_names
from opd_core.preflight.models import check_models
from opd_core.preflight.report import PreflightReport
from opd_core.preflight.rows import check_data
from opd_core.preflight.servers import check_servers
from opd_core.recipe import load_recipe
from opd_core.scoring.facts import TeacherFacts
from opd_core.serving.kept.record import KeptOrder, KeptState, KeptTeacher
from opd_core.serving.kept.users import users_of
from opd_core.serving.servers import scoring_dtype, served_context
from tasks.secrets import find_secrets, resolve_key

POLL_S = 0.2
MARGIN_S = 30.0
"""How much longer than its teardown may take a keeper is waited for."""
USUAL_TEARDOWN_S = 60.0
"""Where no order says it."""
Telling = Callable[[str], None]


def keep_teacher(
    recipe: Path,
    overrides: Sequence[str] = (),
    *,
    teacher: str | None = None,
    name: str | None = None,
    hours: float,
    telling: Telling,
) -> KeptTeacher:
    """Keep a teacher of a recipe, or go on keeping it: when this returns, it has proven that it
    scores. It is ended once no run has used it for ``hours``.

    Raises :class:`ConfigError`, :class:`~opd_core.errors.PreflightError` before anything is
    started, :class:`ServingError` if it does not come up; then nothing of it is left. Interrupted,
    it ends what it has begun.
    """
    config = load_recipe(recipe, overrides)
    number, wanted = _choose(config, teacher)
    kept = KeptTeacher.named(name or f"{config.name}-{wanted.name}")
    lock = kept.take()
    if lock is None:
        _go_on(kept, wanted, hours)
    else:
        try:
            order = _check(config, str(recipe), number, telling)
            _begin(kept, order, hours, lock)
        except Exception as error:
            kept.tell(KeptState("failed", f"it was not started: {error}"))
            raise
        finally:
            os.close(lock)
    try:
        _await_ready(kept, telling)
    except KeyboardInterrupt:
        if lock is not None:
            end_teacher(kept.name, force=True, cause="interrupted while it started")
        raise
    return kept


def end_teacher(name: str, *, force: bool = False, cause: str = "asked to end") -> str:
    """End a kept teacher; returns what was done. With ``force`` also while runs use it, and where
    its keeper hangs.

    Raises :class:`ConfigError` for an unknown name, :class:`ServingError` that names the runs which
    use it, or what is left.
    """
    kept = KeptTeacher.named(name)
    if not kept.folder.is_dir():
        raise ConfigError(f"no teacher {name!r} was ever kept here; see `opd teacher list`")
    with kept.gate():
        was_alive = kept.alive
        if was_alive and not force and (users := users_of(kept)):
            raise ServingError(
                f"the kept teacher {name!r} is used by {', '.join(map(str, users))}: wait until "
                "they have ended, or end it all the same with --force"
            )
        if was_alive:
            kept.ask_end(cause)
    if was_alive:
        _await_end(kept, force)
    else:
        reap(Registry.of_user())  # its keeper and its supervisor may have been killed
    receipt = read_receipt(kept.folder)
    if receipt is not None and (left := left_over(receipt)):
        raise ServingError(left)
    if not was_alive:
        return f"the kept teacher {name!r} was not up; nothing of it is left"
    return f"the kept teacher {name!r} has ended ({cause}); nothing of it is left"


def overrides_to_use(order: KeptOrder, endpoints: Sequence[str]) -> list[str]:
    """What makes a run of the recipe use the kept teacher, each ``KEY.PATH=VALUE``; of its key the
    reference."""
    path = f"opd.teachers.{order.number}"
    key = key_reference(order)
    keyed = [f"{path}.api_key={key}"] if key else []
    if not order.teacher.replicas:
        return [f"{path}.endpoint={endpoints[0]}", f"{path}.launch=null", *keyed]
    replicas = [
        {"endpoint": endpoint, "backend": replica.backend}
        for endpoint, replica in zip(endpoints, order.teacher.replicas, strict=True)
    ]
    return [f"{path}.replicas={json.dumps(replicas)}", *keyed]


def key_reference(order: KeptOrder) -> str | None:
    """Where the key of a kept teacher is kept; None if it has none."""
    reference: str | None = order.teacher.model_dump(mode="json")["api_key"]
    return reference


def _choose(config: ExperimentConfig, name: str | None) -> tuple[int, OPDTeacherConfig]:
    """The teacher of that name, or the only one, and its place in the recipe."""
    teachers = config.opd.teachers if config.opd else ()
    names = ", ".join(each.name for each in teachers) or "none"
    if name is None and len(teachers) > 1:
        raise ConfigError(f"the recipe has several teachers: name one with --teacher ({names})")
    for number, each in enumerate(teachers):
        if name is None or each.name == name:
            if any(replica.launch is None for replica in each.all_replicas):
                raise ConfigError(
                    f"teacher {each.name!r} has an external server, which cannot be kept: give it "
                    "a 'launch' for every replica"
                )
            return number, each
    raise ConfigError(f"the recipe has no teacher {name or ''!r}; it has: {names}")


def _go_on(kept: KeptTeacher, wanted: OPDTeacherConfig, hours: float) -> None:
    """It is kept already: its time begins anew."""
    with kept.gate():
        order = kept.order
        if kept.end_wish is not None:
            raise ServingError(f"the kept teacher {kept.name!r} is being ended: try again then")
        if order is None:
            raise ServingError(
                f"the kept teacher {kept.name!r} is being checked by another `opd teacher up`: try "
                "again when that has started it"
            )
        if order.teacher.model_dump() != wanted.model_dump():
            raise ConfigError(
                f"{kept.name!r} keeps another teacher, or one with other settings, from "
                f"{order.recipe}: end it (opd teacher down {kept.name}), or choose a --name"
            )
        kept.renew(hours)


def _check(config: ExperimentConfig, recipe: str, number: int, telling: Telling) -> KeptOrder:
    """All that can be known before anything is started, as the keeper needs it.

    Raises :class:`~opd_core.errors.PreflightError`.
    """
    assert config.opd is not None
    teacher, only = config.opd.teachers[number], len(config.opd.teachers) == 1
    report, alone = PreflightReport(), _alone(config, teacher)
    tokenizers = functools.cache(load_tokenizer)
    check_models(alone, report, tokenizers)
    check_data(alone, report, tokenizers)
    check_servers(alone, report)
    check_devices(alone, report)
    for warning in report.warnings:
        telling(f"warning: {warning}")
    report.raise_problems()
    launches = [replica.launch for replica in teacher.all_replicas if replica.launch]
    devices = {device for launch in launches for device in launch.devices}
    return KeptOrder(
        recipe=recipe,
        number=number,
        only=only,
        teacher=teacher,
        facts=_facts(teacher, report),
        sequences=tuple(map(tuple, report.proof_sequences)),
        dtype=scoring_dtype(teacher),
        locks=lock_names(sorted(devices - {"cpu"})),
        wait_s=config.devices.wait_s or 0.0,
        teardown_s=config.run.teardown_s,
    )


def _alone(config: ExperimentConfig, teacher: OPDTeacherConfig) -> ExperimentConfig:
    """The recipe as far as one teacher is concerned: nothing of the student is started."""
    assert config.opd is not None
    opd = config.opd.model_copy(update={"teachers": (teacher,), "default_teacher": teacher.name})
    student = config.student.model_copy(update={"devices": ("cpu",)})
    sampling = config.sampling.model_copy(update={"engine": "transformers", "devices": None})
    ray = config.ray.model_copy(update={"address": None})
    parts = {"opd": opd, "student": student, "sampling": sampling, "ray": ray}
    return config.model_copy(update=parts)


def _facts(teacher: OPDTeacherConfig, report: PreflightReport) -> TeacherFacts:
    model = report.teachers[teacher.name]
    shortest = served_context(teacher, model.context_length)
    return TeacherFacts(model.vocab_size, shortest, fingerprint=model.fingerprint)


def _begin(kept: KeptTeacher, order: KeptOrder, hours: float, lock: int) -> None:
    """Start the keeper, which holds the lock from then on. It goes into the background by itself:
    nothing that ends this process ends it."""
    keys = {"key": resolve_key(order.teacher), "secrets": find_secrets(order.servers)}
    # What an earlier keeper left goes first: its supervisor may be at it, or was killed too.
    limit_s = order.teardown_s + MARGIN_S
    if not _within(limit_s, lambda: not is_held(kept.folder / LEDGER_FILE)):
        raise ServingError(f"the kept teacher {kept.name!r} has not ended after {limit_s:.0f} s")
    reap(Registry.of_user(), again=False)
    with kept.gate():
        if (wish := kept.end_wish) is not None:
            raise ServingError(f"the kept teacher {kept.name!r} is not up: {wish.cause}")
        kept.begin(order, hours)
    command = [sys.executable, "-m", "opd_core.serving.kept.keeper", str(kept.folder), str(lock)]
    log = kept.folder / "keeper.log"
    with log.open("ab") as output:
        started = subprocess.run(
            command,
            input=json.dumps(keys).encode(),
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=kept.folder,
            env=environment_without_marks(),
            pass_fds=(lock,),
            start_new_session=True,
            check=False,
        )
    if started.returncode != 0:
        raise ServingError(f"the keeper did not start; {log} ends:\n{log_tail(log)}")


def _await_ready(kept: KeptTeacher, telling: Telling) -> None:
    told = ""
    while True:
        alive, state = kept.alive, kept.state  # in this order: its last word comes before its death
        if not alive or (state is not None and state.phase in ("ended", "failed")):
            raise ServingError(
                f"the kept teacher {kept.name!r} is not up: {_last_word(kept, state)}"
            )
        if state is not None and state.phase == "ready":
            return
        if state is not None and state.said != told:
            told = state.said
            telling(told)
        time.sleep(POLL_S)


def _last_word(kept: KeptTeacher, state: KeptState | None) -> str:
    if state is not None and state.said and state.phase != "starting":
        return state.said
    log = kept.folder / "keeper.log"
    return f"its keeper died; {log} ends:\n{log_tail(log)}"


def _await_end(kept: KeptTeacher, force: bool) -> None:
    """Until keeper and supervisor are gone. Raises :class:`ServingError`."""
    try:
        order, state = kept.order, kept.state
    except ServingError:
        order = state = None
    limit_s = (order.teardown_s if order else USUAL_TEARDOWN_S) + MARGIN_S

    def gone() -> bool:
        return not kept.alive and not is_held(kept.folder / LEDGER_FILE)

    if _within(limit_s, gone):
        return
    if force and state is not None:  # its supervisor sees that, and ends everything
        kill_exactly(ProcessId(state.pid, state.start_ticks))
        if _within(limit_s, gone):
            return
    raise ServingError(
        f"the kept teacher {kept.name!r} has not ended after {limit_s:.0f} s; read "
        f"{kept.folder / 'keeper.log'}" + ("" if force else ", or end it with --force")
    )


def _within(limit_s: float, condition: Callable[[], bool]) -> bool:
    give_up_at = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(POLL_S)
    return True
