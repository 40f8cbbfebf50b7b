"""The attempts of a run: ``run.json``, who is still at it, and how the next attempt begins.

A run directory belongs to one run for ever. What tells of a single attempt (ledger, receipt,
result, logs) is put aside under ``attempts/<n>/`` before the next one starts; journal, batches,
checkpoints and parked rollouts are the run's own and stay.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from opd_core.errors import ConfigError, PreflightError, ServingError, TeacherAnswerError
from opd_core.lifecycle.dead_run import LedgerState, end_dead_run
from opd_core.lifecycle.errors import LifecycleError
from opd_core.lifecycle.ledger import LEDGER_FILE, is_held, read_ledger
from opd_core.lifecycle.locks import lock_now
from opd_core.lifecycle.process import ProcessId, boot_id, identify, is_running
from opd_core.lifecycle.receipt_text import left_over
from opd_core.lifecycle.records import RECEIPT_FILE
from opd_core.lifecycle.registry import Registry
from opd_core.lifecycle.teardown import RunFacts, spared
from opd_core.scoring.facts import TeacherFacts, read_facts
from opd_core.training.alone import alone
from opd_core.training.files import (
    ATTEMPTS_FOLDER,
    BATCHES_FOLDER,
    CONFIG_FILE,
    LINKS_FILE,
    LOGS_FOLDER,
    MODEL_CARD_FILE,
    PHASE_FILE,
    REPORT_FILE,
    RESULT_FILE,
    RUN_FILE,
    SAMPLERS_FILE,
    SCORING_FILE,
    SUMMARY_FILE,
    TEACHERS_FILE,
)
from opd_core.training.forks import ForkPoint, name_of, newest_checkpoint
from opd_core.whole_file import write_whole

COMPLETED = "completed"
ENDING_POLL_S = 0.2
OF_ONE_ATTEMPT = (
    RECEIPT_FILE,
    RESULT_FILE,
    SUMMARY_FILE,
    REPORT_FILE,
    MODEL_CARD_FILE,
    TEACHERS_FILE,
    SAMPLERS_FILE,
    SCORING_FILE,
    PHASE_FILE,
    LINKS_FILE,
    LOGS_FOLDER,
    # Last: while it is there, a move that was broken off can be taken up again.
    LEDGER_FILE,
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a run, with the process of its flow; times are seconds since the epoch.

    ``status`` is how it ended: ``completed``, ``failed``, ``cancelled``, ``crashed`` (its flow was
    killed), or empty while it runs. ``flow_run_id`` is Prefect's.
    """

    started_at: float
    flow_run_id: str = ""
    status: str = ""
    pid: int = 0
    start_ticks: int = 0
    boot_id: str = ""

    @classmethod
    def begin(cls, flow_run_id: str = "") -> Attempt:
        """An attempt of this process, from now on."""
        me = identify(os.getpid())
        ticks = me.start_ticks if me else 0
        return cls(time.time(), flow_run_id, "", os.getpid(), ticks, boot_id())

    @property
    def alive(self) -> bool:
        """Whether another process is still at it."""
        owner = ProcessId(self.pid, self.start_ticks)
        here = not self.status and self.boot_id == boot_id() and self.pid != os.getpid()
        return here and is_running(owner)


@dataclass(frozen=True, slots=True)
class RunHistory:
    """What ``run.json`` holds. ``fingerprints`` are those of the first attempt's models and
    data, by what they are of."""

    run_id: str
    attempts: tuple[Attempt, ...]
    fingerprints: dict[str, str]
    forked_from: ForkPoint | None = None

    def write(self, run_dir: Path) -> None:
        """Write ``run.json``; it appears whole or not at all."""
        write_whole(run_dir / RUN_FILE, _HISTORY.dump_json(self, indent=2), durable=True)


_HISTORY = TypeAdapter(RunHistory)


