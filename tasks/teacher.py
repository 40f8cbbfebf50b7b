"""Teacher servers: launch, readiness that is proven by scoring, and starting one again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from prefect import task
from prefect.cache_policies import NO_CACHE

from opd_core.config import CONTEXT_MARGIN, OPDTeacherConfig, ReplicaConfig
from opd_core.errors import ServingError
from opd_core.lifecycle.logs import log_tail
from opd_core.lifecycle.ports import port_is_free, reserve_ports
from opd_core.scoring.facts import TeacherFacts, facts_to_json
from opd_core.scoring.proof import ScoringProof
from opd_core.serving.child import child_name, teacher_child
from opd_core.serving.commands import HOST, START_RACE, uses_gpu
from opd_core.serving.readiness import (
    context_length,
    prove_again,
    prove_teacher,
    read_model_info,
    wait_until_healthy,
)
from opd_core.training.attempts import check_external_teachers
from opd_core.training.files import TEACHERS_FILE
from opd_core.whole_file import write_whole
from tasks.cluster import STOP_LAST
from tasks.console import announce, warn
from tasks.session import Session

TELL_EVERY_S = 30.0
EXTERNAL_LIMIT_S = 30.0
SERVED_BY = {"dtype", "tp_size", "extra_args", "env", "python"}
"""Settings of a launch that may change a frozen model's numbers."""


@task(name="start teachers", cache_policy=NO_CACHE)
def start_teachers(session: Session) -> None:
    """Start every teacher server that the recipe launches; fill in where each replica answers."""
    opd = session.run.config.opd
    if opd is None:
        return
    placed = [
        teacher.with_endpoints(
            _place(session, teacher, number, replica)
            for number, replica in enumerate(teacher.all_replicas)
        )
        for teacher in opd.teachers
    ]
    session.replace_teachers(tuple(placed))


@task(name="wait for teachers", cache_policy=NO_CACHE)
def await_teachers(session: Session) -> None:
    """Wait until every replica is healthy, then prove that it scores.

    Raises :class:`~opd_core.errors.ServingError`, at once and with the log's tail if a server dies.
    """
    opd = session.run.config.opd
    with session.stage("teachers_wait"):
        for teacher in opd.teachers if opd else ():
            session.teacher_facts[teacher.name] = _await_teacher(session, teacher)
    check_external_teachers(session.run.directory, session.teacher_facts)
    _tell_facts(session)


def restart_replica(
    session: Session,
    teacher: OPDTeacherConfig,
    number: int,
    why: str,
    still_alive: Callable[[], None],
) -> None:
    """Start a replica that the run launched again, at its port if that is free.

    Returns when it is proven to be the teacher that it was, or has died again (a poison may wait
    for it). ``still_alive`` is called while it loads, and raises if the wait is in vain. Raises
    :class:`ServingError` when it was restarted ``launch.max_restarts`` times already, does not come
    up in time, or scores differently.
    """
    config, child = teacher.all_replicas[number], child_name(teacher.name, number)
    facts = session.teacher_facts[teacher.name]
    endpoint = _start_again(session, teacher, number, facts.endpoints[number], why)
    endpoints = (*facts.endpoints[:number], endpoint, *facts.endpoints[number + 1 :])
    facts = session.teacher_facts[teacher.name] = replace(facts, endpoints=endpoints)
    _tell_facts(session)

    def in_vain() -> None:
        still_alive()
        session.still_alive(child)

    try:
        seconds = _wait(endpoint, config, in_vain, session.keys.get(teacher.name))
    except ServingError:
        if session.child_exit(child) is None:
            raise
        return
    if said := prove_again(teacher, facts, session.keys.get(teacher.name), number):
        warn(f"teacher {teacher.name!r} was up again at {endpoint}, but {said}")
        return
    announce(f"teacher {teacher.name!r} is back at {endpoint} ({seconds:.0f} s), scoring as before")


def _start_again(
    session: Session, teacher: OPDTeacherConfig, number: int, endpoint: str, why: str
) -> str:
    """Stop and start a replica's process; the new endpoint."""
    config, child = teacher.all_replicas[number], child_name(teacher.name, number)
    assert config.launch is not None  # external servers are never restarted
    done, limit = session.restarts.get(child, 0), config.launch.max_restarts
    said = f"teacher {teacher.name!r} at {endpoint} {why}"
    if done >= limit:
        raise ServingError(
            f"{said}; it was started again {done} times already (launch.max_restarts); its log "
            f"ends:\n{log_tail(session.run.log(child))}"
        )
    session.restarts[child] = done + 1
    warn(f"{said}; starting it again ({done + 1} of {limit})")
    session.stop(child)
    port = urlsplit(endpoint).port
    free = port is not None and port_is_free(port)
    return _launch(session, teacher, number, config, port if free else None)


def _await_start(session: Session, config: ReplicaConfig, api_key: str | None) -> float:
    """Wait until a replica is healthy. If any of them dies meanwhile of a known race of its own
    start, it is started again, at its port."""
    while True:
        try:
            return _wait(str(config.endpoint), config, session.still_alive, api_key)
        except ServingError:
            if not _raced(session):
                raise


def _raced(session: Session) -> bool:
    """Whether a server lost a race of its own start; it is then on its way again."""
    opd = session.run.config.opd
    for teacher in opd.teachers if opd else ():
        for number, config in enumerate(teacher.all_replicas):
            child, race = child_name(teacher.name, number), START_RACE.get(config.backend)
            if config.launch is None or race is None or session.child_exit(child) is None:
                continue
            endpoint, why = str(config.endpoint), f"did not start ({race})"
            if race in log_tail(session.run.log(child)):
                # Somebody else may have its port by now: then it is lost.
                return _start_again(session, teacher, number, endpoint, why) == endpoint
    return False


