"""How each server of a run is, in a table: the teachers' and the student's own."""

from __future__ import annotations

from collections.abc import Mapping

from opd_core.config import Backend, LaunchConfig, OPDTeacherConfig, ReplicaConfig
from opd_core.scoring.facts import TeacherFacts
from opd_core.scoring.state import ReplicaState, ScoringState
from opd_core.serving.servers import Server
from opd_core.tracking.shipper import without_credentials
from tasks.session import Session

Row = dict[str, str]


def health_rows(
    session: Session, states: Mapping[str, ScoringState], latency_s: float | None
) -> list[Row]:
    """A row for each replica of each teacher, then for each server that samples the student.

    ``states`` are those of the training job, empty before it scores; ``latency_s`` is the mean
    time of an answer in the last train step, over all teachers.
    """
    config = session.run.config
    rows: list[Row] = []
    for teacher in config.opd.teachers if config.opd else ():
        state = states.get(teacher.name)
        for number, replica in enumerate(teacher.all_replicas):
            seen = state.replicas[number] if state else None
            rows.append(_teacher_row(session, teacher, replica, number, seen, latency_s))
    samplers = [server for server in list(session.servers.values()) if server.teacher is None]
    return rows + [_sampler_row(session, server) for server in samplers]


def _teacher_row(
    session: Session,
    teacher: OPDTeacherConfig,
    replica: ReplicaConfig,
    number: int,
    seen: ReplicaState | None,
    latency_s: float | None,
) -> Row:
    facts = session.teacher_facts.get(teacher.name)
    endpoints = facts.endpoints if facts else ()
    endpoint = endpoints[number] if number < len(endpoints) else str(replica.endpoint or "")
    server = next(
        (
            server
            for server in list(session.servers.values())
            if (server.teacher, server.number) == (teacher.name, number)
        ),
        None,
    )
    return {
        "server": f"teacher {teacher.name}" + (f", replica {number}" if number else ""),
        "state": _state(session, server, seen, proven=facts is not None),
        "served by": _served_by(replica.backend, replica.launch),
        "answer": "" if latency_s is None else f"{1000 * latency_s:.0f} ms",
        "restarts": _restarts(session, server),
        "endpoint": without_credentials(endpoint or (server.endpoint if server else "")),
        "proof": _proof(facts),
    }


def _sampler_row(session: Session, server: Server) -> Row:
    state = "given up" if server.child in session.given_up else "samples the student"
    if server.child in session.loading:
        state = "loading"
    return {
        "server": server.who,
        "state": state if session.child_exit(server.child) is None else "dead",
        "served by": _served_by(server.backend, server.launch),
        "answer": "",
        "restarts": _restarts(session, server),
        "endpoint": server.endpoint,
        "proof": "",
    }


def _state(
    session: Session, server: Server | None, seen: ReplicaState | None, *, proven: bool
) -> str:
    if server is not None and session.child_exit(server.child) is not None:
        return "dead"
    if seen is not None and seen.away:
        return f"away: {seen.away}"
    if seen is not None and seen.in_flight:
        return f"scoring, {seen.in_flight} under way"
    return "proven" if proven else "starting"


def _proof(facts: TeacherFacts | None) -> str:
    count = len(facts.canaries) if facts else 0
    return f"{count} known sequence{'s' * (count > 1)}" if count else ""


def _served_by(backend: Backend, launch: LaunchConfig | None) -> str:
    return f"{backend} on {', '.join(launch.devices)}" if launch else f"{backend}, external"


def _restarts(session: Session, server: Server | None) -> str:
    if server is None:
        return ""
    return f"{session.restarts.get(server.child, 0)} of {server.launch.max_restarts}"
