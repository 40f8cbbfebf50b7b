"""A teacher server as an order to the supervisor."""

from __future__ import annotations

from pathlib import Path

from opd_core.config import ReplicaConfig
from opd_core.lifecycle.records import ChildSpec
from opd_core.serving.commands import server_command


def child_name(teacher: str, number: int) -> str:
    """``teacher-NAME``, and ``teacher-NAME-1`` and so on for further replicas."""
    return f"teacher-{teacher}" + (f"-{number}" if number else "")


def teacher_child(
    teacher: str,
    number: int,
    replica: ReplicaConfig,
    *,
    port: int,
    key: str | None,
    cwd: Path,
    log: Path,
    stop_order: int = 0,
) -> ChildSpec:
    """The order that starts replica ``number`` of a teacher on loopback ``port``.

    The key travels in the environment only. Raises ValueError for a replica without a ``launch``:
    a server that others started is not ours to start.
    """
    if replica.launch is None:
        raise ValueError(f"teacher {teacher!r}, replica {number}: an external server has no launch")
    command = server_command(
        replica.backend, replica.launch, name=teacher, port=port, keyed=key is not None
    )
    return ChildSpec(
        name=child_name(teacher, number),
        kind="teacher",
        argv=command.argv,
        env={**command.env, **({"OPD_API_KEY": key} if key is not None else {})},
        cwd=cwd,
        log=log,
        stop_signal=command.stop_signal,
        grace_s=command.grace_s,
        stop_order=stop_order,
        ports=(port,),
        ledger_argv=command.argv,
    )
