"""From two pooled arms to a verdict and its words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opd_core.analysis.comparison_words import (
    metric_name,
    shown_difference,
    shown_interval,
    shown_p,
)
from opd_core.analysis.outcome import (
    BETTER,
    CANNOT_TELL,
    NO_DIFFERENCE,
    WORSE,
    Interval,
    Pair,
    Target,
)
from opd_core.analysis.pooling import Pool, models_interval, seeds_missing, training_interval
from opd_core.analysis.statistics import holm

ALPHA = 0.05
MODELS, TRAINING = "models", "training"
NOT_COVERED = {
    MODELS: "This is about these very models on new questions, not about new training runs.",
    TRAINING: "This is about new training runs on these questions, not about other questions.",
    "": "Nothing was recorded from which an interval could be taken.",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """An arm against the baseline, before a verdict. ``basis`` names the interval it comes from:
    that of new training runs where there is one, as recipes are what a person chooses between."""

    label: str
    baseline: str
    difference: float
    models: Interval | None
    training: Interval | None
    more_seeds: int | None
    seeds: int

    @property
    def basis(self) -> str:
        """``training``, ``models`` or "" where there is neither."""
        return TRAINING if self.training else MODELS if self.models else ""

    @property
    def interval(self) -> Interval | None:
        """The interval of the basis."""
        return self.training or self.models


def judge(
    arms: Sequence[tuple[str, Pool]],
    target: Target,
    *,
    lower_is_better: bool,
    questions: int,
    left_out: int,
) -> tuple[Pair, ...]:
    """Every other arm against the first.

    ``better`` and ``worse``: the interval excludes 0, and still does so with the p-value corrected
    for the number of arms (Holm), so that the chance of any false one stays at 5 %. ``no
    difference``: the whole interval is within the margin. Else ``cannot tell``.
    """
    (baseline, base), *others = arms
    alpha = ALPHA / max(len(others), 1)
    gathered = [
        Evidence(
            label=label,
            baseline=baseline,
            difference=arm.value - base.value,
            models=models_interval(arm, base),
            training=training_interval(arm, base),
            more_seeds=seeds_missing(arm, base, target.margin, alpha),
            seeds=min(len(arm.seeds), len(base.seeds)),
        )
        for label, arm in others
    ]
    adjusted = iter(holm([each.interval.p for each in gathered if each.interval]))
    return tuple(
        _pair(
            each,
            next(adjusted) if each.interval else None,
            target,
            lower_is_better=lower_is_better,
            questions=questions,
            left_out=left_out,
        )
        for each in gathered
    )


def _pair(
    evidence: Evidence,
    holm_p: float | None,
    target: Target,
    *,
    lower_is_better: bool,
    questions: int,
    left_out: int,
) -> Pair:
    interval = evidence.interval
    verdict = _verdict(interval, holm_p, target.margin, lower_is_better)
    beyond = _beyond(interval, target.margin)
    more = evidence.more_seeds if verdict == CANNOT_TELL else None
    return Pair(
        label=evidence.label,
        baseline=evidence.baseline,
        difference=evidence.difference,
        models=evidence.models,
        training=evidence.training,
        basis=evidence.basis,
        p=interval.p if interval else None,
        holm_p=holm_p,
        verdict=verdict,
        beyond_margin=beyond,
        sentence=" ".join(_sentences(evidence, verdict, beyond, holm_p, target)),
        more_seeds=more,
        questions=questions,
        left_out=left_out,
    )


def _verdict(
    interval: Interval | None, holm_p: float | None, margin: float, lower_is_better: bool
) -> str:
    if interval is None or holm_p is None:
        return CANNOT_TELL
    if _excludes_zero(interval) and holm_p <= ALPHA:
        return WORSE if (interval.low > 0) == lower_is_better else BETTER
    return NO_DIFFERENCE if _beyond(interval, margin) is False else CANNOT_TELL


def _excludes_zero(interval: Interval) -> bool:
    return interval.low > 0 or interval.high < 0


def _beyond(interval: Interval | None, margin: float) -> bool | None:
    """True: all of it lies beyond the margin, False: within, None: neither."""
    if interval is None:
        return None
    if -margin <= interval.low and interval.high <= margin:
        return False
    return True if interval.low > margin or interval.high < -margin else None


def _sentences(
    evidence: Evidence, verdict: str, beyond: bool | None, holm_p: float | None, target: Target
) -> list[str]:
    """The verdict with its numbers, what it is about and what not, and what would help."""
    metric, interval = target.metric, evidence.interval
    margin = shown_difference(metric, target.margin).lstrip("+")
    numbers = shown_difference(metric, evidence.difference)
    if interval is not None:
        numbers += f", 95 % {shown_interval(metric, interval)}, p {shown_p(interval.p)}"
    who = f"{evidence.label} {{}} {evidence.baseline} in {metric_name(metric)} ({numbers})"
    if verdict in (BETTER, WORSE):
        size = {
            True: f"by more than the margin of {margin}",
            False: f"by less than the margin of {margin}",
            None: f"whether by more than the margin of {margin} is open",
        }[beyond]
        said = f"{who.format(f'is {verdict} than')}: {size}."
    elif verdict == NO_DIFFERENCE:
        said = f"{who.format('shows no difference from')}: all of it lies within {margin}."
    else:
        said = f"{who.format('cannot be told from')}."
    return [said, *_doubt(evidence, verdict, holm_p), NOT_COVERED[evidence.basis]] + (
        _advice(evidence) if verdict == CANNOT_TELL or evidence.basis == MODELS else []
    )


def _doubt(evidence: Evidence, verdict: str, holm_p: float | None) -> list[str]:
    interval = evidence.interval
    if verdict == CANNOT_TELL and interval is not None and _excludes_zero(interval):
        return [
            f"Alone it would be found; among several arms it is not (Holm p {shown_p(holm_p)})."
        ]
    return []


def _advice(evidence: Evidence) -> list[str]:
    if evidence.models is not None and evidence.models.method == "the same runs":
        return []
    if evidence.basis == TRAINING and evidence.more_seeds is None:
        return ["More than 1000 seeds an arm would be needed to tell."]
    if evidence.basis == TRAINING:
        return [f"About {evidence.more_seeds} more seeds an arm would tell, with a chance of 80 %."]
    if evidence.seeds < 2:
        return ["Run more seeds of each arm: from two on it can be said how many are needed."]
    return []
