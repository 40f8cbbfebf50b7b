"""Known failures, looked for while the run is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opd_core.analysis.detectors import LAG_S, Detection, Finding, RunFacts
from opd_core.tracking.journal import JournalRecord
from opd_core.tracking.shipper import ShippingReport


class LiveDetection:
    """Looks at each record of the journal as it comes; ``announce`` is told each finding once.

    It must see all records of the run, those of earlier attempts through :meth:`skip`. A sink of
    the journal may be ``lag_s`` seconds behind.
    """

    def __init__(
        self, facts: RunFacts, announce: Callable[[Finding], None], lag_s: float = LAG_S
    ) -> None:
        self._announce = announce
        self._lag_s = lag_s
        self._detection = Detection(facts)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All that was found so far, in earlier attempts too."""
        return self._detection.findings

    def skip(self, records: Sequence[JournalRecord]) -> None:
        """Take in what an earlier attempt has told of."""
        for record in records:
            self._detection.add(record.train_step, record.metrics)

    def see(
        self, records: Sequence[JournalRecord], shipping: ShippingReport | None = None
    ) -> tuple[Finding, ...]:
        """Take in new records, and how far the journal's records got; the findings that are
        new."""
        new: tuple[Finding, ...] = ()
        for record in records:
            new += self._detection.add(record.train_step, record.metrics)
        if shipping is not None:
            new += self._detection.ship(shipping, self._lag_s)
        for finding in new:
            self._announce(finding)
        return new