def read_history(run_dir: Path) -> RunHistory:
    """Who the run in ``run_dir`` is. Raises :class:`ConfigError`."""
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{run_dir} holds no {CONFIG_FILE}: it is not a run directory, or its run was ended "
            "before it began; start a new run"
        )
    try:
        return _HISTORY.validate_json((run_dir / RUN_FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{run_dir / RUN_FILE} cannot be read ({error}), so it is not known what the run was "
            "made of; begin a new run from its newest checkpoint: "
            f"opd run --fork {name_of(run_dir)}"
        ) from None


def check_fingerprints(run_dir: Path, history: RunHistory, now: Mapping[str, str]) -> None:
    """Raise :class:`PreflightError` if a model or a data file is not what it was at first."""
    changed = [
        f"  - {what} is not what it was: fingerprint {first or 'unknown'} then, "
        f"{now.get(what) or 'unknown'} now\n"
        for what, first in history.fingerprints.items()
        if now.get(what) != first
    ]
    if changed:
        raise PreflightError(
            f"run {history.run_id} cannot go on, nothing was started:\n{''.join(changed)}"
            "put back what was there, or begin a new run from its newest checkpoint: "
            f"opd run --fork {name_of(run_dir)}"
        )


def find_flow_run(root: Path, flow_run_id: str) -> Path | None:
    """The directory of the run of which this Prefect flow run was an attempt."""
    for file in root.glob(f"*/{RUN_FILE}"):
        try:
            attempts = json.loads(file.read_bytes())["attempts"]
            if any(attempt["flow_run_id"] == flow_run_id for attempt in attempts):
                return file.parent
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def check_not_running(history: RunHistory) -> None:
    """Raise :class:`ConfigError` while the flow of the run's latest attempt is alive here."""
    latest = history.attempts[-1]
    if latest.alive:
        raise ConfigError(f"run {history.run_id} is still running (pid {latest.pid}): end it first")


def _check_supervisor(run_dir: Path, history: RunHistory) -> None:
    if is_held(run_dir / LEDGER_FILE):
        raise ConfigError(
            f"run {history.run_id} is still running: its supervisor is ending what it started, and "
            "writes its final state; try again in a minute"
        )


def await_ending(run_dir: Path, limit_s: float, waiting: Callable[[float], None]) -> None:
    """Wait until the supervisor of the latest attempt has ended what that started, and has written
    its final state. ``waiting`` gets the seconds so far. Raises :class:`ConfigError`."""
    started = time.monotonic()
    while is_held(run_dir / LEDGER_FILE):
        seconds = time.monotonic() - started
        if seconds > limit_s:
            raise ConfigError(
                f"{run_dir}: the supervisor of its last attempt is still at work after "
                f"{seconds:.0f} s; read {run_dir / 'supervisor.log'}, or end it by SIGTERM"
            )
        waiting(seconds)
        time.sleep(ENDING_POLL_S)


def continue_run(
    run_dir: Path, fingerprints: Mapping[str, str], flow_run_id: str, teardown_s: float
) -> RunHistory:
    """Make a run directory ready for its next attempt, which is this process.

    Raises :class:`ConfigError` if the run is alive or its final state is being written,
    :class:`PreflightError` if a model or its data has changed, or what a killed attempt left cannot
    be ended. Then nothing has been touched.
    """
    with _claimed(run_dir):
        history = read_history(run_dir)
        check_not_running(history)
        _check_supervisor(run_dir, history)
        check_fingerprints(run_dir, history, fingerprints)
        _end_what_is_left(run_dir, history.run_id, teardown_s)
        with alone(run_dir) if (run_dir / RECEIPT_FILE).exists() else nullcontext():
            history = read_history(run_dir)  # with what was written of its end meanwhile
            # From here on its ledger is not there; a reaper must see that somebody is at it.
            _take_over(history.run_id)
            _put_aside(run_dir, len(history.attempts))
            attempts = (*history.attempts, Attempt.begin(flow_run_id))
            history = replace(history, attempts=attempts)
            history.write(run_dir)
    return history


def check_external_teachers(run_dir: Path, now: Mapping[str, TeacherFacts]) -> None:
    """A teacher whose model's files are not known is known by its scores: those of its known
    sequences must be what they were when the run first heard them. Raises :class:`ServingError`."""
    folders = sorted((run_dir / ATTEMPTS_FOLDER).glob("*"), key=lambda folder: int(folder.name))
    told = (folder / TEACHERS_FILE for folder in folders if (folder / TEACHERS_FILE).is_file())
    if (first := next(told, None)) is None:
        return
    for name, before in read_facts(first).items():
        answers = {canary.token_ids: canary.logprobs for canary in now[name].canaries}
        for canary in () if before.fingerprint else before.canaries:
            for replica, logprobs in enumerate(answers.get(canary.token_ids, ())):
                try:
                    canary.check(replica, logprobs, before.tolerance)
                except TeacherAnswerError as error:
                    raise ServingError(
                        f"teacher {name!r} is not what it was when this run began: {error}; begin "
                        f"a new run from its newest checkpoint: opd run --fork {name_of(run_dir)}"
                    ) from None


def end_leftovers(run_dir: Path, teardown_s: float) -> None:
    """End what a killed attempt left running, before anything is checked against it.

    Raises as :func:`continue_run`.
    """
    with _claimed(run_dir):
        history = read_history(run_dir)
        check_not_running(history)
        _check_supervisor(run_dir, history)
        _end_what_is_left(run_dir, history.run_id, teardown_s)


def end_attempt(run_dir: Path, status: str) -> None:
    """Write down how the latest attempt ended. Raises :class:`ConfigError` or OSError."""
    history = read_history(run_dir)
    *earlier, latest = history.attempts
    replace(history, attempts=(*earlier, replace(latest, status=status))).write(run_dir)


@contextmanager
def _claimed(run_dir: Path) -> Iterator[None]:
    """Only one process at a time looks whether a run is alive, and takes it over."""
    folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not lock_now(folder):
            raise ConfigError(f"{run_dir}: another process is taking this run up right now")
        yield
    finally:
        os.close(folder)


def _end_what_is_left(run_dir: Path, run_id: str, teardown_s: float) -> None:
    """A supervisor that was killed leaves a ledger without receipt."""
    try:
        if LedgerState.of(read_ledger(run_dir / LEDGER_FILE)).ended:
            return
        run = RunFacts(run_id, run_dir, teardown_s, spared(os.getpid()))
        receipt = end_dead_run(run, "owner and supervisor died", patient=False)
    except (OSError, LifecycleError) as error:
        raise PreflightError(f"run {run_id}: its last attempt cannot be ended: {error}") from None
    if receipt.survivors:
        raise PreflightError(f"{left_over(receipt)}; end it by hand, and try again")


def _take_over(run_id: str) -> None:
    me = identify(os.getpid())
    assert me is not None, "/proc shows the process that reads it"
    try:
        Registry.of_user().hand_over(run_id, me)
    except OSError as error:
        raise PreflightError(f"run {run_id}: the registry of runs: {error}") from None


def _put_aside(run_dir: Path, number: int) -> None:
    folder = run_dir / ATTEMPTS_FOLDER / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy2(run_dir / CONFIG_FILE, folder / CONFIG_FILE)
    for name in OF_ONE_ATTEMPT:
        if (run_dir / name).exists():
            os.replace(run_dir / name, folder / name)


def can_go_on(run_dir: Path) -> bool:
    """Whether a further attempt would find more than the original student."""
    recorded = (run_dir / BATCHES_FOLDER).glob("step-*.json")
    return newest_checkpoint(run_dir) is not None or any(recorded)
