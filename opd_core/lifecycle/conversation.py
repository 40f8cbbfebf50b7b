"""The owner's half of the talk with its supervisor: requests, answers, and news unasked."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from . import errors
from .channel import Channel
from .errors import LifecycleError, SupervisorGone
from .records import JsonObject, Receipt


@dataclass(frozen=True)
class ChildExit:
    """A child's end as the supervisor reported it; `returncode` as in `subprocess`."""

    name: str
    pid: int
    returncode: int


class Conversation:
    """What the owner has asked and heard so far. Not thread-safe: the handle's lock guards it."""

    def __init__(self, sock: socket.socket) -> None:
        self._channel = Channel(sock)
        self._exits: dict[tuple[str, int], ChildExit] = {}
        self._unseen: list[ChildExit] = []
        self._requests = 0
        self._answer: JsonObject | None = None
        self._ending: str | None = None
        self.is_ready = False
        self.receipt: Receipt | None = None
        """The receipt, once the supervisor has sent it."""

    @property
    def is_over(self) -> bool:
        """True once the supervisor ends the run or has closed its end of the line."""
        return self._ending is not None or self._channel.at_end

    @property
    def cause(self) -> str:
        """Why it is over, as far as the supervisor said."""
        return self._ending or "supervisor died"

    def await_ready(self, timeout_s: float) -> bool:
        """Return whether the supervisor became ready; raise what it gave as reason for refusing."""
        give_up_at = time.monotonic() + timeout_s
        while not (self.is_ready or self._channel.at_end or time.monotonic() > give_up_at):
            self._channel.wait(give_up_at - time.monotonic())
            self.listen()
        return self.is_ready

    def ask(self, request: JsonObject, timeout_s: float) -> JsonObject:
        """Send a request and return its answer.

        Raises the error the supervisor answered with, or SupervisorGone if there is no answer.
        """
        self._requests += 1
        self._answer = None
        self._channel.send({"id": self._requests, **request})
        give_up_at = time.monotonic() + timeout_s
        while (answer := self._take_answer()) is None:
            if self.is_over:
                raise SupervisorGone(
                    f"request {request['op']!r} came too late, the run is over: {self.cause}; "
                    "call end() for the receipt and start a new run"
                )
            if time.monotonic() > give_up_at:
                raise SupervisorGone(
                    f"expected an answer to {request['op']!r} within {timeout_s:g} s, got none; "
                    "call end(), and read the supervisor's log"
                )
            self._channel.wait(give_up_at - time.monotonic())
        if "error" in answer:
            raise _revive(answer["error"])
        facts: JsonObject = answer["ok"]
        return facts

    def say_end(self, cause: str) -> None:
        """Ask for the end of the run; nothing is answered but the receipt."""
        self._channel.send({"op": "end", "cause": cause})

    def say_settled(self) -> None:
        """Let the supervisor go; nothing is answered."""
        self._channel.send({"op": "settled"})

    def listen(self, timeout_s: float = 0.0, also: int | None = None) -> None:
        """Take in what has arrived, after waiting for it, or for descriptor `also`, if told to."""
        if timeout_s > 0:
            self._channel.wait(timeout_s, also)
        self._channel.flush()
        for message in self._channel.receive():
            self._take_in(message)

    def exit_of(self, name: str, serial: int) -> ChildExit | None:
        return self._exits.get((name, serial))

    def take_unseen(self) -> tuple[ChildExit, ...]:
        """Return the children's ends that were not returned before."""
        unseen, self._unseen = self._unseen, []
        return tuple(unseen)

    def close(self) -> None:
        self._channel.close()

    def _take_answer(self) -> JsonObject | None:
        self.listen()
        return self._answer

    def _take_in(self, message: JsonObject) -> None:
        event = message.get("event")
        if event == "exited":
            exited = ChildExit(message["name"], message["pid"], message["returncode"])
            self._exits[message["name"], message["serial"]] = exited
            self._unseen.append(exited)
        elif event == "ready":
            self.is_ready = True
        elif event == "refused":
            raise _revive(message)
        elif event == "ending":
            self._ending = message["cause"]
        elif event == "ended":
            self.receipt = Receipt.from_json(message["receipt"])
        elif message.get("id") == self._requests:
            # An older id answers a request that an exception broke off; nobody waits for it.
            self._answer = message


def _revive(error: JsonObject) -> LifecycleError:
    """Return the error that the supervisor reported, as the class it had there."""
    revived: LifecycleError = getattr(errors, error["kind"])(error["reason"])
    return revived
