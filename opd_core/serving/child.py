"""A server as an order to the supervisor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from opd_core.config.values import KEY_REFERENCE
from opd_core.errors import ServingError
from opd_core.lifecycle.records import ChildSpec
from opd_core.serving.commands import server_command
from opd_core.serving.servers import Server

NO_SECRETS: Mapping[str, str] = MappingProxyType({})


def server_child(
    server: Server,
    *,
    port: int,
    key: str | None,
    cwd: Path,
    log: Path,
    stop_order: int = 0,
    secrets: Mapping[str, str] = NO_SECRETS,
) -> ChildSpec:
    """The order that starts a server on loopback ``port``. Its key and the ``secrets`` that its
    environment refers to (by reference) travel in the environment only.

    Raises :class:`ServingError` for a reference that is not among them.
    """
    command = server_command(
        server.backend,
        server.launch,
        name=server.teacher or "student",
        port=port,
        keyed=key is not None,
        sampling=server.sampling,
    )
    environment = {
        name: _found(value, secrets, f"{server.who}: {server.settings}.env.{name}")
        for name, value in command.env.items()
    }
    return ChildSpec(
        name=server.child,
        kind=server.kind,
        argv=command.argv,
        env=environment | ({"OPD_API_KEY": key} if key is not None else {}),
        cwd=cwd,
        log=log,
        stop_signal=command.stop_signal,
        grace_s=command.grace_s,
        stop_order=stop_order,
        ports=(port,),
        devices=server.launch.devices,
        ledger_argv=command.argv,
    )


def _found(value: str, secrets: Mapping[str, str], where: str) -> str:
    if not KEY_REFERENCE.fullmatch(value):
        return value
    if value not in secrets:
        raise ServingError(f"{where}: {value} was not looked up before the server's start")
    return secrets[value]
