"""JSON objects, one per line, over a socket pair; neither end ever blocks on the other."""

from __future__ import annotations

import json
import select
import socket

from .records import JsonObject

_CHUNK = 65536


class Channel:
    """One end of the control line between owner and supervisor.

    A line that is no JSON object is dropped: an exception in the owner may have torn it, and then
    nobody waits for its answer.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._incoming = b""
        self._outgoing = b""
        self.at_end = False
        """True once the other end is closed."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> list[JsonObject]:
        """Return the messages that have arrived whole, without waiting."""
        while not self.at_end:
            try:
                chunk = self._socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            self.at_end = not chunk
            self._incoming += chunk
        *lines, self._incoming = self._incoming.split(b"\n")
        return [message for line in lines if (message := _parse(line)) is not None]

    def send(self, message: JsonObject) -> None:
        """Queue a message and send what the other end has room for; a closed end swallows it."""
        self._outgoing += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> bool:
        """Send what is queued, without waiting; return whether nothing is queued any more."""
        while self._outgoing:
            try:
                sent = self._socket.send(self._outgoing)
            except BlockingIOError:
                return False
            except OSError:
                self._outgoing = b""
                return True
            self._outgoing = self._outgoing[sent:]
        return True

    def wait(self, timeout_s: float, also: int | None = None) -> None:
        """Wait until there is something to receive or to send on, or `also` is readable."""
        poller = select.poll()
        if not self.at_end:
            poller.register(self, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        if also is not None:
            poller.register(also, select.POLLIN)
        poller.poll(max(0.0, timeout_s) * 1000)

    def close(self) -> None:
        self.at_end = True
        self._socket.close()


def _parse(line: bytes) -> JsonObject | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
