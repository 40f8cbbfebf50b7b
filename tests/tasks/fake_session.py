"""A session whose supervisor starts nothing: a server of it is a socket that says that it is
well."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opd_core.lifecycle.errors import ChildDied
from opd_core.lifecycle.records import ChildSpec
from tasks.session import Session


class Health(BaseHTTPRequestHandler):
    """Every path is well."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@dataclass
class FakeSupervisor:
    """Children by name; ``ordered`` are all orders in turn. The ``silent`` do not answer yet."""

    ordered: list[ChildSpec] = field(default_factory=list)
    notes: list[dict[str, object]] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    sockets: dict[str, ThreadingHTTPServer] = field(default_factory=dict)

    def note(self, event: str, **facts: object) -> None:
        self.notes.append({"event": event, **facts})

    def spawn(self, spec: ChildSpec) -> None:
        self.ordered.append(spec)
        self.dead.discard(spec.name)
        if spec.name not in self.silent:
            self.speak(spec.name)

    def speak(self, name: str) -> None:
        """Let one answer from now on, where it was ordered last."""
        port = next(spec.ports[0] for spec in reversed(self.ordered) if spec.name == name)
        socket = self.sockets[name] = ThreadingHTTPServer(("127.0.0.1", port), Health)
        threading.Thread(target=socket.serve_forever, args=(0.01,)).start()

    def die(self, name: str) -> None:
        self.dead.add(name)
        self.stop(name)

    def stop(self, name: str) -> None:
        self.stopped.append(name)
        if socket := self.sockets.pop(name, None):
            socket.shutdown()
            socket.server_close()

    def child_exit(self, name: str) -> int | None:
        return 1 if name in self.dead else None

    def raise_if_dead(self, *names: str, but: Collection[str] = ()) -> None:
        for name in names or {spec.name for spec in self.ordered} - set(but):
            if name in self.dead:
                raise ChildDied(name, 1, "its.log", "the end of its log")


@dataclass
class Started:
    """A session and the supervisor beneath it."""

    session: Session
    supervisor: FakeSupervisor


MakeSession = Callable[..., Started]
"""A session of the tiny recipe with these overrides."""
