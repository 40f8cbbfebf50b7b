"""An arm's runs as numbers, and the two intervals of an arm or of the difference of two.

*These models*: models and seeds are fixed, questions are a sample. Several seeds are averaged per
question first, so that what they share on a question is not taken for independent evidence.
*New training runs*: seeds are a sample, questions are fixed. One mean a seed holds the noise of its
training and of its answers; questions that are hard for every seed cancel in a comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opd_core.analysis.measuring import Measured
from opd_core.analysis.outcome import Interval
from opd_core.analysis.statistics import (
    Array,
    Bounds,
    bootstrap_interval,
    normal_interval,
    paired_seeds_needed,
    paired_seeds_within,
    t_interval,
    uniform_interval,
    welch_interval,
    welch_seeds_needed,
    welch_seeds_within,
    wilson_interval,
)

FEWEST_QUESTIONS = 10
"""Below it an interval from resampled questions covers the truth too rarely."""
ROUNDING = 1e-12

NEW_RUNS_OPEN = "what new training runs would give is not covered"
NEW_QUESTIONS_OPEN = "other questions are not covered"


@dataclass(frozen=True, slots=True)
class Pool:
    """An arm at the target.

    ``values`` [S] are the seeds' means, ``questions`` [S, Q] those per question (None where a run
    kept none); ``stderr`` is that of the arm's mean, if it is known; runs of one seed are averaged.
    ``span`` is the width of the range that a question's value may have.
    """

    run_ids: frozenset[str]
    seeds: tuple[int, ...]
    values: Array
    questions: Array | None
    stderr: float | None
    span: float

    @property
    def value(self) -> float:
        """The mean over seeds."""
        return float(self.values.mean())


def pool(measured: Sequence[Measured], keys: Sequence[str]) -> Pool:
    """An arm's runs together, on these questions; without questions where a run kept none."""
    seeds = tuple(sorted({each.run.seed for each in measured}))
    of_seed = [[each for each in measured if each.run.seed == seed] for seed in seeds]
    run_ids = frozenset(each.run.run_id for each in measured)
    errors = [error for each in measured if (error := _error(each)) is not None]
    # The mean of errors is that of runs whose errors are all alike: they may share questions.
    stderr = float(np.mean(errors)) if len(errors) == len(measured) else None
    if any(each.questions is None for each in measured):
        values = np.array([np.mean([each.value for each in group]) for group in of_seed])
        return Pool(run_ids, seeds, values, None, stderr, 1.0)
    questions = np.array([np.mean([_row(each, keys) for each in g], axis=0) for g in of_seed])
    span = max(1.0, float(np.ptp(questions)))
    return Pool(run_ids, seeds, questions.mean(axis=1), questions, stderr, span)


def models_interval(arm: Pool, baseline: Pool | None = None) -> Interval | None:
    """The interval of the arm's value, or of arm minus baseline, for these very models on new
    questions; None where there is nothing to take it from."""
    if arm.questions is not None and baseline is None:
        return _over_questions(arm.questions.mean(axis=0), arm.span)
    if arm.questions is not None and baseline is not None and baseline.questions is not None:
        return _over_pairs(arm, baseline)
    errors = [arm.stderr] if baseline is None else [arm.stderr, baseline.stderr]
    known = [error for error in errors if error is not None]
    if len(known) < len(errors):
        return None
    same = baseline is not None and arm.run_ids == baseline.run_ids
    value = arm.value - (baseline.value if baseline else 0.0)
    return _interval(
        normal_interval(value, 0.0 if same else float(np.linalg.norm(known))),
        len(known),
        "normal, from the recorded standard errors",
        f"These models: 95 % by the standard errors that were recorded; {NEW_RUNS_OPEN}.",
    )


