"""Loopback ports: reserve free ones before a server starts, prove them free after it ended."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from .errors import LifecycleError

LOOPBACK = "127.0.0.1"
_LOWEST, _HIGHEST = 20000, 60999  # above Ray's worker ports (10002-19999)
_ATTEMPTS_PER_PORT = 200


class PortReservation:
    """Ports held by bound sockets until `release`, so that no two servers are given the same one.

    Release just before the server is started. The numbers lie outside the range from which the
    kernel serves outgoing connections wherever that range leaves room, because a server that loads
    a model binds its port minutes later.
    """

    def __init__(self, sockets: tuple[socket.socket, ...]) -> None:
        self._sockets = sockets
        self.ports: tuple[int, ...] = tuple(sock.getsockname()[1] for sock in sockets)

    def release(self) -> None:
        """Let the ports go. May be called again."""
        for sock in self._sockets:
            sock.close()

    def __enter__(self) -> PortReservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def reserve_ports(count: int, among: Sequence[int] | None = None) -> PortReservation:
    """Reserve `count` different free loopback ports, `among` these if any are given.

    Raises LifecycleError if not enough free ports were found.
    """
    held: list[socket.socket] = []
    candidates = _candidates() if among is None else among
    # Not the global generator: drawing a port must not change the run's random numbers.
    draw = random.SystemRandom()
    for _ in range(count * _ATTEMPTS_PER_PORT):
        if len(held) == count:
            break
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.bind((LOOPBACK, draw.choice(candidates)))
        except OSError:
            sock.close()
        else:
            held.append(sock)
    reservation = PortReservation(tuple(held))
    if len(held) < count:
        reservation.release()
        raise LifecycleError(
            f"expected {count} free loopback ports between {min(candidates)} and "
            f"{max(candidates)}, found {len(held)}; end servers that are no longer needed"
        )
    return reservation


def port_is_free(port: int, host: str = LOOPBACK) -> bool:
    """Return whether a server could listen on the port now.

    The address may be reused, as servers do, so that connections in TIME_WAIT do not count.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(1)
        except OSError:
            return False
    return True


def _candidates() -> range:
    first_ephemeral = _first_ephemeral_port()
    if first_ephemeral - _LOWEST >= 1000:
        return range(_LOWEST, min(first_ephemeral, _HIGHEST + 1))
    return range(_LOWEST, _HIGHEST + 1)


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return _LOWEST
