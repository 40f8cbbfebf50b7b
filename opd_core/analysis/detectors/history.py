"""What detectors look at: the beginning of a run, its last train steps, and what it lost.

Bounded, so that a look costs the same after a thousand train steps as after ten.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opd_core.training.step_log import TRAINED

WINDOW = 5
"""Train steps of a mean: one step of a small batch moves the reverse KL by a third of itself."""
RECENT = 20
"""Train steps that are kept: two measurements of what is measured every tenth."""
GROUPS, LOST = "groups/", "lost/"


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric's mean over train steps ``first`` to ``last``, and its standard error."""

    value: float
    stderr: float
    first: int
    last: int

    @property
    def steps(self) -> str:
        """The train steps, in words."""
        return in_steps(self.first, self.last)

    def above(self, other: Mean) -> float:
        """z of the difference; infinite where neither varies and they differ."""
        difference = self.value - other.value
        stderr = math.hypot(self.stderr, other.stderr)
        if stderr == 0:
            return math.copysign(math.inf, difference) if difference else 0.0
        return difference / stderr


def in_steps(first: int, last: int) -> str:
    """Train steps in words, e.g. ``in train steps 6 to 10``."""
    return f"in train step {first}" if first == last else f"in train steps {first} to {last}"


@dataclass(frozen=True, slots=True)
class Step:
    """One train step's metrics."""

    train_step: int
    metrics: Mapping[str, float]


class History:
    """Grows by the journal's records, in their order."""

    def __init__(self) -> None:
        self.recent: deque[Step] = deque(maxlen=RECENT)
        self.groups: Counter[str] = Counter()
        """By status, all over the run."""
        self.lost: Counter[str] = Counter()
        """By cause, all over the run."""
        self.lowest_kl: Mean | None = None
        """The window of the lowest reverse KL so far."""
        self.steps = 0
        self._first: list[Step] = []

    @property
    def train_step(self) -> int:
        """The last train step; 0 before the first."""
        return self.recent[-1].train_step if self.recent else 0

    @property
    def start(self) -> Step | None:
        """The first train step."""
        return self._first[0] if self._first else None

    def add(self, train_step: int, metrics: Mapping[str, float]) -> None:
        """Take in a record of the journal; nothing of a train step that was taken in before."""
        trained = TRAINED in metrics
        if trained and self.recent and train_step <= self.train_step:
            return
        for name, value in metrics.items():
            if name.startswith(GROUPS):
                self.groups[name.removeprefix(GROUPS)] += _count(value)
            elif name.startswith(LOST):
                self.lost[name.removeprefix(LOST)] += _count(value)
        if trained:
            self._add_step(Step(train_step, metrics))

    def _add_step(self, step: Step) -> None:
        self.steps += 1
        self.recent.append(step)
        if len(self._first) < WINDOW:
            self._first.append(step)
        kl = self.now("opd_reverse_kl")
        if kl and (self.lowest_kl is None or kl.value < self.lowest_kl.value):
            self.lowest_kl = kl

    def at_start(self, name: str) -> Mean | None:
        """A metric of the first train step, which says what the student was like untrained."""
        return mean_of(self._first[:1], name, 1)

    def now(self, name: str, steps: int = WINDOW) -> Mean | None:
        """A metric's mean over the last train steps; None unless each of them has it."""
        return mean_of(list(self.recent)[-steps:], name, steps)

    def change(self, name: str) -> tuple[Mean, Mean] | None:
        """Its means over the first and the last :data:`WINDOW` train steps; None where the two
        would overlap, or a step lacks it."""
        if self.steps < 2 * WINDOW:
            return None
        start, now = mean_of(self._first, name, WINDOW), self.now(name)
        return (start, now) if start and now else None

    def latest(self, *names: str, count: int) -> list[Step]:
        """The last ``count`` of the recent train steps that have all of these metrics; none if
        there are fewer."""
        having = [step for step in self.recent if all(n in step.metrics for n in names)]
        return having[-count:] if len(having) >= count else []


def mean_of(steps: Sequence[Step], name: str, count: int) -> Mean | None:
    """Mean over ``count`` steps, None unless each has a finite value. Its standard error is the
    larger of two: what the steps' own (``<name>_stderr``) add up to, and what their scatter
    shows."""
    if len(steps) < count:
        return None
    values = [step.metrics.get(name, math.nan) for step in steps]
    mean = sum(values) / count if all(map(math.isfinite, values)) else math.nan
    if not math.isfinite(mean):
        return None
    scatter = math.hypot(*(value - mean for value in values)) / math.sqrt(max(count - 1, 1))
    own = math.hypot(*(step.metrics.get(f"{name}_stderr", 0.0) for step in steps)) / math.sqrt(
        count
    )
    stderr = max(scatter, own) / math.sqrt(count)
    return Mean(mean, stderr, steps[0].train_step, steps[-1].train_step)


def _count(value: float) -> int:
    return int(value) if math.isfinite(value) else 0
