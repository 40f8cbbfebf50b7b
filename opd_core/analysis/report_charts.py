"""The curves of a run's report."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from opd_core.analysis.charts import Bar, Curve, bar_chart, line_chart, shown_number
from opd_core.analysis.kl_view import KLView
from opd_core.analysis.run_data import Series

WINDOW = 5
"""Train steps that the first and the last number of a sentence are means of."""
LOG_RATIO = 50
"""From this ratio of the largest to the smallest value on, a chart that may is logarithmic."""


@dataclass(frozen=True)
class Chart:
    """Metrics that share a chart: pairs of name and label, the first one with a sentence.

    ``error`` is the metric of the first one's standard error.
    """

    title: str
    y_label: str
    metrics: tuple[tuple[str, str], ...]
    error: str = ""
    dashed: bool = False
    """All but the first one: where they lie on each other."""
    percent: bool = False
    may_log: bool = False
    note: str = ""


CHARTS = (
    Chart(
        "Reverse KL to the teacher",
        "nats / token",
        (("opd_reverse_kl", "opd_reverse_kl"),),
        error="opd_reverse_kl_stderr",
        note="The band is ± one standard error.",
    ),
    Chart(
        "Held-out accuracy",
        "",
        (("eval/accuracy", "accuracy"),),
        error="eval/accuracy_stderr",
        percent=True,
        note="Sampled answers; the band is ± one standard error over questions.",
    ),
    Chart("Reward while training", "", (("rollout/reward_mean", "mean reward"),)),
    Chart("Entropy", "nats / token", (("entropy", "entropy"),)),
    Chart(
        "Response length",
        "tokens",
        (
            ("rollout/response_tokens_mean", "mean"),
            ("rollout/response_tokens_max", "longest"),
            ("eval/response_tokens_mean", "held out, mean"),
        ),
    ),
    Chart(
        "How responses end",
        "",
        (("rollout/truncated_fraction", "cut off"), ("rollout/eos_fraction", "by the end token")),
        percent=True,
    ),
    Chart(
        "Gradient norm",
        "before clipping",
        (("grad_norm", "all terms"), ("grad_norm_teacher", "teacher term alone")),
        dashed=True,
        may_log=True,
    ),
    Chart(
        "Where the advantage lies",
        "",
        (
            ("advantage_top1pct_share", "share of the largest 1 % of tokens"),
            ("opd_clamped_fraction", "tokens clamped"),
        ),
        percent=True,
    ),
    Chart(
        "Engine gap",
        "nats / token",
        (("engine_logprob_gap", "mean |difference|"),),
        may_log=True,
        note="Between the engine that samples and the engine that trains.",
    ),
    Chart(
        "Staleness",
        "train steps",
        (("staleness_mean", "mean"), ("staleness_max", "largest")),
    ),
    Chart("Sampling speed", "tokens / s", (("rollout/tokens_per_s", "tokens per second"),)),
    Chart(
        "Teacher latency",
        "seconds",
        (
            ("teacher/latency_s_mean", "mean"),
            ("teacher/latency_s_max", "largest"),
            ("teacher/queue_s_mean", "wait for a slot, mean"),
        ),
    ),
)


def report_charts(series: Series) -> list[Markup]:
    """All charts for which the run has values; KL by data source where there are several."""
    sources = tuple(
        (name, name.partition("/")[2])
        for name in series.names
        if name.startswith("opd_reverse_kl/")
    )
    by_source = Chart("Reverse KL by data source", "nats / token", sources[:8])
    charts = (*CHARTS[:2], by_source, *CHARTS[2:]) if len(sources) > 1 else CHARTS
    return [drawn for chart in charts if (drawn := _drawn(chart, series))]


def kl_charts(view: KLView) -> list[Markup]:
    """One chart for each table of the view: mean k before and after; tables of one row need
    none."""
    return [
        bar_chart(
            [
                Bar(row.label, m.mean, m.mean - m.stderr, m.mean + m.stderr, group)
                for row in table.rows
                for group, m in (("before", row.before), ("after", row.after))
                if m is not None
            ],
            title=f"KL by {table.name}",
            x_label="mean k, nats / token",
            caption=table.said,
        )
        for table in view.tables
        if len(table.rows) > 1
    ]


def _drawn(chart: Chart, series: Series) -> Markup:
    curves = [_curve(series, name, label, chart.error) for name, label in chart.metrics[:1]]
    curves += [_curve(series, *pair, dashed=chart.dashed) for pair in chart.metrics[1:]]
    curves = [curve for curve in curves if np.asarray(curve.y).size]
    if chart.title == "Staleness" and not any(np.any(curve.y) for curve in curves):
        return Markup("")  # 0 throughout says nothing
    said = [_said(curve, chart.percent) for curve in curves[:1]]
    if len(curves) > 1:
        said = [f"{curves[0].label}: {said[0]}"]
    return line_chart(
        curves,
        title=chart.title,
        x_label="train step",
        y_label=chart.y_label,
        percent=chart.percent,
        log_y=chart.may_log and _wide(curves),
        caption=" ".join([*said, chart.note]).strip(),
    )


def _curve(
    series: Series, name: str, label: str, error: str = "", *, dashed: bool = False
) -> Curve:
    steps, values = series.of(name)
    if not error:
        return Curve(label, steps, values, dashed=dashed)
    known = dict(zip(*(side.tolist() for side in series.of(error)), strict=True))
    stderr = np.array([known.get(int(step), np.nan) for step in steps])
    return Curve(label, steps, values, values - stderr, values + stderr)


def _said(curve: Curve, percent: bool) -> str:
    x, y = np.asarray(curve.x, float), np.asarray(curve.y, float)
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    if not y.size:
        return ""
    if y.size == 1:
        return f"{shown_number(float(y[0]), percent)} at step {x[0]:g}."
    first, last = (shown_number(value, percent) for value in ends(y))
    span = (
        f"first and last {WINDOW} steps" if y.size >= 2 * WINDOW else f"steps {x[0]:g}, {x[-1]:g}"
    )
    return f"{first} → {last} ({span})."


def ends(y: NDArray[np.float64]) -> tuple[float, float]:
    """The beginning and the end of a curve: means of ``WINDOW`` values if it is long enough, else
    the first and the last."""
    if y.size >= 2 * WINDOW:
        return float(y[:WINDOW].mean()), float(y[-WINDOW:].mean())
    return float(y[0]), float(y[-1])


def _wide(curves: list[Curve]) -> bool:
    values = np.concatenate([np.asarray(curve.y, float) for curve in curves] or [np.empty(0)])
    values = values[np.isfinite(values)]
    return bool(values.size and values.min() > 0 and values.max() / values.min() > LOG_RATIO)
