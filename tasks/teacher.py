"""Teacher servers: launch, and readiness that is proven by scoring."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from urllib.parse import urlsplit

from prefect import task
from prefect.cache_policies import NO_CACHE

from opd_core.config import CONTEXT_MARGIN, OPDTeacherConfig, ReplicaConfig
from opd_core.errors import ServingError
from opd_core.lifecycle.ports import reserve_ports
from opd_core.lifecycle.records import ChildSpec
from opd_core.scoring.client import TeacherFacts
from opd_core.scoring.proof import TOLERANCE
from opd_core.serving.commands import HOST, server_command
from opd_core.serving.readiness import prove_teacher, read_model_info, wait_until_healthy
from opd_core.training.files import TEACHERS_FILE
from tasks.cluster import STOP_LAST
from tasks.console import announce
from tasks.environment import write_config
from tasks.session import Session

TELL_EVERY_S = 30.0


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
    write_config(session.run)


@task(name="wait for teachers", cache_policy=NO_CACHE)
def await_teachers(session: Session) -> None:
    """Wait until every replica is healthy, then prove that it scores.

    Raises :class:`~opd_core.errors.ServingError`, at once and with the log's tail if a server dies.
    """
    opd = session.run.config.opd
    facts: dict[str, TeacherFacts] = {}
    with session.stage("teachers_wait"):
        for teacher in opd.teachers if opd else ():
            facts[teacher.name] = _await_teacher(session, teacher)
    told = {name: asdict(fact) for name, fact in facts.items()}
    (session.run.directory / TEACHERS_FILE).write_text(json.dumps(told), encoding="utf-8")


def _await_teacher(session: Session, teacher: OPDTeacherConfig) -> TeacherFacts:
    key = session.keys.get(teacher.name)
    for replica in teacher.all_replicas:
        seconds = _wait(session, replica)
        info = read_model_info(str(replica.endpoint), replica.backend, key)
        session.teacher_info[teacher.name] = info
        announce(f"teacher {teacher.name!r} is up at {replica.endpoint} ({seconds:.0f} s)")
    facts = _facts(session, teacher)
    sequences, tolerance = session.checked.proof_sequences, TOLERANCE[_dtype(teacher)]
    proof = prove_teacher(teacher, facts, key, sequences, tolerance)
    announce(
        f"teacher {teacher.name!r} scores: {proof.tokens} tokens, repeated within "
        f"{proof.largest_difference:.1e} nats"
    )
    return facts


def _place(session: Session, teacher: OPDTeacherConfig, number: int, replica: ReplicaConfig) -> str:
    """The replica's endpoint; started here if the recipe launches it."""
    launch = replica.launch
    if launch is None:
        assert replica.endpoint is not None  # the configuration refuses neither
        return replica.endpoint
    port = urlsplit(replica.endpoint).port if replica.endpoint else launch.port
    if port is None:
        with reserve_ports(1) as reserved:
            (port,) = reserved.ports
    key = session.keys.get(teacher.name)
    command = server_command(
        replica.backend, launch, name=teacher.name, port=port, keyed=key is not None
    )
    name = f"teacher-{teacher.name}" + (f"-{number}" if number else "")
    session.spawn(
        ChildSpec(
            name=name,
            kind="teacher",
            argv=command.argv,
            env={**command.env, **({"OPD_API_KEY": key} if key else {})},
            cwd=session.run.directory,
            log=session.run.log(name),
            stop_signal="SIGINT" if command.stop_signal == "SIGINT" else "SIGTERM",
            grace_s=command.grace_s,
            stop_order=STOP_LAST,
            ports=(port,),
            ledger_argv=command.argv,
        )
    )
    announce(f"starting teacher {teacher.name!r}: {replica.backend} on {', '.join(launch.devices)}")
    return f"http://{HOST}:{port}"


def _wait(session: Session, replica: ReplicaConfig) -> float:
    limit_s = replica.launch.startup_limit_s if replica.launch else 30.0
    return wait_until_healthy(
        str(replica.endpoint),
        replica.backend,
        limit_s=limit_s,
        still_alive=session.still_alive,
        waiting=_patiently(str(replica.endpoint)),
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


def _facts(session: Session, teacher: OPDTeacherConfig) -> TeacherFacts:
    """Of a launched teacher from its model's files; of an external one from what it says."""
    known = session.checked.teachers.get(teacher.name)
    if known is not None:
        named = (r.launch.context_length for r in teacher.all_replicas if r.launch)
        shortest = min(filter(None, named), default=known.context_length)
        return TeacherFacts(known.vocab_size, shortest)
    info, student = session.teacher_info[teacher.name], session.checked.student
    assert student is not None  # or the checks would have stopped the run
    # An id above the server's vocabulary can end it; the tokenizer's own ids are in any padded one.
    vocab_size = int(info.get("vocab_size") or student.tokenizer_size)
    context = int(info.get("context_length") or info.get("max_model_len") or 0)
    config = session.run.config
    margin = max(CONTEXT_MARGIN[replica.backend] for replica in teacher.all_replicas)
    needed = config.data.max_prompt_tokens + config.sampling.max_new_tokens + margin
    if 0 < context < needed:
        raise ServingError(
            f"teacher {teacher.name!r}: its server says a context of {context} tokens; prompt + "
            f"response + {margin} need {needed}"
        )
    return TeacherFacts(vocab_size, context)


def _dtype(teacher: OPDTeacherConfig) -> str:
    named = {r.launch.dtype if r.launch else None for r in teacher.all_replicas}
    return "float32" if named == {"float32"} else "bfloat16"
