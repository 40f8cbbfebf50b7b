"""Stands in for Ray's head, a teacher and an evaluation server: small real families of processes.

argv: role, the scene's folder, ports. Each process enters itself in the folder's `born` ("name pid
start_ticks") when it is ready, and goes on when the file named after a moment is there.

    ray ─┬─ gcs (listens)                        teacher ─┬─ scheduler-0, scheduler-1
         ├─ raylet ─┬─ actor ── writer                    └· detokenizer
         │          └─ rank (own session)
         └· bare (no environment)                evaluation ── · grader

Those behind a dot are double-forked, in a session of their own, and ignore SIGTERM and SIGINT.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

POLL_S = 0.01
HEARD = "ray was told to stop"
GO_ON = "go on"
BARE = "with a bare process"
DEAF = "with a deaf teacher"
IDLE = "STANDIN_IDLE"


class Family:
    """What the processes of one server share: the scene's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def is_there(self, name: str) -> bool:
        return (self.folder / name).exists()

    def enter(self, name: str) -> None:
        ticks = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
        born = os.open(self.folder / "born", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(born, f"{name} {os.getpid()} {ticks}\n".encode())
        os.close(born)

    def fork(self, name: str, body: Callable[[], object]) -> int:
        """Start a child that is killed by SIGTERM."""
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self.enter(name)
            body()
            os._exit(0)
        return pid

    def detach(self, body: Callable[[], object]) -> None:
        """Start a process that leaves the family, its session and the terminal's signals."""
        pid = os.fork()
        if pid == 0:
            os.setsid()
            if os.fork() == 0:
                _be_deaf()
                body()
            os._exit(0)
        os.waitpid(pid, 0)

    def ray(self, port: int) -> NoReturn:
        """As `ray start --block`: ends with status 1 when one of its processes has ended."""
        told: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
        if self.is_there(BARE):
            self.detach(self._become_bare)
        self.fork("gcs", lambda: _serve(port))
        self.fork("raylet", self._raylet)
        self.enter("ray")
        while os.waitpid(-1, os.WNOHANG)[0] == 0:
            if told and not self.is_there(HEARD):
                (self.folder / HEARD).touch()
            if told and (self.is_there(GO_ON) or not self.is_there("teardown")):
                sys.exit(0)
            time.sleep(POLL_S)
        sys.exit(1)

    def teacher(self, port: int, sync_port: int) -> NoReturn:
        if self.is_there(DEAF):
            _be_deaf()
        else:
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
        self.detach(lambda: self._rest_as("detokenizer"))
        self.fork("scheduler-0", _rest)
        self.fork("scheduler-1", _rest)
        self.enter("teacher")
        self._await("readiness")
        listening = [_listen(port)]
        self._await("weight sync")
        listening.append(_listen(sync_port))
        _rest()

    def evaluation(self, port: int) -> NoReturn:
        self.detach(lambda: self._rest_as("grader"))
        listening = _listen(port)
        self._rest_as("evaluation")
        raise AssertionError(listening)

    def bare(self) -> NoReturn:
        self._rest_as("bare")
        raise AssertionError

    def _raylet(self) -> None:
        self.fork("actor", self._actor)
        self._await("training")
        self.fork("rank", _rest_in_own_session)
        _rest()

    def _actor(self) -> None:
        self._await("checkpoint")
        self.fork("writer", _rest)
        _rest()

    def _become_bare(self) -> None:
        command = [sys.executable, "-I", "-S", __file__, "bare", str(self.folder)]
        os.execve(sys.executable, command, {})

    def _rest_as(self, name: str) -> None:
        self.enter(name)
        _rest()

    def _await(self, moment: str) -> None:
        while not self.is_there(moment):
            time.sleep(POLL_S)


def _be_deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _rest() -> NoReturn:
    while True:
        signal.pause()


def _rest_in_own_session() -> NoReturn:
    os.setsid()
    _rest()


def _listen(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def _serve(port: int) -> NoReturn:
    listening = _listen(port)
    _rest()
    raise AssertionError(listening)


def main(role: str, folder: str, *ports: str) -> None:
    if IDLE in os.environ:
        _rest()
    play: Callable[..., object] = getattr(Family(Path(folder)), role)
    play(*(int(port) for port in ports))


if __name__ == "__main__":
    main(*sys.argv[1:])