def _await_teacher(session: Session, teacher: OPDTeacherConfig) -> TeacherFacts:
    key = session.keys.get(teacher.name)
    told: list[dict[str, Any]] = []
    for config in teacher.all_replicas:
        seconds = _await_start(session, config, key)
        told.append(read_model_info(str(config.endpoint), config.backend, key))
        announce(f"teacher {teacher.name!r} is up at {config.endpoint} ({seconds:.0f} s)")
    facts = _facts(session, teacher, told)
    sequences = session.checked.proof_sequences
    proof = prove_teacher(teacher, facts, key, sequences, _dtype(teacher))
    announce(_told(teacher, proof))
    return replace(
        facts,
        endpoints=tuple(str(config.endpoint) for config in teacher.all_replicas),
        canaries=proof.canaries,
        tolerance=proof.tolerance,
    )


def _told(teacher: OPDTeacherConfig, proof: ScoringProof) -> str:
    return (
        f"teacher {teacher.name!r} scores: {proof.tokens} tokens, repeated within "
        f"{proof.spread:.1e} nats"
    )


def _tell_facts(session: Session) -> None:
    """Write them for the training job."""
    write_whole(session.run.directory / TEACHERS_FILE, facts_to_json(session.teacher_facts))


def _place(session: Session, teacher: OPDTeacherConfig, number: int, config: ReplicaConfig) -> str:
    """The replica's endpoint; started here if the recipe launches it."""
    if config.launch is None:
        assert config.endpoint is not None  # the configuration refuses neither
        return config.endpoint
    port = urlsplit(config.endpoint).port if config.endpoint else config.launch.port
    endpoint = _launch(session, teacher, number, config, port)
    devices = ", ".join(config.launch.devices)
    announce(f"starting teacher {teacher.name!r}: {config.backend} on {devices}")
    return endpoint


def _launch(
    session: Session,
    teacher: OPDTeacherConfig,
    number: int,
    config: ReplicaConfig,
    port: int | None,
) -> str:
    """Start a replica's process, at a free port where none is given; its endpoint."""
    if port is None:
        with reserve_ports(1) as reserved:
            (port,) = reserved.ports
    name = child_name(teacher.name, number)
    session.spawn(
        teacher_child(
            teacher.name,
            number,
            config,
            port=port,
            key=session.keys.get(teacher.name),
            cwd=session.run.directory,
            log=session.run.log(name),
            stop_order=STOP_LAST,
        )
    )
    return f"http://{HOST}:{port}"


def _wait(
    endpoint: str,
    config: ReplicaConfig,
    still_alive: Callable[[], None],
    api_key: str | None,
) -> float:
    return wait_until_healthy(
        endpoint,
        config.backend,
        api_key=api_key,
        limit_s=config.launch.startup_limit_s if config.launch else EXTERNAL_LIMIT_S,
        still_alive=still_alive,
        waiting=_patiently(endpoint),
    )


def _patiently(endpoint: str) -> Callable[[float, str], None]:
    """Tells every half minute that the wait goes on, and what the server says."""
    told = 0.0

    def waiting(seconds: float, state: str) -> None:
        nonlocal told
        if seconds - told >= TELL_EVERY_S:
            told = seconds
            announce(f"  {endpoint} is still starting after {seconds:.0f} s ({state})")

    return waiting


def _facts(
    session: Session, teacher: OPDTeacherConfig, told: Sequence[dict[str, Any]]
) -> TeacherFacts:
    """Of a launched teacher from its model's files; of an external one from what its servers say,
    the least of them."""
    known = session.checked.teachers.get(teacher.name)
    if known is not None:
        named = (r.launch.context_length for r in teacher.all_replicas if r.launch)
        shortest = min(filter(None, named), default=known.context_length)
        fingerprint = f"{known.fingerprint}-{_how_it_is_served(teacher)}"
        return TeacherFacts(known.vocab_size, shortest, fingerprint=fingerprint)
    student = session.checked.student
    assert student is not None  # or the checks would have stopped the run
    # An id above the server's vocabulary can end it; the tokenizer's own ids are in any padded one.
    vocab_size = min(int(info.get("vocab_size") or student.tokenizer_size) for info in told)
    context = min(filter(None, map(context_length, told)), default=0)
    config = session.run.config
    margin = max(CONTEXT_MARGIN[replica.backend] for replica in teacher.all_replicas)
    needed = config.data.max_prompt_tokens + config.sampling.max_new_tokens + margin
    if 0 < context < needed:
        raise ServingError(
            f"teacher {teacher.name!r}: its server says a context of {context} tokens; prompt + "
            f"response + {margin} need {needed}"
        )
    return TeacherFacts(vocab_size, context)


def _how_it_is_served(teacher: OPDTeacherConfig) -> str:
    """Hash of all that may change a launched teacher's numbers besides its weights."""
    replicas = [
        (r.backend, uses_gpu(r.launch), r.launch.model_dump(mode="json", include=SERVED_BY))
        for r in teacher.all_replicas
        if r.launch
    ]
    return hashlib.sha256(json.dumps(replicas, sort_keys=True).encode()).hexdigest()[:8]


def _dtype(teacher: OPDTeacherConfig) -> str:
    named = {r.launch.dtype if r.launch else None for r in teacher.all_replicas}
    return "float32" if named == {"float32"} else "bfloat16"
