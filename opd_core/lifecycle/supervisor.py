"""The supervisor process: it starts a run's children, and ends them when the run ends, however.

Started by `handle.Supervisor` as `python -I -S`, in a session of its own, and single-threaded: its
children carry PDEATHSIG, which fires at the death of the *thread* that started them. It ends the
run when its owner dies or closes the control line, on request, at the run's deadline, and on
SIGTERM, SIGINT or SIGHUP.

After the receipt, a supervisor that was given a settle command stays until the owner says that
everything is written ("settled"). If the owner dies without that, it runs the command; also if the
run ended without the owner's asking, and the owner does not ask for its end later either.

Requests are JSON lines {"id": 1, "op": "start" | "stop" | "status" | "note" | ...}, each
answered by {"id": 1, "ok": {...}} or {"id": 1, "error": {"kind", "reason"}}; "end" and "settled"
have no answer. Events come unasked: ready, refused, exited (name, pid, serial, returncode),
ending (cause), ended (receipt). Exit status: 0 a clean receipt, 1 an unclean or unwritten one, 3
refused before the start.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import replace

from .channel import Channel
from .children import Children
from .dead_run import LedgerState, end_under_lock
from .errors import LifecycleError
from .gpu_memory import used_mib
from .leases import touch
from .ledger import LEDGER_FILE, Ledger
from .order import RunOrder
from .process import (
    become_subreaper,
    boot_id,
    identify,
)
from .records import RECEIPT_FILE, Receipt, write_receipt
from .registry import Registry
from .requests import Requests, complain, facts_of, note
from .settling import run_settle_command
from .sweep import markers, sweep
from .teardown import RunFacts, spared, tear_down
from .watch import Watch

_TURN_S = 1.0
_UNSENT_TURN_S = 0.05
_LAST_WORDS_S = 2.0
_PAST_S = 20.0
_TOUCH_S = 3600.0


class SupervisorProcess:
    """The loop. It owns the children, the ledger and the receipt; the owner's side is a handle."""

    def __init__(self, order: RunOrder, channel: Channel, ledger: Ledger) -> None:
        self._order = order
        self._run = RunFacts(
            order.run_id,
            order.run_dir,
            order.teardown_s,
            spared(order.owner.pid),
        )
        self._channel = channel
        self._ledger = ledger
        self._children = Children(order.run_id)
        self._watch = Watch(order, channel)
        self._requests = Requests(
            self._run, self._children, ledger, turn=self._turn, cause=self._watch.cause
        )
        self._locks = order.lease_fds
        self._touch_at = 0.0

    def run(self) -> int:
        """Serve until there is a cause to end, then end everything; return the exit status."""
        try:
            self._begin()
            cause = self._serve()
        except Exception as error:
            complain()
            cause = f"supervisor failed: {type(error).__name__}"
        return self._finish(cause)

    def _begin(self) -> None:
        if not LedgerState.of(self._ledger.before).ended:
            # The owner waits for "ready" meanwhile, so an unclean past must not take long.
            past = replace(self._run, teardown_s=min(self._run.teardown_s, _PAST_S))
            end_under_lock(past, self._ledger, "supervisor died")
        self._run = replace(self._run, used_mib=used_mib(self._order.devices))
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
        inbox = self._watch.inbox
        while True:
            self._turn(_TURN_S)
            while inbox and inbox[0].get("op") != "end":
                self._channel.send(self._requests.answer(inbox.popleft()))
            if (cause := self._watch.cause()) is not None:
                return cause

    def _finish(self, cause: str) -> int:
        note(self._ledger, "teardown_begun", cause=cause)
        self._channel.send({"event": "ending", "cause": cause})
        receipt = self._end_everything(cause)
        is_written = self._write(receipt)
        if not receipt.survivors and all(device.released for device in receipt.devices):
            self._let_go()
        self._tell(receipt)
        if self._order.settle:
            self._settle(is_clean=receipt.clean)
        return 0 if receipt.clean and is_written else 1

    def _end_everything(self, cause: str) -> Receipt:
        began = time.monotonic()
        try:
            return tear_down(self._run, self._children, cause=cause, turn=self._turn)
        except Exception:
            # A mistake in there must leave neither processes nor a run without a receipt.
            complain()
            survivors = sweep(
                markers(self._run.run_id),
                root=os.getpid(),
                spare=self._run.spare,
                deadline=began + _PAST_S,
                pause=time.sleep,
            )
            return Receipt(
                run_id=self._run.run_id,
                cause=cause,
                clean=False,
                seconds=round(time.monotonic() - began, 3),
                children=tuple(child.to_end() for child in self._children.all()),
                survivors=survivors,
                ports=(),
                scratch=(),
            )

    def _let_go(self) -> None:
        """Let the devices go; what still runs on them keeps them, as long as this process lives."""
        locks, self._locks = self._locks, ()
        for lock in locks:
            os.close(lock)

    def _write(self, receipt: Receipt) -> bool:
        is_written = True
        try:
            write_receipt(self._run.run_dir, receipt)
        except OSError:
            complain()
            is_written = False
        note(self._ledger, "receipt", **receipt.to_json())
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
        if not self._watch.await_settled(self._order.patience_s, self._turn):
            by, reason = "command", run_settle_command(self._order.settle, self._run.run_dir)
        if reason:
            note(self._ledger, "not_settled", reason=reason)
            return
        note(self._ledger, "settled", by=by)
        # What is not clean stays for the reaper, which looks at it again.
        if is_clean and self._order.registry is not None:
            with contextlib.suppress(OSError):
                Registry(self._order.registry).remove(self._run.run_id)

    # --- one turn of the loop

    def _turn(self, timeout_s: float) -> None:
        """Wait for something to happen, take note of it, reap. Requests are only put aside."""
        self._watch.wait(timeout_s)
        if time.monotonic() >= self._touch_at:
            touch(self._locks)
            self._touch_at = time.monotonic() + _TOUCH_S
        for child in self._children.reap():
            note(
                self._ledger,
                "child_ended",
                name=child.spec.name,
                pid=child.pid,
                start_ticks=child.identity.start_ticks,
                how=child.how,
                returncode=child.returncode,
            )
            self._channel.send({"event": "exited", **facts_of(child)})


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
