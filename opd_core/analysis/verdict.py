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
    HIGHER,
    LOWER,
    NO_DIFFERENCE,
    WORSE,
    Interval,
    Pair,
    Target,
)
from opd_core.analysis.pooling import Pool, models_interval, seeds_missing, training_interval
from opd_core.analysis.statistics import holm

ALPHA = 0.05
FEW_SEEDS = 5
"""Below it the spread of seeds, and so the number of them that is needed, is a rough guess."""
MODELS, TRAINING = "models", "training"
NOT_COVERED = {
    MODELS: "This is about these very models on new questions, not about new training runs.",
    TRAINING: "This is about new training runs on these questions, not about other questions.",
    "": "Nothing was recorded from which an interval could be taken.",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """An arm against the baseline, before a verdict. ``basis`` names the interval it comes from:
    that of new training runs where there is one, as recipes are what a person chooses between.
    ``same``: both are the same runs; ``paired``: question by question."""

    label: str
    baseline: str
    difference: float
    models: Interval | None
    training: Interval | None
    more_seeds: int | None
    seeds: int
    same: bool
    paired: bool

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
    lower_is_better: bool | None,
    questions: int,
    left_out: int,
) -> tuple[Pair, ...]:
    """Every other arm against the first.

    ``better`` and ``worse``, or ``higher`` and ``lower`` where neither is the better one: the
    interval excludes 0, and still does so with the p-value corrected for the number of arms (Holm),
    so that the chance of any false one stays at 5 %. ``no difference``: the whole interval is
    within the margin, or both are the same runs. Else ``cannot tell``.
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
            same=arm.run_ids == base.run_ids,
            paired=arm.questions is not None and base.questions is not None,
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
    lower_is_better: bool | None,
    questions: int,
    left_out: int,
) -> Pair:
    interval = evidence.interval
    verdict = _verdict(evidence, holm_p, target.margin, lower_is_better)
    beyond = _beyond(interval, target.margin)
    asked = verdict == CANNOT_TELL and evidence.basis == TRAINING
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
        more_seeds=evidence.more_seeds if asked else None,
        questions=questions if evidence.paired else 0,
        left_out=left_out if evidence.paired else 0,
    )


def _verdict(
    evidence: Evidence, holm_p: float | None, margin: float | None, lower_is_better: bool | None
) -> str:
    interval = evidence.interval
    if evidence.same:
        return NO_DIFFERENCE
    if interval is None or holm_p is None:
        return CANNOT_TELL
    if _excludes_zero(interval) and holm_p <= ALPHA:
        if lower_is_better is None:
            return HIGHER if interval.low > 0 else LOWER
        return WORSE if (interval.low > 0) == lower_is_better else BETTER
    return NO_DIFFERENCE if _beyond(interval, margin) is False else CANNOT_TELL


def _excludes_zero(interval: Interval) -> bool:
    return interval.low > 0 or interval.high < 0


def _beyond(interval: Interval | None, margin: float | None) -> bool | None:
    """True: all of it lies beyond the margin, False: within, None: neither, or no margin."""
    if interval is None or margin is None:
        return None
    if -margin <= interval.low and interval.high <= margin:
        return False
    return True if interval.low > margin or interval.high < -margin else None


def _sentences(
    evidence: Evidence, verdict: str, beyond: bool | None, holm_p: float | None, target: Target
) -> list[str]:
    """The verdict with its numbers, what it is about and what not, and what would help."""
    metric, interval = target.metric, evidence.interval
    numbers = shown_difference(metric, evidence.difference)
    if interval is not None:
        numbers += f", 95 % {shown_interval(metric, interval)}, p {shown_p(interval.p)}"
    who = f"{evidence.label} {{}} {evidence.baseline} in {metric_name(metric)} ({numbers})"
    if evidence.same:
        return [f"{who.format('shows no difference from')}: they are the same run."]
    if verdict == NO_DIFFERENCE:
        said = f"{who.format('shows no difference from')}: all of it lies within {_margin(target)}."
    elif verdict == CANNOT_TELL:
        said = f"{who.format('cannot be told from')}."
    else:
        said = f"{who.format(f'is {verdict} than')}{_size(beyond, target)}."
    doubt, advice = _doubt(evidence, verdict, holm_p), _advice(evidence, verdict, target)
    of_models = _of_models(evidence, verdict, target)
    return [said, *doubt, NOT_COVERED[evidence.basis], *of_models, *advice]


def _margin(target: Target) -> str:
    """The margin in words; "" without one."""
    if target.margin is None:
        return ""
    return shown_difference(target.metric, target.margin).lstrip("+")


def _size(beyond: bool | None, target: Target) -> str:
    if target.margin is None:
        return ""
    return {
        True: f": by more than the margin of {_margin(target)}",
        False: f": by less than the margin of {_margin(target)}",
        None: f": whether by more than the margin of {_margin(target)} is open",
    }[beyond]


def _doubt(evidence: Evidence, verdict: str, holm_p: float | None) -> list[str]:
    interval = evidence.interval
    if verdict == CANNOT_TELL and interval is not None and _excludes_zero(interval):
        return [
            f"Alone it would be found; among several arms it is not (Holm p {shown_p(holm_p)})."
        ]
    return []


def _of_models(evidence: Evidence, verdict: str, target: Target) -> list[str]:
    """What can be said of the models that are there, where of new training runs nothing can."""
    models = evidence.models
    if verdict != CANNOT_TELL or evidence.basis != TRAINING or models is None:
        return []
    if not _excludes_zero(models):
        return []
    shown = shown_interval(target.metric, models)
    return [f"These very models do differ on new questions (95 % {shown})."]


def _advice(evidence: Evidence, verdict: str, target: Target) -> list[str]:
    said = []
    if evidence.basis == TRAINING and verdict == CANNOT_TELL:
        said.append(_seeds_advice(evidence, target))
    if evidence.basis != TRAINING and evidence.seeds < 2:
        said.append("Run more seeds of each arm: from two on it can be said how many are needed.")
    if evidence.basis and verdict == CANNOT_TELL and target.margin is None:
        said.append('To tell "no difference", name the smallest one that matters (margin).')
    return said


def _seeds_advice(evidence: Evidence, target: Target) -> str:
    if evidence.more_seeds is None:
        number = "More than 1000 more"
    else:
        number = (
            f"{'Roughly' if evidence.seeds < FEW_SEEDS else 'About'} {evidence.more_seeds} more"
        )
    seen = shown_difference(target.metric, abs(evidence.difference)).lstrip("+")
    size = f"as large as the {seen} seen (with a chance of 80 %)"
    if target.margin is not None and abs(evidence.difference) < target.margin:
        size = (
            f"as large as the margin of {_margin(target)} (with a chance of 80 %), or as small as "
            f"the {seen} seen"
        )
    return (
        f"{number} seeds an arm would tell if the true difference is {size}, and if seeds scatter "
        f"as these {evidence.seeds} do."
    )
