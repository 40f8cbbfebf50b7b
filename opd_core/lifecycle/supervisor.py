"""The supervisor process: it starts a run's children, and ends them when the run ends, however.

Started by `handle.Supervisor` as `python -I -S`, in a session of its own, and single-threaded: its
children carry PDEATHSIG, which fires at the death of the *thread* that started them. It ends the
run when its owner dies or closes the control line, on request, at the run's deadline, and on
SIGTERM, SIGINT or SIGHUP.

After the receipt, a supervisor that was given a settle command stays until the owner says that
everything is written ("settled"). If the owner dies without that, it runs the command.

Requests are JSON lines {"id": 1, "op": "start" | "stop" | "status" | "note" | ...}, each
answered by {"id": 1, "ok": {...}} or {"id": 1, "error": {"kind", "reason"}}; "end" and "settled"
have no answer. Events come unasked: ready, refused, exited (name, pid, serial, returncode),
ending (cause), ended (receipt). Exit status: 0 a clean receipt, 1 an unclean or unwritten one, 3
refused before the start.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import time
import traceback
from collections import deque
from dataclasses import replace
from typing import Any

from .channel import Channel
from .children import Children, StartedChild
from .errors import ChildNotStarted, LifecycleError, SupervisorGone, UnknownChild
from .gpu_memory import used_mib
from .ledger import LEDGER_FILE, Ledger
from .order import RunOrder
from .process import (
    ProcessId,
    become_subreaper,
    boot_id,
    identify,
    open_pidfd,
    wait_pidfd,
)
from .records import RECEIPT_FILE, ChildSpec, JsonObject, Receipt, write_receipt
from .registry import Registry
from .settling import run_settle_command
from .signals import SignalPipe
from .sweep import markers, sweep
from .teardown import RunFacts, end_without_supervisor, has_ended, spared, stop, tear_down

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TURN_S = 1.0
_UNSENT_TURN_S = 0.05
_LAST_WORDS_S = 2.0
_PAST_S = 20.0
# A dying process closes its sockets a moment before it counts as dead.
_OWNER_DEATH_S = 0.5


class SupervisorProcess:
    """The loop. It owns the children, the ledger and the receipt; the owner's side is a handle."""

    def __init__(self, order: RunOrder, channel: Channel, ledger: Ledger) -> None:
        self._order = order
        self._run = RunFacts(
            order.run_id,
            order.run_dir,
            order.teardown_s,
            spared(order.owner.pid),
            used_mib(order.devices),
        )
        self._deadline = time.monotonic() + (order.deadline_s or math.inf)
        self._channel = channel
        self._ledger = ledger
        self._children = Children(order.run_id)
        self._inbox: deque[JsonObject] = deque()
        self._end_request: str | None = None
        self._signal_cause: str | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, self._read_requests)
        self._signals = SignalPipe(signal.SIGCHLD, *_STOP_SIGNALS)
        self._selector.register(self._signals, selectors.EVENT_READ, self._read_signals)
        self._owner_fd = _open_owner(order.owner)
        self._owner_died = self._owner_fd is None
        if self._owner_fd is not None:
            self._selector.register(self._owner_fd, selectors.EVENT_READ, self._owner_ended)

    def run(self) -> int:
        """Serve until there is a cause to end, then end everything; return the exit status."""
        try:
            self._begin()
            cause = self._serve()
        except Exception as error:
            _complain()
            cause = f"supervisor failed: {type(error).__name__}"
        return self._finish(cause)

    def _begin(self) -> None:
        if not has_ended(self._ledger.before):
            # The owner waits for "ready" meanwhile, so an unclean past must not take long.
            past = replace(self._run, teardown_s=min(self._run.teardown_s, _PAST_S))
            earlier = end_without_supervisor(past, self._ledger.before, "supervisor died")
            self._ledger.append("receipt", **earlier.to_json())
        (self._run.run_dir / RECEIPT_FILE).unlink(missing_ok=True)
        me = identify(os.getpid())
        self._ledger.append(
            "run_started",
            run_id=self._run.run_id,
            boot_id=boot_id(),
            owner_pid=self._order.owner.pid,
            owner_start_ticks=self._order.owner.start_ticks,
            supervisor_pid=os.getpid(),
            supervisor_start_ticks=None if me is None else me.start_ticks,
            devices=list(self._order.devices),
            used_mib=dict(self._run.used_mib),
        )
        self._channel.send({"event": "ready"})

    def _serve(self) -> str:
        while True:
            self._turn(_TURN_S)
            while self._inbox and self._end_request is None:
                self._answer(self._inbox.popleft())
            # What the owner asked for comes first: it may exit right after asking for the end.
            if (cause := self._end_request or self._outside_cause()) is not None:
                return cause

    def _finish(self, cause: str) -> int:
        self._note("teardown_begun", cause=cause)
        self._channel.send({"event": "ending", "cause": cause})
        receipt = tear_down(self._run, self._children, cause=cause, turn=self._turn)
        is_written = self._write(receipt)
        for lock in self._order.lease_fds:
            os.close(lock)
        self._tell(receipt)
        if self._order.settle:
            self._settle(is_clean=receipt.clean)
        return 0 if receipt.clean and is_written else 1

    def _write(self, receipt: Receipt) -> bool:
        is_written = True
        try:
            write_receipt(self._run.run_dir, receipt)
        except OSError:
            _complain()
            is_written = False
        self._note("receipt", **receipt.to_json())
        return is_written

    def _tell(self, receipt: Receipt) -> None:
        self._channel.send({"event": "ended", "receipt": receipt.to_json()})
        give_up_at = time.monotonic() + _LAST_WORDS_S
        while not self._channel.flush() and time.monotonic() < give_up_at:
            self._channel.wait(_UNSENT_TURN_S)

    # --- after the end

    def _settle(self, *, is_clean: bool) -> None:
        """See to it that everything about the run is written, by its owner or by the command."""
        by, reason = "owner", ""
        if not self._await_owner():
            by, reason = "command", run_settle_command(self._order.settle, self._run.run_dir)
            # What the command has started, and left.
            marks, deadline = markers(self._run.run_id), time.monotonic() + _LAST_WORDS_S
            sweep(
                marks, root=os.getpid(), spare=self._run.spare, deadline=deadline, pause=self._turn
            )
        if reason:
            self._note("not_settled", reason=reason)
            return
        self._note("settled", by=by)
        # What is not clean stays for the reaper, which looks at it again.
        if is_clean and self._order.registry is not None:
            with contextlib.suppress(OSError):
                Registry(self._order.registry).remove(self._run.run_id)

    def _await_owner(self) -> bool:
        """Return whether the owner has said that everything is written; False once it is gone."""
        while True:
            while self._inbox:
                if self._inbox.popleft().get("op") == "settled":
                    return True
            if self._owner_died or self._channel.at_end:
                return False
            self._turn(_TURN_S)

    # --- one turn of the loop

    def _turn(self, timeout_s: float) -> None:
        """Wait for something to happen, take note of it, reap. Requests are only put aside."""
        if not self._channel.flush():
            timeout_s = min(timeout_s, _UNSENT_TURN_S)
        for key, _ in self._selector.select(timeout_s):
            key.data()
        for child in self._children.reap():
            self._note(
                "child_ended",
                name=child.spec.name,
                pid=child.pid,
                start_ticks=child.identity.start_ticks,
                how=child.how,
                returncode=child.returncode,
            )
            self._channel.send({"event": "exited", **_facts(child)})

    def _read_requests(self) -> None:
        self._inbox.extend(self._channel.receive())
        if self._channel.at_end:
            self._selector.unregister(self._channel)

    def _read_signals(self) -> None:
        for came in self._signals.read():
            if came in _STOP_SIGNALS and self._signal_cause is None:
                self._signal_cause = f"signal {came.name}"

    def _owner_ended(self) -> None:
        assert self._owner_fd is not None
        self._selector.unregister(self._owner_fd)
        self._owner_died = True

    def _outside_cause(self) -> str | None:
        """Return why the run must end although nobody asked for it, or None."""
        if self._signal_cause is not None:
            return self._signal_cause
        if self._owner_died:
            return "owner died"
        if time.monotonic() >= self._deadline:
            return "deadline"
        if not self._channel.at_end:
            return None
        died = self._owner_fd is None or wait_pidfd(self._owner_fd, _OWNER_DEATH_S)
        return "owner died" if died else "owner closed the control line"

    # --- requests

    def _answer(self, request: JsonObject) -> None:
        operation = request.get("op")
        if operation == "end":
            self._end_request = str(request.get("cause", "asked to end"))
            return
        answer: JsonObject = {"id": request.get("id")}
        try:
            if operation == "start":
                answer["ok"] = _facts(self._start(ChildSpec.from_wire(request["child"])))
            elif operation == "stop":
                answer["ok"] = _facts(self._stop(request["name"]))
            elif operation == "status":
                answer["ok"] = {"children": [_facts(each) for each in self._children.all()]}
            elif operation == "note":
                self._note(request["event"], **request["facts"])
                answer["ok"] = {}
            else:
                raise LifecycleError(
                    f"expected start, stop, status, note or end, got {operation!r}"
                )
        except LifecycleError as error:
            answer["error"] = {"kind": type(error).__name__, "reason": str(error)}
        self._channel.send(answer)

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
            self._note("child_not_started", name=spec.name, reason=str(error))
            raise
        self._note(
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
            give_up=lambda: self._outside_cause() is not None,
        )
        if (cause := self._outside_cause()) is not None:
            raise SupervisorGone(f"child {name!r} ends with the whole run: {cause}; stop asking")
        # A stray that left the child's session; descent cannot tell whose it is, the markers can.
        sweep(
            markers(self._run.run_id, name),
            root=None,
            spare=self._run.spare,
            deadline=deadline,
            pause=self._turn,
        )
        return child

    def _note(self, event: str, **facts: Any) -> None:
        """Write to the ledger; a full disk must not keep the run from being ended."""
        try:
            self._ledger.append(event, **facts)
        except OSError:
            _complain()


def main(arguments: list[str]) -> int:
    """Run a supervisor from its command line, an order as JSON; return its exit status."""
    order = RunOrder.from_wire(json.loads(arguments[0]))
    for descriptor in (order.control_fd, *order.lease_fds):
        os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=order.control_fd))
    try:
        become_subreaper()
        ledger = Ledger.open(order.run_dir / LEDGER_FILE, order.run_id)
        supervisor = SupervisorProcess(order, channel, ledger)
    except LifecycleError as error:
        channel.send({"event": "refused", "kind": type(error).__name__, "reason": str(error)})
        return 3
    except OSError as error:
        needs = f"it needs Linux 5.3 or later, and to write in {order.run_dir}"
        reason = f"the supervisor could not begin: {error}; {needs}"
        channel.send({"event": "refused", "kind": "SupervisorNotStarted", "reason": reason})
        return 3
    return supervisor.run()


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


def _complain() -> None:
    """Write what went wrong to the log; that is on a disk too, and may be full with it."""
    with contextlib.suppress(OSError):
        traceback.print_exc()


def _facts(child: StartedChild) -> JsonObject:
    return {
        "name": child.spec.name,
        "pid": child.pid,
        "serial": child.serial,
        "returncode": child.returncode,
        "how": child.how,
    }
