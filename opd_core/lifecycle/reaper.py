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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .errors import LedgerBusy, LedgerDamaged, LifecycleError
from .ledger import LEDGER_FILE, Ledger, LedgerRecord, is_held, read_ledger
from .process import ProcessId, boot_id, executable_name, is_running, read_stat
from .receipt_text import left_over
from .records import Receipt, Survivor, write_receipt
from .registry import RegisteredRun, Registry
from .settling import run_settle_command
from .sweep import find, markers
from .teardown import RunFacts, end_without_supervisor, latest_receipt, spared

RunState = Literal["living", "elsewhere", "dead"]


@dataclass(frozen=True)
class Finding:
    """One registered run. `leftovers` are its processes, looked for only where it is dead."""

    run: RegisteredRun
    state: RunState
    why: str
    leftovers: tuple[Survivor, ...] = ()


@dataclass(frozen=True)
class Reaped:
    """What was done about one dead run.

    `receipt` is None where the run had its own already, or where `said` tells why nothing could be
    ended. `settled`: its final state is written everywhere and it is struck out of the registry.
    """

    finding: Finding
    receipt: Receipt | None
    settled: bool
    said: str


def look(registry: Registry) -> tuple[Finding, ...]:
    """Say what there is. Changes nothing."""
    return tuple(_judge(run) for run in registry.runs())


def reap(registry: Registry, *, settle: bool = True, again: bool = True) -> tuple[Reaped, ...]:
    """End what is left of every dead run and, unless told otherwise, write its final state; not
    `again` leaves out those that have ended, and whose state could not be written so far.

    A supervisor that was stopped (SIGSTOP) and whose owner is dead is told to go on, and ends its
    run itself. Trouble with one run is said in its `Reaped`, and does not keep the others from
    their turn.
    """
    findings = look(registry)
    for finding in findings:
        if finding.state == "living" and not _lives(finding.run):
            _wake_supervisor(finding.run)
    dead = [finding for finding in findings if finding.state == "dead"]
    return tuple(
        _reap(finding, registry, settle) for finding in dead if again or not _ended(finding.run)
    )


def _ended(run: RegisteredRun) -> bool:
    """Whether only its final state is lacking."""
    try:
        earlier = latest_receipt(read_ledger(run.run_dir / LEDGER_FILE))
    except Exception:  # it is looked at again, and then told
        return False
    return earlier is not None and earlier.clean


def _judge(run: RegisteredRun) -> Finding:
    if run.host != platform.node():
        return Finding(run, "elsewhere", f"it belongs to host {run.host}")
    if is_held(run.run_dir / LEDGER_FILE):
        return Finding(run, "living", "its supervisor lives, or it is being reaped")
    if _lives(run):
        return Finding(run, "living", f"its owner lives (pid {run.owner.pid})")
    this_boot = run.boot_id == boot_id()
    why = "owner and supervisor are gone" if this_boot else "the machine was started anew"
    left = (Survivor(process.pid, executable_name(process.pid)) for process in _find(run))
    return Finding(run, "dead", why, tuple(sorted(left, key=lambda survivor: survivor.pid)))


def _lives(run: RegisteredRun) -> bool:
    return run.boot_id == boot_id() and is_running(run.owner)


def _wake_supervisor(run: RegisteredRun) -> None:
    with contextlib.suppress(OSError, LifecycleError, LookupError, TypeError):
        begun = [
            each for each in read_ledger(run.run_dir / LEDGER_FILE) if each.event == "run_started"
        ]
        facts = begun[-1].facts
        pid, ticks = facts["supervisor_pid"], facts["supervisor_start_ticks"]
        stat = read_stat(pid)
        if stat is not None and stat.identity == ProcessId(pid, ticks) and stat.state == "T":
            os.kill(pid, signal.SIGCONT)


def _find(run: RegisteredRun) -> frozenset[ProcessId]:
    return find(markers(run.run_id), root=None, spare=_spared())


def _reap(finding: Finding, registry: Registry, settle: bool) -> Reaped:
    run = finding.run
    try:
        if not run.run_dir.is_dir():
            # Somebody removed it: the marker still finds the processes, and nothing can be written.
            return _settle(finding, _end(run, ()), None, registry, settle)
        # Held until all is done, against other reapers and a new supervisor of the same run.
        with contextlib.closing(Ledger.open(run.run_dir / LEDGER_FILE, run.run_id)) as ledger:
            return _settle(finding, _end_and_write(run, ledger), ledger, registry, settle)
    except LedgerBusy as error:
        return Reaped(finding, None, settled=False, said=str(error))
    except LedgerDamaged as error:
        # The markers still find the processes, but which ports and folders to check is lost.
        receipt = replace(_end(run, ()), clean=False)
        return Reaped(finding, receipt, settled=False, said=str(error))
    except Exception as error:  # a run must not keep the others from their turn
        return Reaped(finding, None, settled=False, said=f"it could not be ended: {error!r}")


def _settle(
    finding: Finding,
    receipt: Receipt | None,
    ledger: Ledger | None,
    registry: Registry,
    settle: bool,
) -> Reaped:
    """Write the final state of a run that has ended, and strike it out unless something of it is
    left. `ledger` is None if its folder is gone."""
    run = finding.run
    if not settle:
        return Reaped(finding, receipt, settled=False, said="its final state is to be written")
    if ledger is not None and not _is_settled(ledger):
        reason = run_settle_command(run.settle, run.run_dir)
        if reason:
            ledger.append("not_settled", reason=reason)
            return Reaped(finding, receipt, settled=False, said=reason)
        ledger.append("settled", by="reaper")
    if receipt is not None and not receipt.clean:
        return Reaped(finding, receipt, settled=False, said=left_over(receipt))
    registry.remove(run.run_id)
    return Reaped(finding, receipt, settled=True, said="")


def _is_settled(ledger: Ledger) -> bool:
    return bool(ledger.before) and ledger.before[-1].event == "settled"


def _end_and_write(run: RegisteredRun, ledger: Ledger) -> Receipt | None:
    """End what is left and write the receipt; None if that was done before."""
    earlier = latest_receipt(ledger.before)
    if earlier is not None and earlier.clean and not _find(run):
        return None
    receipt = _end(run, ledger.before)
    if earlier is not None:
        receipt = replace(receipt, cause=earlier.cause)
    write_receipt(run.run_dir, receipt)
    ledger.append("receipt", **receipt.to_json())
    return receipt


def _end(run: RegisteredRun, records: Sequence[LedgerRecord]) -> Receipt:
    facts = RunFacts(run.run_id, run.run_dir, run.teardown_s, _spared())
    return end_without_supervisor(facts, records, "owner and supervisor died")


def _spared() -> frozenset[ProcessId]:
    """The owner is dead: whoever has its pid now is no reason to spare a process."""
    return spared(os.getpid())
