"""Whether a run that was made again came to the same: an original, its reruns, one verdict.

What is asked is not whether two models differ, but whether the original is a run such as the
recipe gives today. So it is held against the spread of new runs: reruns with other seeds say
where one more would fall. A rerun with the original's own seed may show more: the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy import special

from opd_core.analysis import reproduction_words as words
from opd_core.analysis.comparison_words import shown_p, shown_value
from opd_core.analysis.differences import RECIPE, find_differences
from opd_core.analysis.outcome import (
    CANNOT_TELL,
    CONFIDENCE,
    NO_DIFFERENCE,
    ArmRun,
    Comparison,
    Difference,
    Interval,
    Pair,
    Target,
)
from opd_core.analysis.reproduction_content import by_content, unknown_teachers
from opd_core.analysis.run_data import RunData
from opd_core.analysis.statistics import Array, Bounds, Number

REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
NUMBERS = (
    "opd_reverse_kl",
    "entropy",
    "grad_norm",
    "response_tokens",
    "rollout/reward_mean",
    "eval/accuracy",
)
"""Metrics that depend on every token that was sampled, scored and trained: where they are the same
at every train step, so was everything."""
ORIGINAL, RERUNS = "original", "reruns"
"""Whose, in the differences."""
THIRD = "A third seed makes that about three times less."
FEWEST, ENOUGH = 2, 3
"""Reruns from which a spread can be taken, and from which it is narrow enough for "reproduced":
Student's t makes the interval 16 standard deviations wide to each side from two, 5 from three."""
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class SameSeed:
    """A rerun with the original's seed: how many train steps were compared, the first one after
    which a number ``parted`` (None: none did), and whether the recipe had ``promised`` as much."""

    run_id: str
    steps: int
    parted: int | None
    promised: bool

    @property
    def throughout(self) -> bool:
        """Whether all numbers are the same."""
        return self.parted is None


