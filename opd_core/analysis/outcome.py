"""What a comparison came to: plain frozen records of strings and floats, ready for any surface.

``comparison`` makes them and hands them on under its own name.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from opd_core.errors import ConfigError

Axis = Literal["steps", "student_tokens", "teacher_tokens", "device_seconds", "money"]
AXES: tuple[str, ...] = get_args(Axis)
"""What runs are aligned on; all count from 0 at the start of training."""
CONFIDENCE = 0.95
"""Of every interval."""

BETTER, WORSE, NO_DIFFERENCE, CANNOT_TELL = "better", "worse", "no difference", "cannot tell"
HIGHER, LOWER = "higher", "lower"
"""The verdicts; higher and lower are those of a metric of which neither is better."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is compared, and where: ``metric`` at the value ``at`` of ``axis``.

    ``at`` None is the largest value at which all runs were measured. Differences below
    ``margin`` (in the metric's unit) do not matter; None is 2 points of a share, and no margin of
    any other metric.
    """

    metric: str = "eval/accuracy"
    axis: str = "student_tokens"
    at: float | None = None
    margin: float | None = None

    def __post_init__(self) -> None:
        """Raises :class:`ConfigError`."""
        if self.axis not in AXES:
            raise ConfigError(f"axis: expected one of {', '.join(AXES)}, got {self.axis!r}")
        if self.margin is not None and not 0 <= self.margin < math.inf:
            raise ConfigError(f"margin: expected a number of 0 or more, got {self.margin}")
        if self.at is not None and not 0 <= self.at < math.inf:
            raise ConfigError(f"at: expected a value of 0 or more on {self.axis}, got {self.at}")


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % confidence interval and the two-sided p-value of "the true value is 0".

    ``units`` counts what it was taken over (questions, seeds); ``method`` names the procedure,
    ``covers`` says in a sentence what its 95 % are about, and what not.
    """

    low: float
    high: float
    p: float
    units: int
    method: str
    covers: str


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One run of an arm at the target: measured after ``train_step``, where the target's axis
    stood at ``axis_value``; or taken between that evaluation and the one after
    ``train_step_after``, this ``fraction`` of the way."""

    run_id: str
    seed: int
    train_step: int
    axis_value: float
    value: float
    train_step_after: int | None = None
    fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class ArmCurve:
    """A metric of an arm along an axis: the mean over its seeds, the least and the largest.

    Only train steps that all its runs recorded; ``x`` is their mean there.
    """

    metric: str
    axis: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Arm:
    """Runs that are equal in everything but the seed. ``value`` is the mean over its seeds at the
    target; its intervals, and their p-values, are about the value itself."""

    label: str
    baseline: bool
    runs: tuple[ArmRun, ...]
    value: float
    models: Interval | None
    training: Interval | None
    curves: tuple[ArmCurve, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The distinct seeds of its runs, ascending."""
        return tuple(sorted({run.seed for run in self.runs}))

    def curve(self, metric: str, axis: str) -> ArmCurve | None:
        """The curve of that metric along that axis, if there is one."""
        return next((c for c in self.curves if (c.metric, c.axis) == (metric, axis)), None)


@dataclass(frozen=True, slots=True)
class Pair:
    """An arm against the baseline. ``difference`` is arm minus baseline in the metric's unit.

    ``models`` is about these very models on new questions, ``training`` about new training runs on
    these questions; ``basis`` names the one that ``verdict`` and ``p`` come from ("" where there is
    neither). ``holm_p`` is ``p`` corrected for the number of arms. ``beyond_margin``: True where
    the whole interval of the basis lies beyond the margin, False where it lies within, else None
    (as without a margin).
    ``more_seeds`` is how many more seeds each arm needs for a chance of 80 % to tell; None where
    that is no question, cannot be said, or is above 1000. ``questions`` were common,
    ``left_out`` were not; both are 0 where the two were not paired by question.
    """

    label: str
    baseline: str
    difference: float
    models: Interval | None
    training: Interval | None
    basis: str
    p: float | None
    holm_p: float | None
    verdict: str
    beyond_margin: bool | None
    sentence: str
    more_seeds: int | None
    questions: int
    left_out: int


@dataclass(frozen=True, slots=True)
class ReferenceValue:
    """A line to compare with, e.g. the teacher's own accuracy, on the questions that all runs
    answered."""

    label: str
    value: float
    models: Interval | None
    questions: int


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which the runs are not equal: ``values`` holds (whose, what).

    ``kind`` is recipe, data, models, code, python, packages or machine. "Whose" is an arm's label
    where all its runs agree, else a run id.
    """

    kind: str
    key: str
    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Arms, the baseline first, and what was found. ``at`` is the resolved value of the target's
    axis; ``axes`` are those that all runs have. ``lower_is_better``: None where neither is. No
    ``differences``: nothing but the seed."""

    target: Target
    at: float
    lower_is_better: bool | None
    axes: tuple[str, ...]
    arms: tuple[Arm, ...]
    pairs: tuple[Pair, ...]
    differences: tuple[Difference, ...]
    references: tuple[ReferenceValue, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> str:
        """All of it as a JSON object, keys as the fields are named."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False)
