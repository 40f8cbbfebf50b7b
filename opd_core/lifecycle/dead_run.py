"""Ends a run that has no supervisor, for whoever finds it: its owner, the reaper, the next attempt.

The processes are found by the ledger and by their markers, so an unusable ledger costs the proofs
(which ports, which folders), and no process its end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .errors import LedgerBusy, LifecycleError
from .ledger import LEDGER_FILE, Ledger, LedgerRecord
from .records import Receipt, write_receipt
from .teardown import RunFacts, end_without_supervisor


@dataclass(frozen=True)
class LedgerState:
    """What a ledger says of its latest run. `tried`: somebody tried in vain to settle it."""

    records: tuple[LedgerRecord, ...]

    @classmethod
    def of(cls, records: Sequence[LedgerRecord]) -> LedgerState:
        """The state of the run that was begun last."""
        starts = [index for index, record in enumerate(records) if record.event == "run_started"]
        return cls(tuple(records[starts[-1] :] if starts else records))

    @property
    def ended(self) -> bool:
        """Whether it has its receipt, or there was no run."""
        return not self.records or self._has("receipt")

    @property
    def receipt(self) -> Receipt | None:
        """Its latest receipt."""
        found = [record.facts for record in self.records if record.event == "receipt"]
        return Receipt.from_json(found[-1]) if found else None

    @property
    def settled(self) -> bool:
        """Whether its final state is written everywhere."""
        return self._has("settled")

    @property
    def tried(self) -> bool:
        """Whether somebody tried in vain to settle it."""
        return self._has("not_settled")

    def _has(self, event: str) -> bool:
        return any(record.event == event for record in self.records)


def end_dead_run(run: RunFacts, cause: str, *, patient: bool = True) -> Receipt:
    """End what is left and write the receipt. Call it only when the supervisor is known to be dead.

    Raises LedgerBusy if somebody else is at it. `patient`: see `end_without_supervisor`.
    """
    try:
        ledger = Ledger.open(run.run_dir / LEDGER_FILE, run.run_id)
    except LedgerBusy:
        raise
    except (OSError, LifecycleError):
        return _end_by_markers(run, cause, patient)
    with contextlib.closing(ledger):
        return end_under_lock(run, ledger, cause, patient=patient)


def end_under_lock(run: RunFacts, ledger: Ledger, cause: str, *, patient: bool = True) -> Receipt:
    """The same by whoever holds the ledger."""
    records = LedgerState.of(ledger.before).records
    try:
        receipt = end_without_supervisor(run, records, cause, patient=patient)
    except (LookupError, TypeError, ValueError):  # a record that lacks its facts
        receipt = _end_by_markers(run, cause, patient)
    # It is returned in any case; a full disk must not turn it into an error.
    with contextlib.suppress(OSError):
        write_receipt(run.run_dir, receipt)
    with contextlib.suppress(OSError):
        ledger.append("receipt", **receipt.to_json())
    return receipt


def _end_by_markers(run: RunFacts, cause: str, patient: bool) -> Receipt:
    return replace(end_without_supervisor(run, (), cause, patient=patient), clean=False)