@dataclass(frozen=True, slots=True)
class Reproduction:
    """What reruns came to.

    ``verdict`` is ``reproduced``, ``not reproduced`` or ``cannot tell``; empty where there is
    nothing to reproduce: no original, or a recipe that was changed in what it computes. ``new_run``
    is where one more run would fall with a chance of 95 %, by the reruns whose seed is not the
    original's; its p-value is that of "the original is such a run". ``left_out`` are runs that were
    not measured where the others were.
    """

    verdict: str
    sentence: str
    metric: str
    original: ArmRun | None
    reruns: tuple[ArmRun, ...]
    new_run: Interval | None
    same_seed: SameSeed | None
    differences: tuple[Difference, ...]
    left_out: tuple[str, ...]

    def to_json(self) -> str:
        """All of it as a JSON object, keys as the fields are named."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False)


def judge_reruns(
    original: RunData | None, reruns: Sequence[RunData], comparison: Comparison
) -> Reproduction:
    """The verdict on an original and its reruns, or the spread of reruns that have none.

    ``comparison`` is that of all these runs, the original first if there is one. What it leaves
    out, as its warnings tell, is left out here.
    """
    measured = {run.run_id: run for arm in comparison.arms for run in arm.runs}
    again = tuple(measured[run.run_id] for run in reruns if run.run_id in measured)
    left_out = tuple(run.run_id for run in reruns if run.run_id not in measured)
    first = measured[original.run_id] if original else None
    differences = find_differences(
        [*([(ORIGINAL, [original])] if original else []), (RERUNS, reruns)]
    )
    if original is not None:
        differences = by_content(differences, original)
    metric = comparison.target.metric
    changed = original is not None and any(each.kind == RECIPE for each in differences)
    others = [run for run in again if first is None or changed or run.seed != first.seed]
    new_run = _new_run(others, None if changed else first)
    same = None if original is None or changed else same_seed(original, reruns, metric)
    if original is None or first is None:
        verdict, sentence = "", words.spread(metric, again, new_run)
    elif changed:
        verdict, sentence = "", " ".join(pair.sentence for pair in comparison.pairs)
    else:
        verdict, sentence = _judge(comparison, first, others, new_run, same)
        sentence += words.unknown_weights(unknown_teachers([original, *reruns]))
    return Reproduction(
        verdict, sentence, metric, first, again, new_run, same, differences, left_out
    )


def prediction_interval(values: Array, further: Number | float | None = None) -> Bounds:
    """Where one further run falls with a chance of 95 %, by runs that are already there.

    mean ± t s sqrt(1 + 1/n), t with n - 1 degrees of freedom: the spread of one new value and the
    error of the mean together (Hahn and Meeker 1991, "Statistical Intervals", section 4.7). Takes
    values for independent and normally distributed.

    Args:
        values: [N] or [N, E], one value a run, of E experiments each on its own; N >= 2.
        further: [] or [E], the p-value is that of "it is such a run"; without it 1.
    """
    count, mean = len(values), values.mean(axis=0)
    error = values.std(axis=0, ddof=1) * np.sqrt(1 + 1 / count)
    half = special.stdtrit(count - 1, (1 + CONFIDENCE) / 2) * error
    away = np.abs(mean - (mean if further is None else further))
    t = np.where(error > 0, away / np.where(error > 0, error, 1), np.where(away > 0, np.inf, 0))
    return Bounds(mean - half, mean + half, 2 * special.stdtr(count - 1, -t))


def same_seed(original: RunData, reruns: Sequence[RunData], metric: str) -> SameSeed | None:
    """How the rerun with the original's seed goes with it, number by number; None without one, and
    where nothing was recorded."""
    again = next((run for run in reruns if run.seed == original.seed), None)
    if again is None:
        return None
    steps: set[int] = set()
    parted: set[int] = set()
    for name in dict.fromkeys((*NUMBERS, metric)):
        one, other = _by_step(original, name), _by_step(again, name)
        steps |= one.keys() | other.keys()
        parted |= {step for step in one.keys() | other.keys() if one.get(step) != other.get(step)}
    if not steps:
        return None
    promised = bool(original.config.get("deterministic"))
    return SameSeed(again.run_id, len(steps), min(parted, default=None), promised)


def _by_step(run: RunData, metric: str) -> dict[int, str]:
    """Values to the last bit; one that is not a number is equal to itself."""
    steps, values = run.series.of(metric)
    return {int(step): float(value).hex() for step, value in zip(steps, values, strict=True)}


def _new_run(runs: Sequence[ArmRun], original: ArmRun | None) -> Interval | None:
    """From runs of seeds of their own; None of fewer than two, and where all came out the same."""
    if len(runs) < FEWEST:
        return None
    values = np.array([run.value for run in runs])
    bounds = prediction_interval(values, original.value if original else None)
    if bounds.high - bounds.low <= ROUNDING:
        return None
    covers = f"One more run on these questions: 95 % by {len(runs)} runs; others are not covered."
    low, high, p = float(bounds.low), float(bounds.high), float(bounds.p)
    return Interval(low, high, p, len(runs), "t prediction interval over seeds", covers)


def _judge(
    comparison: Comparison,
    original: ArmRun,
    others: Sequence[ArmRun],
    new_run: Interval | None,
    same: SameSeed | None,
) -> tuple[str, str]:
    """The verdict and its sentence, by the strongest evidence that there is."""
    target = comparison.target
    if same is not None and same.throughout:
        told = f"the rerun with the original's seed has the same numbers at all {same.steps} steps"
        return REPRODUCED, f"reproduced: {told}.{_beside(target, original, others, new_run)}"
    if new_run is not None:
        verdict, sentence = _by_spread(target, original, others, new_run)
        return verdict, sentence + _broken(same)
    if len(others) >= FEWEST:
        verdict, sentence = _without_spread(target, original, others)
        return verdict, sentence + _broken(same)
    if same is not None:
        return _by_models(_pair_of(comparison, same.run_id), same)
    pair = _pair_of(comparison, others[0].run_id) if others else None
    if pair is None:
        return CANNOT_TELL, "cannot tell: no rerun was measured where the original was."
    return CANNOT_TELL, (
        "cannot tell: one rerun with another seed does not show how far runs scatter. "
        f"It differs by {words.model_difference(target.metric, pair)}. Run two more seeds."
    )


def _by_spread(
    target: Target, original: ArmRun, others: Sequence[ArmRun], new_run: Interval
) -> tuple[str, str]:
    """The original against where a new run would fall."""
    metric, half = target.metric, (new_run.high - new_run.low) / 2
    numbers = words.original_in_numbers(metric, original, others, new_run)
    if new_run.low <= original.value <= new_run.high:
        unseen = f"A run that is off by less than {words.size(metric, half)} would not be noticed"
        if len(others) < ENOUGH:
            return CANNOT_TELL, f"cannot tell: {numbers}. {unseen}. {THIRD}"
        return REPRODUCED, f"reproduced: {numbers}. {unseen}."
    away = original.value - (new_run.low + new_run.high) / 2
    small = target.margin is not None and abs(away) <= target.margin
    less = f" The difference is less than the margin of {words.size(metric, target.margin)}."
    return NOT_REPRODUCED, (
        f"not reproduced: {numbers} (p {shown_p(new_run.p)}).{less if small else ''} "
        "By chance alone this is said of one run in 20."
    )


def _without_spread(target: Target, original: ArmRun, others: Sequence[ArmRun]) -> tuple[str, str]:
    """All reruns came out the same, which says nothing of how seeds scatter."""
    metric, away = target.metric, abs(original.value - others[0].value)
    numbers = (
        f"all {len(others)} reruns came to {shown_value(metric, others[0].value)}, the original to "
        f"{shown_value(metric, original.value)}"
    )
    if away <= max(target.margin or 0.0, ROUNDING):
        return REPRODUCED, f"reproduced: {numbers}."
    return CANNOT_TELL, f"cannot tell: {numbers}; without any spread no interval can be taken."


def _by_models(pair: Pair | None, same: SameSeed) -> tuple[str, str]:
    """A rerun with the same seed that has other numbers: whether its model is another one."""
    verdict = CANNOT_TELL
    if pair is not None and pair.verdict != CANNOT_TELL:
        verdict = REPRODUCED if pair.verdict == NO_DIFFERENCE else NOT_REPRODUCED
    told = pair.sentence if pair else "The two were not compared by themselves."
    return verdict, (
        f"{verdict}: the rerun with the original's seed has other numbers from train step "
        f"{same.parted} on. {told}{_promise(same)} How far runs scatter is not known: three other "
        "seeds would show it."
    )


def _beside(
    target: Target, original: ArmRun, others: Sequence[ArmRun], new_run: Interval | None
) -> str:
    """What other seeds say, where the numbers are the same anyway."""
    if new_run is None:
        return ""
    numbers = words.original_in_numbers(target.metric, original, others, new_run)
    return f" {numbers[:1].upper()}{numbers[1:]}."


def _broken(same: SameSeed | None) -> str:
    if same is None:
        return ""
    told = (
        f" The rerun with the original's seed has other numbers from train step {same.parted} on."
    )
    return told + _promise(same)


def _pair_of(comparison: Comparison, run_id: str) -> Pair | None:
    """The run against the original, where it was compared by itself."""
    alone = [a.label for a in comparison.arms if [run.run_id for run in a.runs] == [run_id]]
    return next((pair for pair in comparison.pairs if pair.label in alone), None)


def _promise(same: SameSeed) -> str:
    return " The recipe says deterministic: they should be the same." if same.promised else ""
