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
LONG = 20
"""Train steps of a mean whose scatter is known, and not only guessed from five values."""
SETTLING = 3
"""Train steps after which a learning rate that is too high has shown what it does."""
RECENT = 2 * LONG
"""Train steps that are kept."""
KL = "opd_reverse_kl"
GROUPS, LOST = "groups/", "lost/"


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric's mean over train steps ``first`` to ``last``, and its standard error."""

    value: float
    stderr: float
    first: int
    last: int
    count: int
    low: float
    """The smallest of the values."""

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


class Track:
    """One metric at its start, at its lowest and now; steps that lack it are left out."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.starts: list[Mean] = []
        """Over its first train step, and over the first :data:`WINDOW`."""
        self.lowest: Mean | None = None
        """The lowest mean over :data:`LONG` train steps so far."""
        self._recent: deque[Step] = deque(maxlen=RECENT)

    def add(self, step: Step) -> None:
        """Take in a train step."""
        self._recent.append(step)
        if len(self._recent) in (1, WINDOW) and (start := self.now(len(self._recent))):
            self.starts.append(start)
        now = self.now(LONG)
        if now and (self.lowest is None or now.value < self.lowest.value):
            self.lowest = now

    def now(self, steps: int) -> Mean | None:
        """Its mean over the last train steps."""
        return mean_of(list(self._recent)[-steps:], self.name, steps)

    def settled(self) -> Mean | None:
        """Its mean over all but the first train steps (:data:`SETTLING`) of a run that is too young
        for two long windows."""
        count = len(self._recent) - SETTLING
        return self.now(count) if WINDOW <= count < RECENT - SETTLING else None

    def last_two(self) -> tuple[Mean, Mean] | None:
        """Its means over two windows in a row, the last :data:`LONG` train steps each; of half a
        run that is shorter, but not below :data:`WINDOW`."""
        steps = list(self._recent)
        size = len(steps) // 2
        if size < WINDOW:
            return None
        before, now = steps[-2 * size : -size], steps[-size:]
        means = mean_of(before, self.name, size), mean_of(now, self.name, size)
        return (means[0], means[1]) if means[0] and means[1] else None


class History:
    """Grows by the journal's records, in their order."""

    def __init__(self) -> None:
        self.recent: deque[Step] = deque(maxlen=RECENT)
        self.groups: Counter[str] = Counter()
        """By status, all over the run."""
        self.lost: Counter[str] = Counter()
        """By cause, all over the run."""
        self._kl: dict[str, Track] = {}
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
        if len(self._first) < LONG:
            self._first.append(step)
        for name in step.metrics:
            base, _, source = name.partition("/")
            if base == KL and step.metrics.get(f"response_tokens/{source}", 1.0) > 0:
                self._kl.setdefault(name, Track(name)).add(step)

    @property
    def kl(self) -> list[Track]:
        """The reverse KL of each data source where there are several: that of all tokens moves with
        their mixture. Else that of all tokens."""
        sources = [track for name, track in self._kl.items() if name != KL]
        return sources if len(sources) > 1 else [self._kl[KL]] if KL in self._kl else []

    def at_start(self, name: str) -> Mean | None:
        """A metric of the first train step, which says what the student was like untrained."""
        return mean_of(self._first[:1], name, 1)

    def now(self, name: str, steps: int = WINDOW) -> Mean | None:
        """A metric's mean over the last train steps; None unless each of them has it."""
        return mean_of(list(self.recent)[-steps:], name, steps)

    def change(self, name: str, most: int = WINDOW) -> tuple[Mean, Mean] | None:
        """Its means over the first and the last ``most`` train steps, or over the halves of a
        shorter run; None below :data:`WINDOW` steps each, or where a step lacks it."""
        count = min(most, self.steps // 2)
        if count < WINDOW:
            return None
        start, now = mean_of(self._first[:count], name, count), self.now(name, count)
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
    return Mean(mean, stderr, steps[0].train_step, steps[-1].train_step, count, min(values))


def _count(value: float) -> int:
    return int(value) if math.isfinite(value) else 0
