"""How a comparison's numbers are written for a person; every surface takes its cells from here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from opd_core.analysis.charts import shown_number
from opd_core.analysis.measuring import is_share
from opd_core.analysis.outcome import Arm, ArmRun, Comparison, Interval, Pair

NOTHING = "-"
NAMES = {
    "eval/accuracy": "held-out accuracy",
    "opd_reverse_kl": "opd_reverse_kl (nats/token)",
    "entropy": "entropy (nats/token)",
    "rollout/response_tokens_mean": "response length (tokens)",
    "rollout/reward_mean": "reward",
}
AXIS_NAMES = {
    "steps": "train steps",
    "student_tokens": "student tokens",
    "teacher_tokens": "teacher tokens",
    "device_seconds": "device-seconds",
    "money": "money",
}
POINTS = " points"
ONLY_SEEDS, SAME_RUN = "They differ in nothing but the seed.", "It is the same run."
ARM_HEADINGS = (
    "arm",
    "seeds",
    "value",
    "difference",
    "these models, new questions",
    "new training runs",
    "p (Holm)",
    "verdict",
    "more seeds",
)


def metric_name(metric: str) -> str:
    """A metric's name with its unit, where it has a better one than its own."""
    return NAMES.get(metric, metric)


def axis_name(axis: str) -> str:
    """What the runs are aligned on."""
    return AXIS_NAMES.get(axis, axis)


def shown_value(metric: str, value: float) -> str:
    """``61.3 %``, or four figures."""
    return shown_number(value, is_share(metric)) if math.isfinite(value) else NOTHING


def shown_difference(metric: str, value: float) -> str:
    """With its sign; of a share in points (``+3.1 points``)."""
    return _signed(metric, value) + (POINTS if is_share(metric) else "")


def shown_interval(metric: str, interval: Interval | None) -> str:
    """``[-0.4, +6.6]``, in the unit of the difference."""
    if interval is None:
        return NOTHING
    return f"[{_signed(metric, interval.low)}, {_signed(metric, interval.high)}]"


def shown_p(p: float | None) -> str:
    """A p-value; a small one as a bound."""
    if p is None:
        return NOTHING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def place(comparison: Comparison) -> str:
    """Where the arms are compared: ``held-out accuracy at 40 train steps``."""
    target = comparison.target
    at = f"{shown_number(comparison.at)} {axis_name(target.axis)}"
    return f"{metric_name(target.metric)} at {at}"


def sentence_case(text: str) -> str:
    """With a capital at its start, and the rest as it is."""
    return text[:1].upper() + text[1:]


def slug(text: str) -> str:
    """Fit for the name of a file."""
    return re.sub(r"[^a-zA-Z0-9]+", "-", text).strip("-").lower()


def arm_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """A row for each arm, cells in the order of :data:`ARM_HEADINGS`."""
    pairs = {pair.label: pair for pair in comparison.pairs}
    return [_arm_row(comparison, arm, pairs.get(arm.label)) for arm in comparison.arms]


def reference_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """A row for each reference, below those of :func:`arm_rows`."""
    blank = ("",) * (len(ARM_HEADINGS) - 4)
    return [
        (each.label, "", shown_value(comparison.target.metric, each.value), "reference", *blank)
        for each in comparison.references
    ]


def run_headings(comparison: Comparison) -> tuple[str, ...]:
    """Of :func:`run_rows`."""
    target = comparison.target
    names = (axis_name(target.axis), metric_name(target.metric))
    return ("run", "arm", "seed", "measured after train step", *names)


def run_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """A row for each run."""
    metric = comparison.target.metric
    return [
        (
            run.run_id,
            arm.label,
            str(run.seed),
            _measured_after(run),
            shown_number(run.axis_value),
            shown_value(metric, run.value),
        )
        for arm in comparison.arms
        for run in arm.runs
    ]


def difference_headings(comparison: Comparison) -> tuple[str, ...]:
    """Of :func:`difference_rows`."""
    return ("what", "key", *(arm.label for arm in comparison.arms))


def difference_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """A row for each difference: kind, key, and what each arm has; where its runs are not at one,
    what each run has."""
    return [
        (each.kind, each.key, *(_has(arm, dict(each.values)) for arm in comparison.arms))
        for each in comparison.differences
    ]


def nothing_differs(comparison: Comparison) -> str:
    """What is said where there are no differences."""
    runs = {run.run_id for arm in comparison.arms for run in arm.runs}
    return SAME_RUN if len(runs) == 1 else ONLY_SEEDS


def coverage(comparison: Comparison) -> list[str]:
    """What each kind of interval is about, and what not: a sentence each."""
    intervals = [i for pair in comparison.pairs for i in (pair.models, pair.training) if i]
    return list(dict.fromkeys(interval.covers for interval in intervals))


def _measured_after(run: ArmRun) -> str:
    if run.train_step_after is None:
        return str(run.train_step)
    return f"between {run.train_step} and {run.train_step_after}"


def _has(arm: Arm, values: Mapping[str, str]) -> str:
    if arm.label in values:
        return values[arm.label]
    return "\n".join(
        f"{run.run_id}: {values[run.run_id]}" for run in arm.runs if run.run_id in values
    )


def _arm_row(comparison: Comparison, arm: Arm, pair: Pair | None) -> tuple[str, ...]:
    metric = comparison.target.metric
    head = (arm.label, str(len(arm.seeds)), shown_value(metric, arm.value))
    if pair is None:
        return (*head, "baseline", *[""] * (len(ARM_HEADINGS) - 4))
    return (
        *head,
        shown_difference(metric, pair.difference),
        shown_interval(metric, pair.models),
        shown_interval(metric, pair.training),
        shown_p(pair.holm_p),
        pair.verdict,
        NOTHING if pair.more_seeds is None else str(pair.more_seeds),
    )


def _signed(metric: str, value: float) -> str:
    return f"{100 * value:+.1f}" if is_share(metric) else f"{value:+.4g}"
