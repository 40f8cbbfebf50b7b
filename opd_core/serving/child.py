"""A server as an order to the supervisor."""

from __future__ import annotations

from pathlib import Path

from opd_core.lifecycle.records import ChildSpec
from opd_core.serving.commands import server_command
from opd_core.serving.servers import Server


def server_child(
    server: Server, *, port: int, key: str | None, cwd: Path, log: Path, stop_order: int = 0
) -> ChildSpec:
    """The order that starts a server on loopback ``port``; its key travels in the environment
    only."""
    command = server_command(
        server.backend,
        server.launch,
        name=server.teacher or "student",
        port=port,
        keyed=key is not None,
        sampling=server.sampling,
    )
    return ChildSpec(
        name=server.child,
        kind=server.kind,
        argv=command.argv,
        env={**command.env, **({"OPD_API_KEY": key} if key is not None else {})},
        cwd=cwd,
        log=log,
        stop_signal=command.stop_signal,
        grace_s=command.grace_s,
        stop_order=stop_order,
        ports=(port,),
        devices=server.launch.devices,
        ledger_argv=command.argv,
    )