def training_interval(arm: Pool, baseline: Pool | None = None) -> Interval | None:
    """The interval of the arm's value, or of arm minus baseline, for new training runs on the same
    questions; None with fewer than two seeds a side, or where all seeds came out the same."""
    pools = [arm] if baseline is None else [arm, baseline]
    seeds = min(len(each.seeds) for each in pools)
    if seeds < 2:
        return None
    if baseline is None:
        bounds, method = t_interval(arm.values), "t over seeds"
    elif arm.seeds == baseline.seeds:
        bounds, method = t_interval(arm.values - baseline.values), "t over seeds, paired by seed"
    else:
        bounds, method = welch_interval(arm.values, baseline.values), "Welch's t over seeds"
    if bounds.high - bounds.low <= ROUNDING:
        return None
    where, left = ("", "")
    if arm.questions is not None and (baseline is None or baseline.questions is not None):
        where, left = f" on these {arm.questions.shape[1]} questions", f"; {NEW_QUESTIONS_OPEN}"
    number = " and ".join(str(n) for n in dict.fromkeys(len(each.seeds) for each in pools))
    covers = f"New training runs{where}: 95 % from {number} seeds an arm ({method}){left}."
    return _interval(bounds, seeds, method, covers)


def seeds_missing(arm: Pool, baseline: Pool, margin: float | None, alpha: float) -> int | None:
    """How many more seeds each arm needs so that a difference as large as the observed one, or as
    the margin if that is more, is found at ``alpha`` with a chance of 80 %; and, if the observed
    one is below the margin, so that an interval around it lies within the margin.

    None above 1000, and where the spread of seeds is not known.
    """
    have = min(len(arm.seeds), len(baseline.seeds))
    if have < 2:
        return None
    seen = abs(arm.value - baseline.value)
    room = max(0.0, (margin or 0.0) - seen)
    if arm.seeds == baseline.seeds:
        spread = float((arm.values - baseline.values).std(ddof=1))
        needed = paired_seeds_needed(spread, seen + room, alpha)
        within = paired_seeds_within(spread, room) if room else 0
    else:
        spreads = [float(each.values.std(ddof=1)) for each in (arm, baseline)]
        needed = welch_seeds_needed(spreads[0], spreads[1], seen + room, alpha)
        within = welch_seeds_within(spreads[0], spreads[1], room) if room else 0
    if needed is None or within is None:
        return None
    return max(1, max(needed, within) - have)


def _over_pairs(arm: Pool, baseline: Pool) -> Interval | None:
    """Of the differences of the same questions."""
    if arm.questions is None or baseline.questions is None:
        return None
    values = arm.questions.mean(axis=0) - baseline.questions.mean(axis=0)
    if arm.run_ids == baseline.run_ids:
        return _of_questions(uniform_interval(0.0, len(values), 0.0), len(values), "the same runs")
    return _over_questions(values, max(arm.span, baseline.span), "paired ")


def _over_questions(values: Array, span: float, paired: str = "") -> Interval | None:
    count = len(values)
    if count < FEWEST_QUESTIONS:
        return None
    if not paired and np.isin(values, (0.0, 1.0)).all():
        bounds = wilson_interval(int(values.sum()), count)
        return _of_questions(bounds, count, "Wilson's interval")
    if np.ptp(values) <= ROUNDING:
        bounds = uniform_interval(float(values.mean()), count, span)
        return _of_questions(bounds, count, "no question differs from another")
    return _of_questions(bootstrap_interval(values), count, f"{paired}bootstrap over questions")


def _of_questions(bounds: Bounds, count: int, method: str) -> Interval:
    covers = f"These models on new questions: 95 % from {count} questions ({method}); "
    return _interval(bounds, count, method, f"{covers}{NEW_RUNS_OPEN}.")


def _error(measured: Measured) -> float | None:
    """The standard error of a run's value over questions."""
    if measured.questions is None or len(measured.questions) < FEWEST_QUESTIONS:
        return measured.stderr
    values = list(measured.questions.values())
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def _row(measured: Measured, keys: Sequence[str]) -> Array:
    table = measured.questions or {}
    return np.array([table[key] for key in keys])


def _interval(bounds: Bounds, units: int, method: str, covers: str) -> Interval:
    return Interval(float(bounds.low), float(bounds.high), float(bounds.p), units, method, covers)
