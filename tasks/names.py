"""What Prefect calls the runs of the tasks: what happens, to whom, where."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from opd_core.serving.servers import Server, student_servers, teacher_servers
from opd_core.tracking.shipper import without_credentials
from tasks.session import Session

MOST = 3
"""Servers that a name tells of."""


def of_session(name: Callable[[Session], str]) -> Callable[[], str]:
    """A task run's name, made from the session that the task gets."""

    def named(parameters: dict[str, Any]) -> str:
        return name(parameters["session"])

    return named  # type: ignore[return-value]  # Prefect's type knows no names with parameters


def starting_teachers(session: Session) -> str:
    """``start teacher 'teacher': embedded on cpu``."""
    opd = session.run.config.opd
    launched = teacher_servers(opd)
    if launched:
        return f"start {_servers(launched)}"
    return "no teacher to start: they run already" if opd else "no teacher to start"


def awaiting_teachers(session: Session) -> str:
    """``wait until teacher 'teacher' scores``."""
    opd = session.run.config.opd
    names = _listed([repr(teacher.name) for teacher in opd.teachers]) if opd else ""
    return f"wait until teacher {names} scores" if names else "no teacher to wait for"


def starting_samplers(session: Session) -> str:
    """``start student server 0: sglang on 2``."""
    servers = student_servers(session.run.config)
    return f"start {_servers(servers)}" if servers else "no student server to start: actors sample"


def awaiting_samplers(session: Session) -> str:
    """``wait for 2 student servers``."""
    count = len(student_servers(session.run.config))
    return f"wait for {count} student servers" if count else "no student server to wait for"


def starting_cluster(session: Session) -> str:
    """``start a private Ray head``, or the cluster's address."""
    address = session.run.config.ray.address
    if address is None:
        return "start a private Ray head"
    return f"use the Ray cluster at {without_credentials(address)}"


def training(session: Session) -> str:
    """``train tiny for 50 steps on cpu``."""
    config = session.run.config
    devices = _listed(config.student.devices)
    return f"train {config.name} for {config.training.steps} steps on {devices}"


def _servers(servers: Iterable[Server]) -> str:
    return _listed(
        [f"{s.who}: {s.backend} on {', '.join(s.launch.devices)}" for s in servers], "; "
    )


def _listed(names: Iterable[str], between: str = ", ") -> str:
    shown = list(names)
    more = f" and {len(shown) - MOST} more" if len(shown) > MOST else ""
    return between.join(shown[:MOST]) + more
