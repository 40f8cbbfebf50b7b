"""Finds the runs of this user that died with their supervisor, and ends what is left of them.

A run is dead when neither its owner nor its supervisor lives: nobody holds its ledger, and no
process has the owner's pid *and* start time. What is killed then are the processes that the ledger
names (pid and start time) or that carry the run's id in their environment; never by name, and never
anything of a living run.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
from dataclasses import dataclass
from typing import Literal

from .dead_run import LedgerState, end_dead_run, end_under_lock
from .errors import LedgerBusy, LifecycleError
from .ledger import LEDGER_FILE, Ledger, is_held, read_ledger
from .process import ProcessId, boot_id, executable_name, is_running, read_stat
from .receipt_text import left_over
from .records import Receipt, Survivor, read_receipt, write_receipt
from .registry import RegisteredRun, Registry
from .settling import run_settle_command
from .sweep import find, markers
from .teardown import RunFacts, spared

RunState = Literal["living", "elsewhere", "unknown", "dead"]
_CAUSE = "owner and supervisor died"


@dataclass(frozen=True)
class Finding:
    """One registered run. `leftovers` are its processes, looked for only where it is dead; a run of
    which nobody can tell is `unknown`, and left alone."""

    run: RegisteredRun
    state: RunState
    why: str
    leftovers: tuple[Survivor, ...] = ()


@dataclass(frozen=True)
class Reaped:
    """What was done about one dead run.

    `receipt` is None where it had ended already, or where `said` tells why nothing could be ended.
    `settled`: its final state is written everywhere and it is struck out of the registry.
    """

    finding: Finding
    receipt: Receipt | None
    settled: bool
    said: str


def look(registry: Registry) -> tuple[Finding, ...]:
    """Say what there is. Changes nothing."""
    return tuple(_look_at(run) for run in registry.runs())


def reap(registry: Registry, *, settle: bool = True, again: bool = True) -> tuple[Reaped, ...]:
    """End what is left of every dead run and, unless told otherwise, write its final state; not
    `again` leaves out those that have ended, and whose state could not be written so far.

    A supervisor that was stopped (SIGSTOP) and whose owner is dead is told to go on, and ends its
    run itself. Trouble with one run is said in its `Reaped`, and does not keep the others from
    their turn.
    """
    findings = look(registry)
    for finding in findings:
        if finding.state == "living" and not _owner_lives(finding.run):
            _wake_supervisor(finding.run)
    dead = [finding for finding in findings if finding.state == "dead"]
    return tuple(
        _reap(finding, registry, settle)
        for finding in dead
        if again or finding.leftovers or not _waits_for_others(finding.run)
    )


def forget(registry: Registry, run_id: str) -> str:
    """Strike out a run that is dead or another host's, whatever is lacking; "" or why it was not
    done."""
    run = registry.find(run_id)
    if run is None:
        known = ", ".join(each.run_id for each in registry.runs()) or "none"
        return f"no unsettled run {run_id!r}; there is: {known}"
    finding = _look_at(run)
    if finding.state == "living":
        return f"{run_id} lives: {finding.why}; end it first"
    if finding.leftovers:
        return f"processes of {run_id} are left: reap it first"
    registry.remove(run_id)
    return ""


def _waits_for_others(run: RegisteredRun) -> bool:
    """Whether it has ended, and somebody tried in vain to write its final state."""
    try:
        state = LedgerState.of(read_ledger(run.run_dir / LEDGER_FILE))
    except (OSError, LifecycleError):
        return False
    return bool(state.records) and state.ended and state.tried


def _look_at(run: RegisteredRun) -> Finding:
    try:
        return _judge(run)
    except OSError as error:
        return Finding(run, "unknown", f"nobody can tell: {error}")


def _judge(run: RegisteredRun) -> Finding:
    this_boot = run.boot_id == boot_id()
    # A container has a host name of its own, and its kernel's boot.
    if not this_boot and run.host != platform.node():
        return Finding(run, "elsewhere", f"it belongs to host {run.host}")
    if is_held(run.run_dir / LEDGER_FILE):
        return Finding(run, "living", "its supervisor lives, or it is being reaped")
    if _owner_lives(run):
        return Finding(run, "living", f"its owner lives (pid {run.owner.pid})")
    why = "owner and supervisor are gone" if this_boot else "the machine was started anew"
    left = (Survivor(process.pid, executable_name(process.pid)) for process in _find(run))
    return Finding(run, "dead", why, tuple(sorted(left, key=lambda survivor: survivor.pid)))


def _owner_lives(run: RegisteredRun) -> bool:
    return run.boot_id == boot_id() and is_running(run.owner)


def _wake_supervisor(run: RegisteredRun) -> None:
    with contextlib.suppress(OSError, LifecycleError, LookupError, TypeError):
        facts = LedgerState.of(read_ledger(run.run_dir / LEDGER_FILE)).records[0].facts
        supervisor = ProcessId(facts["supervisor_pid"], facts["supervisor_start_ticks"])
        stat = read_stat(supervisor.pid)
        # Whatever its state: one that waits for its disk is stopped later, and this prevents it.
        if stat is not None and stat.identity == supervisor:
            os.kill(supervisor.pid, signal.SIGCONT)


def _find(run: RegisteredRun) -> frozenset[ProcessId]:
    return find(markers(run.run_id), root=None, spare=_spared())


def _reap(finding: Finding, registry: Registry, settle: bool) -> Reaped:
    run = finding.run
    try:
        ledger = Ledger.open(run.run_dir / LEDGER_FILE, run.run_id)
    except LedgerBusy as error:
        return Reaped(finding, None, settled=False, said=str(error))
    except (OSError, LifecycleError) as error:
        return _reap_without_ledger(finding, registry, error)
    # Held until all is done, against other reapers and a new supervisor of the same run.
    with contextlib.closing(ledger):
        try:
            if registry.find(run.run_id) != run:
                return Reaped(finding, None, settled=False, said="somebody has taken it up")
            return _settle(finding, _end(run, ledger), ledger, registry, settle)
        except Exception as error:  # a run must not keep the others from their turn
            return Reaped(finding, None, settled=False, said=f"trouble with it: {error!r}")


def _reap_without_ledger(finding: Finding, registry: Registry, error: Exception) -> Reaped:
    """The markers still find the processes, but which ports and folders to check is lost."""
    run = finding.run
    receipt = end_dead_run(_facts(run), _CAUSE, patient=False)
    if run.run_dir.is_dir():
        return Reaped(finding, receipt, settled=False, said=str(error))
    if receipt.survivors:
        return Reaped(finding, receipt, settled=False, said=left_over(receipt))
    registry.remove(run.run_id)  # somebody removed its folder: nothing can be written from it
    return Reaped(finding, receipt, settled=True, said="")


def _end(run: RegisteredRun, ledger: Ledger) -> Receipt | None:
    """End what is left; None if that was done before, and nothing is left that could be ended."""
    earlier = LedgerState.of(ledger.before).receipt
    if earlier is None:
        return end_under_lock(_facts(run), ledger, _CAUSE, patient=False)
    if _find(run) or not _gone(earlier):
        return end_under_lock(_facts(run), ledger, earlier.cause, patient=False)
    if read_receipt(run.run_dir) is None:  # the disk was full
        write_receipt(run.run_dir, earlier)
    return None


def _settle(
    finding: Finding, receipt: Receipt | None, ledger: Ledger, registry: Registry, settle: bool
) -> Reaped:
    """Write the final state of a run that has ended, and strike it out unless something of it is
    left that is certainly its own."""
    run = finding.run
    if not settle:
        return Reaped(finding, receipt, settled=False, said="its final state is to be written")
    if not LedgerState.of(ledger.before).settled:
        reason = run_settle_command(run.settle, run.run_dir)
        if reason:
            ledger.append("not_settled", reason=reason)
            return Reaped(finding, receipt, settled=False, said=reason)
        ledger.append("settled", by="reaper")
    said = left_over(receipt) if receipt else ""
    if receipt is not None and not _gone(receipt):
        return Reaped(finding, receipt, settled=False, said=said)
    registry.remove(run.run_id)
    return Reaped(finding, receipt, settled=True, said=said)


def _gone(receipt: Receipt) -> bool:
    """Whether nothing is left that cannot be anybody else's; a port or a device's memory can."""
    return not receipt.survivors and all(each.removed for each in receipt.scratch)


def _facts(run: RegisteredRun) -> RunFacts:
    return RunFacts(run.run_id, run.run_dir, run.teardown_s, _spared())


def _spared() -> frozenset[ProcessId]:
    """The owner is dead: whoever has its pid now is no reason to spare a process."""
    return spared(os.getpid())
