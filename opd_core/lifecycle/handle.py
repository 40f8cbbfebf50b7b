"""The owner's side: start the supervisor, order children, end the run, get the receipt.

with Supervisor.start(run_dir=run_dir, run_id="demo-1") as supervisor:
    supervisor.spawn(ChildSpec(name="teacher", kind="teacher", argv=..., cwd=..., log=...))
    while training():
        supervisor.raise_if_dead("teacher")
assert supervisor.receipt is not None and supervisor.receipt.clean
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from .conversation import ChildExit, Conversation
from .dead_run import end_dead_run
from .errors import (
    ChildDied,
    LedgerBusy,
    LifecycleError,
    SupervisorGone,
    SupervisorNotStarted,
    UnknownChild,
)
from .launch import SUPERVISOR_LOG, SupervisorLaunch, check_start, launch
from .leases import DeviceLease
from .ledger import EVENTS, LEDGER_FILE, is_held
from .logs import log_tail
from .order import RunOrder
from .process import identify
from .records import ChildSpec, JsonObject, Receipt, read_receipt
from .registry import RegisteredRun, Registry
from .teardown import RunFacts, end_without_supervisor, spared

_READY_S = 60.0
_ANSWER_S = 60.0
_LAST_WORDS_S = 5.0


@dataclass(frozen=True)
class Child:
    """A started child. `serial` tells it from an earlier one of the same name."""

    name: str
    pid: int
    serial: int
    log: Path


@dataclass(frozen=True)
class ChildStatus:
    """A child as the supervisor sees it. `returncode`: None while it lives; `how`: see ChildEnd."""

    name: str
    pid: int
    serial: int
    returncode: int | None
    how: str


class Supervisor:
    """A handle on the supervisor process. One lock makes it safe to use from several threads.

    It belongs to the process that started it; in a forked copy it refuses, and leaving the `with`
    block there ends nothing.
    """

    def __init__(
        self,
        order: RunOrder,
        margin_s: float,
        process: SupervisorLaunch,
        conversation: Conversation,
    ) -> None:
        self.run_dir = order.run_dir
        self.run_id = order.run_id
        self.receipt: Receipt | None = None
        """Set by `end`."""
        self._order = order
        self._end_within_s = order.teardown_s + margin_s
        self._process = process
        self._conversation = conversation
        self._owner_pid = os.getpid()
        # Re-entrant: a signal handler of the owner may end the run in the middle of another call.
        self._lock = threading.RLock()
        self._children: dict[str, Child] = {}
        self._is_settled = False

    @classmethod
    def start(
        cls,
        *,
        run_dir: Path,
        run_id: str,
        teardown_s: float = 60.0,
        margin_s: float = 20.0,
        interpreter: str = sys.executable,
        deadline_s: float | None = None,
        lease: DeviceLease | None = None,
        settle: tuple[str, ...] = (),
        registry: Registry | None = None,
    ) -> Supervisor:
        """Start a supervisor for this process and wait until it watches.

        `run_dir` (created if missing) receives ledger, receipt and supervisor.log. `teardown_s`
        bounds the whole ending; `end` waits `margin_s` longer before it takes over. The run ends
        `deadline_s` after its start, if that is given. What an earlier run of the same id left
        there when its supervisor died is ended first.

        The supervisor holds `lease` too, and its memory is watched. With a `settle` command it
        stays after the end until `settled` is called, and runs the command if this process dies
        before; meanwhile the run stands in `registry`.

        Raises LedgerBusy or LedgerDamaged if the folder's ledger cannot be used, LifecycleError for
        bad arguments, else SupervisorNotStarted with the reason.
        """
        check_start(run_id, teardown_s, deadline_s)
        if registry is not None and not settle:
            raise LifecycleError("expected a settle command with a registry, got none: name one")
        run_dir = run_dir.absolute()
        _refuse_twin(registry, run_id, run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        me = identify(os.getpid())
        assert me is not None, "/proc shows the process that reads it"
        ours, theirs = socket.socketpair()
        order = RunOrder(
            run_id=run_id,
            run_dir=run_dir,
            teardown_s=teardown_s,
            owner=me,
            control_fd=theirs.fileno(),
            deadline_s=deadline_s,
            devices=lease.devices if lease else (),
            lease_fds=lease.descriptors if lease else (),
            settle=settle,
            registry=registry.folder if registry else None,
        )
        try:
            with theirs:
                process = launch(order, interpreter)
        except BaseException:
            ours.close()
            raise
        handle = cls(order, margin_s, process, Conversation(ours))
        try:
            handle._await_ready()
            # Only now: an earlier supervisor of this run may still have been at work.
            handle._register(registry)
        except BaseException:
            process.kill()
            handle._close()
            raise
        return handle

    @property
    def pid(self) -> int:
        """The supervisor's pid; SIGTERM to it ends the run in order."""
        return self._process.pid

    def spawn(self, spec: ChildSpec) -> Child:
        """Start a child and return it once the program runs.

        Raises ChildNotStarted with the reason if it cannot be started, SupervisorGone if the run
        is over.
        """
        with self._lock:
            facts = self._ask({"op": "start", "child": spec.to_wire()}, _ANSWER_S)
            child = Child(spec.name, facts["pid"], facts["serial"], spec.log)
            self._children[spec.name] = child
            return child

    def stop(self, name: str) -> int | None:
        """Stop one child and everything it started; return its return code.

        None means that it hangs in the kernel even after SIGKILL. A child that has ended already
        is no error. Waits for the child's grace time, holding the lock. Raises UnknownChild if
        there was none, SupervisorGone if the run is over.
        """
        with self._lock:
            facts = self._ask({"op": "stop", "name": name}, self._end_within_s)
            returncode: int | None = facts["returncode"]
            return returncode

    def note(self, event: str, **facts: Any) -> None:
        """Write one line of the owner's own into the ledger; its facts go through JSON.

        Raises SupervisorGone if the run is over, LifecycleError for a name that is not the owner's.
        """
        if event in EVENTS:
            raise LifecycleError(
                f"expected a name of the owner's own, got {event!r}; choose another"
            )
        with self._lock:
            self._ask({"op": "note", "event": event, "facts": facts}, _ANSWER_S)

    def status(self) -> tuple[ChildStatus, ...]:
        """Return every child that was started, in the order of their start."""
        with self._lock:
            children = self._ask({"op": "status"}, _ANSWER_S)["children"]
            return tuple(ChildStatus(**each) for each in children)

    def poll(self) -> tuple[ChildExit, ...]:
        """Return the children's ends that were not returned before, without waiting."""
        with self._lock:
            self._listen()
            return self._conversation.take_unseen()

    def child_exit(self, name: str) -> int | None:
        """Return the return code of the child started last under this name, None while it lives.

        Raises UnknownChild if there was none.
        """
        with self._lock:
            self._listen()
            child = self._child(name)
            exited = self._conversation.exit_of(name, child.serial)
            return None if exited is None else exited.returncode

    def raise_if_dead(self, *names: str, but: Collection[str] = ()) -> None:
        """Raise ChildDied if one of these children (all, if none is named) has ended; those in
        `but` are left out.

        Raises SupervisorGone if the supervisor has died or is ending the run: then children end
        because of that.
        """
        with self._lock:
            self._listen()
            if self.receipt is not None or self._conversation.is_over or self._process.has_ended():
                raise self._gone()
            for name in names or tuple(child for child in self._children if child not in but):
                returncode = self.child_exit(name)
                if returncode is not None:
                    log = self._child(name).log
                    raise ChildDied(name, returncode, str(log), log_tail(log))

    def end(self, cause: str = "completed") -> Receipt:
        """End everything the run started and return the proof; a second call returns the same.

        A stop that another thread waits for comes first. Waits the teardown's time and a margin. If
        the supervisor has died, or does not finish in time, this process kills what is left of the
        run, for the teardown's time again at most, and the receipt says so.
        """
        with self._lock:
            if self.receipt is None:
                self._refuse_copies()
                self._conversation.say_end(cause)
                self.receipt = self._await_receipt(time.monotonic() + self._end_within_s)
                if not self._order.settle:
                    self._close()
            return self.receipt

    def settled(self, *, complete: bool = True) -> None:
        """After `end`: everything about the run is written, the supervisor may go.

        Not `complete`: this process goes on with the run, and whatever is lacking then is the
        reaper's to write.
        """
        with self._lock:
            self._refuse_copies()
            if self.receipt is None or self._is_settled or not self._order.settle:
                return
            self._is_settled = True
            if complete:
                self._conversation.say_settled()
            else:
                self._process.kill()
            if not self._process.wait(_LAST_WORDS_S):
                self._process.kill()
            self._close()
            if complete and self.receipt.clean:
                self._strike_out()

    def _strike_out(self) -> None:
        """The supervisor has done the same, unless it died; somebody may have begun anew since."""
        if self._order.registry is None:
            return
        registry = Registry(self._order.registry)
        with contextlib.suppress(OSError):
            run = registry.find(self.run_id)
            if run is not None and run.owner == self._order.owner:
                registry.remove(self.run_id)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() == self._owner_pid:
            self.end("completed" if kind is None else kind.__name__)

    def _ask(self, request: JsonObject, timeout_s: float) -> JsonObject:
        self._refuse_copies()
        if self.receipt is not None:
            raise self._gone()
        return self._conversation.ask(request, timeout_s)

    def _listen(self) -> None:
        if self.receipt is None:
            self._conversation.listen()

    def _await_ready(self) -> None:
        if not self._conversation.await_ready(_READY_S):
            log = self.run_dir / SUPERVISOR_LOG
            raise SupervisorNotStarted(
                f"expected the supervisor to be ready within {_READY_S:g} s, it did not say so; "
                f"read {log}. Its last lines:\n{log_tail(log)}"
            )

    def _register(self, registry: Registry | None) -> None:
        if registry is None:
            return
        order = self._order
        run = RegisteredRun.here(
            order.run_id, order.run_dir, order.owner, order.settle, order.teardown_s
        )
        try:
            registry.add(run)
        except OSError as error:
            raise LifecycleError(
                f"expected to write in {registry.folder}, where unfinished runs stand for the "
                f"reaper, got: {error}; make room, or name another folder in XDG_STATE_HOME"
            ) from None

    def _await_receipt(self, give_up_at: float) -> Receipt:
        while not (self._last_word() or self._process.has_ended()):
            if time.monotonic() >= give_up_at:
                break
            self._conversation.listen(give_up_at - time.monotonic(), also=self._process.pidfd)
        self._conversation.listen()
        if (receipt := self._last_word()) is not None:
            return receipt
        cause = "supervisor died" if self._process.has_ended() else "supervisor hung"
        self._process.kill()
        # An exception in this process may have torn the message; the file is whole or absent.
        return (
            self._conversation.receipt
            or read_receipt(self.run_dir)
            or self._end_without_supervisor(cause)
        )

    def _last_word(self) -> Receipt | None:
        """A supervisor that stays to see the run settled has said all with the receipt."""
        return self._conversation.receipt if self._order.settle else None

    def _end_without_supervisor(self, cause: str) -> Receipt:
        teardown_s = self._order.teardown_s
        run = RunFacts(self.run_id, self.run_dir, teardown_s, spared(os.getpid()))
        try:
            return end_dead_run(run, cause)
        except LedgerBusy:
            # The reaper is at it; what it has not found yet is found here.
            return replace(end_without_supervisor(run, (), cause), clean=False)

    def _child(self, name: str) -> Child:
        if name not in self._children:
            raise UnknownChild(
                f"no child {name!r} was started; those that were: {sorted(self._children)}"
            )
        return self._children[name]

    def _gone(self) -> SupervisorGone:
        cause = self._conversation.cause if self.receipt is None else self.receipt.cause
        return SupervisorGone(
            f"run {self.run_id!r} is over ({cause}), and its processes end with it; call end() for "
            f"the receipt, read {self.run_dir / SUPERVISOR_LOG}, and start a new run"
        )

    def _refuse_copies(self) -> None:
        if os.getpid() != self._owner_pid:
            raise LifecycleError(
                f"the supervisor of run {self.run_id!r} belongs to process {self._owner_pid}, "
                f"but process {os.getpid()} asked; use it only where it was started"
            )

    def _close(self) -> None:
        self._conversation.close()
        self._process.close()


def _refuse_twin(registry: Registry | None, run_id: str, run_dir: Path) -> None:
    """A copied folder has the id of its original: each would end the other's processes."""
    twin = registry.find(run_id) if registry else None
    if twin is not None and twin.run_dir != run_dir and is_held(twin.run_dir / LEDGER_FILE):
        raise LifecycleError(
            f"run {run_id!r} is alive in {twin.run_dir}; end it before it begins in {run_dir}"
        )
