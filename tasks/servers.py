"""Servers that the run starts, whatever they serve: launching one, waiting for it, starting it
again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from opd_core.config import Backend
from opd_core.errors import ServingError
from opd_core.lifecycle.logs import log_tail
from opd_core.lifecycle.ports import port_is_free, reserve_ports
from opd_core.serving.child import server_child
from opd_core.serving.commands import START_RACE
from opd_core.serving.readiness import wait_until_healthy
from opd_core.serving.servers import Server
from tasks.cluster import STOP_FIRST, STOP_LAST
from tasks.console import announce, warn
from tasks.session import Session

TELL_EVERY_S = 30.0


def start_server(session: Session, server: Server) -> Server:
    """Start a server of the recipe; the same with its port."""
    started = _launch(session, server)
    devices = ", ".join(server.launch.devices)
    announce(f"starting {server.who}: {server.backend} on {devices}")
    return started


def start_again(
    session: Session, server: Server, why: str, *, moves: bool = False, counts: bool = True
) -> Server:
    """Stop a server's process and start it anew; the same with its port, the old one if that is
    free and the server does not move.

    Raises :class:`ServingError` when it was started again ``max_restarts`` times already, unless
    this one does not count.
    """
    done, limit = session.restarts.get(server.child, 0), server.launch.max_restarts
    said, which = f"{server.who} at {server.endpoint} {why}", ""
    if counts and done >= limit:
        raise ServingError(
            f"{said}; it was started again {done} times already ({server.settings}.max_restarts); "
            f"its log ends:\n{log_tail(session.run.log(server.child))}"
        )
    if counts:
        session.restarts[server.child] = done + 1
        which = f" ({done + 1} of {limit})"
    warn(f"{said}; starting it again{which}")
    session.stop(server.child)
    if moves:
        return _launch(session, replace(server, port=_another_port(server.port)))
    free = server.port is not None and port_is_free(server.port)
    return _launch(session, server if free else replace(server, port=None))


def await_start(
    session: Session, endpoint: str, backend: Backend, limit_s: float, key: str | None = None
) -> float:
    """Wait until a server is healthy; seconds that it took. If any server of the run dies meanwhile
    of a known race of its own start, it is started again, at its port. Raises
    :class:`ServingError`, at once and with the log's tail if one dies of anything else."""
    while True:
        try:
            return _wait(endpoint, backend, limit_s, session.still_alive, key)
        except ServingError:
            if not _raced(session):
                raise


def await_again(
    session: Session,
    server: Server,
    still_alive: Callable[[], None],
    key: str | None = None,
    limit_s: float | None = None,
) -> float | None:
    """Wait for a server that was started again, for ``limit_s`` or as long as it may take to start;
    None if it has died again (a poison may wait for it). ``still_alive`` is called meanwhile, and
    raises if the wait is in vain."""

    def in_vain() -> None:
        still_alive()
        session.still_alive(server.child)

    limit_s = limit_s or server.launch.startup_limit_s
    try:
        return _wait(server.endpoint, server.backend, limit_s, in_vain, key)
    except ServingError:
        if session.child_exit(server.child) is None:
            raise
        return None


def death(session: Session, server: Server) -> str:
    """How a server has died, as a message goes on after its name; empty while it lives."""
    returncode = session.child_exit(server.child)
    return "" if returncode is None else f"has died (return code {returncode})"


def _another_port(port: int | None) -> int:
    with reserve_ports(2) as reserved:
        return next(other for other in reserved.ports if other != port)


def _launch(session: Session, server: Server) -> Server:
    if server.port is None:
        with reserve_ports(1) as reserved:
            server = replace(server, port=reserved.ports[0])
    assert server.port is not None
    session.spawn(
        server_child(
            server,
            port=server.port,
            key=session.keys.get(server.teacher or ""),
            cwd=session.run.directory,
            log=session.run.log(server.child),
            stop_order=STOP_LAST if server.teacher else STOP_FIRST,
            secrets=session.secrets,
        )
    )
    session.servers[server.child] = server
    return server


def _raced(session: Session) -> bool:
    """Whether a server lost a race of its own start; it is then on its way again."""
    for server in session.servers.values():
        race = START_RACE.get(server.backend)
        if race is None or session.child_exit(server.child) is None:
            continue
        if race in log_tail(session.run.log(server.child)):
            # Somebody else may have its port by now: then it is lost.
            return start_again(session, server, f"did not start ({race})").port == server.port
    return False


def _wait(
    endpoint: str,
    backend: Backend,
    limit_s: float,
    still_alive: Callable[[], None],
    key: str | None,
) -> float:
    return wait_until_healthy(
        endpoint,
        backend,
        api_key=key,
        limit_s=limit_s,
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
