"""Teacher servers: launch, readiness that is proven by scoring, and starting one again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from opd_core.config import OPDTeacherConfig
from opd_core.errors import ServingError
from opd_core.scoring.facts import TeacherFacts, facts_to_json
from opd_core.scoring.proof import ScoringProof
from opd_core.serving.commands import uses_gpu
from opd_core.serving.readiness import (
    context_length,
    prove_again,
    prove_teacher,
    read_model_info,
)
from opd_core.serving.servers import (
    Server,
    needed_context,
    scoring_dtype,
    served_context,
    teacher_servers,
)
from opd_core.training.attempts import check_external_teachers
from opd_core.training.files import TEACHERS_FILE
from opd_core.whole_file import write_whole
from tasks.console import announce, warn
from tasks.names import awaiting_teachers, of_session, starting_teachers
from tasks.servers import await_again, await_start, start_again, start_server
from tasks.session import Session

EXTERNAL_LIMIT_S = 30.0
SERVED_BY = {"dtype", "tp_size", "extra_args", "env", "python"}
"""Settings of a launch that may change a frozen model's numbers."""


@task(name="start teachers", task_run_name=of_session(starting_teachers), cache_policy=NO_CACHE)
def start_teachers(session: Session) -> None:
    """Start every teacher server that the recipe launches; fill in where each replica answers."""
    opd = session.run.config.opd
    if opd is None:
        return
    started = {
        (server.teacher, server.number): start_server(session, server).endpoint
        for server in teacher_servers(opd)
    }
    placed = [
        teacher.with_endpoints(
            started.get((teacher.name, number)) or str(replica.endpoint)
            for number, replica in enumerate(teacher.all_replicas)
        )
        for teacher in opd.teachers
    ]
    session.replace_teachers(tuple(placed))


@task(name="wait for teachers", task_run_name=of_session(awaiting_teachers), cache_policy=NO_CACHE)
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


def restart_teacher(
    session: Session, server: Server, why: str, still_alive: Callable[[], None]
) -> None:
    """Start a replica that the run launched again, at its port if that is free.

    Returns when it is proven to be the teacher that it was, or has died again (a poison may wait
    for it). ``still_alive`` is called while it loads, and raises if the wait is in vain. Raises
    :class:`ServingError` when it was restarted ``launch.max_restarts`` times already, does not come
    up in time, or scores differently.
    """
    teacher = session.teacher(server)
    facts, key = session.teacher_facts[teacher.name], session.keys.get(teacher.name)
    again = start_again(session, server, why)
    endpoints = list(facts.endpoints)
    endpoints[server.number] = again.endpoint
    facts = session.teacher_facts[teacher.name] = replace(facts, endpoints=tuple(endpoints))
    _tell_facts(session)
    seconds = await_again(session, again, still_alive, key)
    if seconds is None:
        return
    if said := prove_again(teacher, facts, key, server.number):
        warn(f"{server.who} was up again at {again.endpoint}, but {said}")
        return
    announce(f"{server.who} is back at {again.endpoint} ({seconds:.0f} s), scoring as before")


def _await_teacher(session: Session, teacher: OPDTeacherConfig) -> TeacherFacts:
    key = session.keys.get(teacher.name)
    told: list[dict[str, Any]] = []
    for config in teacher.all_replicas:
        endpoint, backend = str(config.endpoint), config.backend
        limit_s = config.launch.startup_limit_s if config.launch else EXTERNAL_LIMIT_S
        seconds = await_start(session, endpoint, backend, limit_s, key)
        told.append(read_model_info(endpoint, backend, key))
        announce(f"teacher {teacher.name!r} is up at {endpoint} ({seconds:.0f} s)")
    facts = _facts(session, teacher, told)
    sequences = session.checked.proof_sequences
    proof = prove_teacher(teacher, facts, key, sequences, scoring_dtype(teacher))
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


def _facts(
    session: Session, teacher: OPDTeacherConfig, told: Sequence[dict[str, Any]]
) -> TeacherFacts:
    """Of a launched teacher from its model's files; of an external one from what its servers say,
    the least of them."""
    known = session.checked.teachers.get(teacher.name)
    if known is not None:
        shortest = served_context(teacher, known.context_length)
        fingerprint = f"{known.fingerprint}-{_how_it_is_served(teacher)}"
        return TeacherFacts(known.vocab_size, shortest, fingerprint=fingerprint)
    student = session.checked.student
    assert student is not None  # or the checks would have stopped the run
    # An id above the server's vocabulary can end it; the tokenizer's own ids are in any padded one.
    vocab_size = min(int(info.get("vocab_size") or student.tokenizer_size) for info in told)
    context = min(filter(None, map(context_length, told)), default=0)
    config = session.run.config
    needed = max(needed_context(config, replica.backend) for replica in teacher.all_replicas)
    if 0 < context < needed:
        raise ServingError(
            f"teacher {teacher.name!r}: its server says a context of {context} tokens; prompt + "
            f"response and what it keeps back need {needed}"
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
