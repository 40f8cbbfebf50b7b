"""Known failures of on-policy distillation, found in a run's metrics.

Pure: the journal's numbers and a few facts of the recipe in, findings out. What a detector needs
and the run does not have (no teacher, no judge, too few train steps) makes it say nothing.

    findings = detect(run.series, RunFacts.of(run.config))
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from opd_core.analysis.detectors.drift import entropy_collapse, kl_rising
from opd_core.analysis.detectors.endings import ending_mismatch
from opd_core.analysis.detectors.finding import Finding, Level, RunFacts
from opd_core.analysis.detectors.history import History
from opd_core.analysis.detectors.losses import LAG_S, survivors_biased, tracker_lagging
from opd_core.analysis.detectors.numbers import advantage_dominated, engine_gap, not_finite
from opd_core.analysis.detectors.teacher import (
    teacher_equals_student,
    teacher_without_effect,
    uniform_teacher,
)
from opd_core.analysis.run_data import Series
from opd_core.tracking.shipper import ShippingReport

__all__ = ["DETECTORS", "LAG_S", "Detection", "Finding", "Level", "RunFacts", "detect"]

Detector = Callable[[History, RunFacts], Finding | None]

DETECTORS: tuple[Detector, ...] = (
    teacher_equals_student,
    teacher_without_effect,
    uniform_teacher,
    ending_mismatch,
    entropy_collapse,
    kl_rising,
    engine_gap,
    not_finite,
    survivors_biased,
    advantage_dominated,
)
"""Those that look at metrics; ``tracker_lagging`` looks at a sink."""


class Detection:
    """Takes a run's records in, one by one; tells each finding once, where it is first seen. What
    was only a note is told again if it gets worse."""

    def __init__(self, facts: RunFacts) -> None:
        self.findings: tuple[Finding, ...] = ()
        self._facts = facts
        self._history = History()
        self._open = DETECTORS
        self._ships = True

    def add(self, train_step: int, metrics: Mapping[str, float]) -> tuple[Finding, ...]:
        """Take in a record of the journal; the findings that are new."""
        self._history.add(train_step, metrics)
        found = {look: look(self._history, self._facts) for look in self._open}
        self._open = tuple(
            look for look, finding in found.items() if finding is None or finding.level == "note"
        )
        told = {(finding.name, finding.level) for finding in self.findings}
        new = tuple(f for f in found.values() if f is not None and (f.name, f.level) not in told)
        self.findings += new
        return new

    def ship(self, shipping: ShippingReport, limit_s: float = LAG_S) -> tuple[Finding, ...]:
        """Take in how far the journal's records got; the finding, if it is new."""
        for name, sink in shipping.sinks.items() if self._ships else ():
            finding = tracker_lagging(name, sink, self._history.train_step, limit_s)
            if finding is not None:
                self._ships = False
                self.findings += (finding,)
                return (finding,)
        return ()


def detect(series: Series, facts: RunFacts) -> tuple[Finding, ...]:
    """What was found in a run, in the order in which it was seen.

    The run is gone through from its start, so that the findings are those that were told while it
    ran, and a fault that passed is among them.
    """
    by_step: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for name in series.names:
        steps, values = series.of(name)
        for step, value in zip(steps.tolist(), values.tolist(), strict=True):
            by_step[step][name] = value
    detection = Detection(facts)
    for step in sorted(by_step):
        detection.add(step, by_step[step])
    return detection.findings
