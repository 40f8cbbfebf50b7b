"""What a supervisor watches while it waits: its owner's words and death, signals, the deadline."""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable

from .channel import Channel
from .order import RunOrder
from .process import ProcessId, identify, open_pidfd, wait_pidfd
from .records import JsonObject
from .signals import SignalPipe

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TURN_S = 1.0
_UNSENT_TURN_S = 0.05
# A dying process closes its sockets a moment before it counts as dead.
_OWNER_DEATH_S = 0.5


class Watch:
    """Takes note of what happens; what the owner said is only put aside, in `inbox`."""

    def __init__(self, order: RunOrder, channel: Channel) -> None:
        self.inbox: deque[JsonObject] = deque()
        self._channel = channel
        self._deadline = time.monotonic() + (order.deadline_s or math.inf)
        self._signal: signal.Signals | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, self._read_requests)
        self._signals = SignalPipe(signal.SIGCHLD, *STOP_SIGNALS)
        self._selector.register(self._signals, selectors.EVENT_READ, self._read_signals)
        self._owner_fd = _open_owner(order.owner)
        self._owner_died = self._owner_fd is None
        if self._owner_fd is not None:
            self._selector.register(self._owner_fd, selectors.EVENT_READ, self._owner_ended)

    def wait(self, timeout_s: float) -> None:
        """Wait for something to happen (a child's end too), and take note of it."""
        if not self._channel.flush():
            timeout_s = min(timeout_s, _UNSENT_TURN_S)
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def cause(self) -> str | None:
        """Return why the run must end, None while it may go on.

        What the owner asked for comes first: it may exit right after asking for the end.
        """
        for request in self.inbox:
            if request.get("op") == "end":
                return str(request.get("cause", "asked to end"))
        if self._signal is not None:
            return f"signal {self._signal.name}"
        if self._owner_died:
            return "owner died"
        if time.monotonic() >= self._deadline:
            return "deadline"
        if not self._channel.at_end:
            return None
        died = self._owner_fd is None or wait_pidfd(self._owner_fd, _OWNER_DEATH_S)
        return "owner died" if died else "owner closed the control line"

    def await_settled(self, patience_s: float, turn: Callable[[float], None]) -> bool:
        """After the end: return whether the owner has said that everything is written, False once
        it is gone.

        The owner of a run that ended without its asking may hang. It is given `patience_s`, or
        until a stop signal comes, to show that it works on by asking for the end.
        """
        give_up_at = time.monotonic() + patience_s
        is_asked = False
        self._signal = None
        while True:
            while self.inbox:
                operation = self.inbox.popleft().get("op")
                if operation == "settled":
                    return True
                is_asked = is_asked or operation == "end"
            if self._owner_died or self._channel.at_end:
                return False
            if not is_asked and (self._signal is not None or time.monotonic() >= give_up_at):
                return False
            turn(_TURN_S)

    def _read_requests(self) -> None:
        self.inbox.extend(self._channel.receive())
        if self._channel.at_end:
            self._selector.unregister(self._channel)

    def _read_signals(self) -> None:
        for came in self._signals.read():
            if came in STOP_SIGNALS and self._signal is None:
                self._signal = came

    def _owner_ended(self) -> None:
        assert self._owner_fd is not None
        self._selector.unregister(self._owner_fd)
        self._owner_died = True


def _open_owner(owner: ProcessId) -> int | None:
    """Return a pidfd of the owner, or None if it has died (its pid may be another's by now)."""
    try:
        descriptor = open_pidfd(owner.pid)
    except ProcessLookupError:
        return None
    if identify(owner.pid) == owner:
        return descriptor
    os.close(descriptor)
    return None
