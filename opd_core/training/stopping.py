"""When a target ends training early."""

from __future__ import annotations

from collections.abc import Mapping

from opd_core.config import ExperimentConfig
from opd_core.config.student import StopConfig


def reached(metrics: Mapping[str, float], stop: StopConfig | None) -> str:
    """Which target one record of metrics reaches, as a sentence's beginning; "" for none.

    A record without the metric reaches nothing, and NaN never does.
    """
    if stop is None or stop.metric not in metrics:
        return ""
    value = metrics[stop.metric]
    if stop.at_least is not None and value >= stop.at_least:
        return f"{stop.metric} {value:.4g} is at least {stop.at_least:g}"
    if stop.at_most is not None and value <= stop.at_most:
        return f"{stop.metric} {value:.4g} is at most {stop.at_most:g}"
    return ""


def why_never(config: ExperimentConfig) -> str | None:
    """Why the metric of ``training.stop_when`` can never be recorded; None where it may be."""
    stop = config.training.stop_when
    if stop is None or not stop.metric.startswith("eval/"):
        return None
    never = f"training.stop_when: {stop.metric} is never recorded"
    if config.data.evaluation is None:
        return f"{never} without held-out rows: name data.evaluation, or another metric"
    if not config.task.judged:
        return f"{never} without a judge: name task.judge, or another metric"
    k = stop.metric.removeprefix("eval/pass_at_").removesuffix("_stderr")
    if k != stop.metric and k not in map(str, config.evaluation.pass_at):
        return f"{never}: add {k} to evaluation.pass_at, or name another metric"
    return None
