"""How a reproduction's numbers are written for a person."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opd_core.analysis.comparison_words import (
    metric_name,
    shown_difference,
    shown_interval,
    shown_value,
)
from opd_core.analysis.measuring import is_share
from opd_core.analysis.outcome import ArmRun, Interval, Pair


def original_in_numbers(
    metric: str, original: ArmRun, others: Sequence[ArmRun], new_run: Interval
) -> str:
    """Where the original is, and where new runs fall."""
    within = new_run.low <= original.value <= new_run.high
    where = "within" if within else "above" if original.value > new_run.high else "below"
    return (
        f"the original's {metric_name(metric)}, {shown_value(metric, original.value)}, is {where} "
        f"{between(metric, new_run)}, where 95 % of new runs fall by "
        f"{runs_in_numbers(metric, others)}"
    )


def spread(metric: str, runs: Sequence[ArmRun], new_run: Interval | None) -> str:
    """Of a recipe's runs, where there is no original."""
    if new_run is None:
        told = ", ".join(shown_value(metric, run.value) for run in runs) or "not measured"
        advice = (
            "They show no spread." if len(runs) > 1 else "More seeds show how far runs scatter."
        )
        return f"{metric_name(metric)}: {told}. {advice}"
    return (
        f"{metric_name(metric)} of {runs_in_numbers(metric, runs)}; 95 % of new runs fall within "
        f"{between(metric, new_run)}."
    )


def runs_in_numbers(metric: str, runs: Sequence[ArmRun]) -> str:
    """``3 runs (mean 61.3 %, sd 0.8 points)``, of two at least."""
    values = np.array([run.value for run in runs])
    deviation = size(metric, float(values.std(ddof=1)))
    return f"{len(runs)} runs (mean {shown_value(metric, float(values.mean()))}, sd {deviation})"


def between(metric: str, interval: Interval) -> str:
    """``[57.0 %, 65.6 %]``, of values; a share is never below 0 nor above 1."""
    low, high = interval.low, interval.high
    if is_share(metric):
        low, high = max(low, 0.0), min(high, 1.0)
    return f"[{shown_value(metric, low)}, {shown_value(metric, high)}]"


def size(metric: str, value: float | None) -> str:
    """A difference without its sign."""
    return shown_difference(metric, value or 0.0).lstrip("+")


def model_difference(metric: str, pair: Pair) -> str:
    """Of two runs, with the interval of these very models where there is one."""
    told = shown_difference(metric, pair.difference)
    if pair.models is None:
        return told
    interval = shown_interval(metric, pair.models)
    return f"{told} (these two models on new questions: 95 % {interval})"


def unknown_weights(teachers: Sequence[str]) -> str:
    """That what these teachers are is not known; empty without any."""
    if not teachers:
        return ""
    return (
        f" The weights of {', '.join(teachers)} are not known in every run (an external server has "
        "them): that they are the same was not checked."
    )
