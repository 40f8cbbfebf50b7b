"""What is recorded of each train step: once, however often the step is trained.

A resumed run trains recorded batches again, and what the journal has of them is not written twice.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opd_core.tracking.journal import Journal, read_all

TRAINED = "time/step_s"
"""Every record of a train step has it."""
EVALUATED = "time/evaluation_s"
"""Every record of an evaluation has it."""


class StepLog:
    """The journal's writing end, which knows what the journal holds.

    Raises as :class:`~opd_core.tracking.journal.Journal` does, and
    :class:`~opd_core.errors.DataError` for a journal that cannot be read to its end.
    """

    def __init__(self, path: Path) -> None:
        self.tracking_s = 0.0
        self._known: defaultdict[int, dict[str, float]] = defaultdict(dict)
        for record in read_all(path):
            self._known[record.train_step].update(record.metrics)
        self._journal = Journal(path)

    def has(self, train_step: int, name: str) -> bool:
        """Whether a record of this step holds this metric."""
        return name in self._known[train_step]

    def of_step(self, train_step: int) -> Mapping[str, float]:
        """All metrics of a step so far."""
        return self._known[train_step]

    def of_training(self, train_step: int) -> Mapping[str, float]:
        """All metrics of a train step; none of one that was not trained here."""
        return self._known[train_step] if self.has(train_step, TRAINED) else {}

    def record(self, train_step: int, metrics: Mapping[str, float], kind: str = "") -> None:
        """Write a record; nothing if ``kind``, a metric that all of its kind have, is there."""
        if kind and self.has(train_step, kind):
            return
        with self.tracking():
            self._journal.append(train_step, metrics)
        self._known[train_step].update(metrics)

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """The run waits for something that is only kept: count the time."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.tracking_s += time.perf_counter() - started

    def take_tracking_s(self) -> float:
        """Seconds that the run has waited so since the last call."""
        seconds, self.tracking_s = self.tracking_s, 0.0
        return seconds

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
