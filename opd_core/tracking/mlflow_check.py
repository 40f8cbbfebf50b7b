"""A run's journal against what MLflow has of it, point by point."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from opd_core.tracking.journal import JournalRecord
from opd_core.tracking.mlflow_sink import connect
from opd_core.tracking.names import finite_points

Value = tuple[int, int, float]
"""Train step, unix time in milliseconds, value."""


@dataclass(frozen=True, slots=True)
class PointCheck:
    """``points`` finite ones are in the journal. Of those ``missing`` are not in MLflow, and
    ``doubled`` more than once; ``foreign`` points are under the journal's names and not of it."""

    points: int = 0
    missing: int = 0
    doubled: int = 0
    foreign: int = 0

    @property
    def exact(self) -> bool:
        """Whether MLflow has each point exactly once, and no other."""
        return not (self.missing or self.doubled or self.foreign)

    def __str__(self) -> str:
        if self.exact:
            return f"{self.points} points, each exactly once"
        told = ("missing", "doubled", "foreign")
        counts = ", ".join(f"{getattr(self, name)} {name}" for name in told if getattr(self, name))
        return f"of {self.points} points: {counts}"


def check_points(
    uri: str,
    run_id: str | None,
    records: Sequence[JournalRecord],
    connect: Callable[[str], Any] = connect,
) -> PointCheck:
    """Compare ``records`` with the histories of all their metrics in the MLflow run ``run_id``; of
    one that is not there (None) all are missing. Raises what MLflow raises."""
    expected: defaultdict[str, set[Value]] = defaultdict(set)
    for point in finite_points(records)[0]:
        expected[point.name].add((point.train_step, point.time_ms, point.value))
    points = sum(map(len, expected.values()))
    if run_id is None:
        return PointCheck(points, missing=points)
    client = connect(uri)
    missing = doubled = foreign = 0
    for name, values in expected.items():
        history = client.get_metric_history(run_id, name)
        found = [(metric.step, metric.timestamp, metric.value) for metric in history]
        missing += len(values.difference(found))
        doubled += len(found) - len(set(found))
        foreign += len(set(found) - values)
    return PointCheck(points, missing, doubled, foreign)
