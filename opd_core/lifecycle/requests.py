"""What a supervisor does for its owner: start a child, stop one, tell of them, write a note."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

from .children import Children, StartedChild
from .errors import ChildNotStarted, LifecycleError, SupervisorGone, UnknownChild
from .ledger import Ledger
from .process import boot_id
from .records import ChildSpec, JsonObject
from .sweep import markers, sweep
from .teardown import RunFacts, stop


class Requests:
    """Answers the owner's requests.

    `turn` waits up to that many seconds for something to happen; `cause` tells why the run must
    end, None while it may go on.
    """

    def __init__(
        self,
        run: RunFacts,
        children: Children,
        ledger: Ledger,
        *,
        turn: Callable[[float], None],
        cause: Callable[[], str | None],
    ) -> None:
        self._run = run
        self._children = children
        self._ledger = ledger
        self._turn = turn
        self._cause = cause

    def answer(self, request: JsonObject) -> JsonObject:
        """Do what is asked and return the answer to it."""
        operation = request.get("op")
        answer: JsonObject = {"id": request.get("id")}
        try:
            if operation == "start":
                answer["ok"] = facts_of(self._start(ChildSpec.from_wire(request["child"])))
            elif operation == "stop":
                answer["ok"] = facts_of(self._stop(request["name"]))
            elif operation == "status":
                answer["ok"] = {"children": [facts_of(each) for each in self._children.all()]}
            elif operation == "note":
                self._write_down(request["event"], request["facts"])
                answer["ok"] = {}
            else:
                raise LifecycleError(
                    f"expected start, stop, status, note or end, got {operation!r}"
                )
        except LifecycleError as error:
            answer["error"] = {"kind": type(error).__name__, "reason": str(error)}
        return answer

    def _start(self, spec: ChildSpec) -> StartedChild:
        self._check_order(spec)
        try:
            self._ledger.append("child_starting", **spec.to_ledger())
        except OSError as error:
            raise ChildNotStarted(
                f"child {spec.name!r} was not started: the ledger could not be written ({error}); "
                f"make room in {self._run.run_dir}"
            ) from None
        try:
            child = self._children.start(spec)
        except ChildNotStarted as error:
            note(self._ledger, "child_not_started", name=spec.name, reason=str(error))
            raise
        note(
            self._ledger,
            "child_started",
            name=spec.name,
            kind=spec.kind,
            pid=child.pid,
            start_ticks=child.identity.start_ticks,
            pgid=child.pid,
            boot_id=boot_id(),
        )
        return child

    def _check_order(self, spec: ChildSpec) -> None:
        running = self._children.latest(spec.name)
        if running is not None and running.living:
            raise ChildNotStarted(
                f"child {spec.name!r} is running already (pid {running.pid}); stop it first"
            )
        for path in spec.scratch:
            if self._run.run_dir.resolve().is_relative_to(path.resolve()):
                raise ChildNotStarted(
                    f"child {spec.name!r}: scratch folder {path} holds the run's own folder "
                    f"{self._run.run_dir} and would be removed with it; name a folder of its own"
                )

    def _stop(self, name: str) -> StartedChild:
        """Stop one child and its strays; broken off if the whole run must end meanwhile."""
        child = self._children.latest(name)
        if child is None:
            raise UnknownChild(f"no child {name!r} was started; check the name")
        deadline = time.monotonic() + self._run.teardown_s
        stop(
            [child],
            ask_until=deadline,
            turn=self._turn,
            give_up=lambda: self._cause() is not None,
        )
        if (cause := self._cause()) is not None:
            raise SupervisorGone(f"child {name!r} ends with the whole run: {cause}; stop asking")
        # A stray that left the child's session; descent cannot tell whose it is, the markers can.
        sweep(
            markers(self._run.run_id, name),
            root=None,
            spare=self._run.spare,
            deadline=deadline,
            pause=self._turn,
            adopter=os.getpid(),
        )
        return child

    def _write_down(self, event: str, facts: JsonObject) -> None:
        try:
            self._ledger.append(event, **facts)
        except OSError as error:
            raise LifecycleError(
                f"the note {event!r} was not written: expected to write in {self._ledger.path}, "
                f"got: {error}; make room in {self._run.run_dir}"
            ) from None


def note(ledger: Ledger, event: str, **facts: Any) -> None:
    """Write to the ledger; a full disk must not keep the run from being ended."""
    try:
        ledger.append(event, **facts)
    except OSError:
        complain()


def complain() -> None:
    """Write what went wrong to the log; that is on a disk too, and may be full with it."""
    with contextlib.suppress(OSError):
        traceback.print_exc()


def facts_of(child: StartedChild) -> JsonObject:
    """Return what the owner is told of a child."""
    return {
        "name": child.spec.name,
        "pid": child.pid,
        "serial": child.serial,
        "returncode": child.returncode,
        "how": child.how,
    }
