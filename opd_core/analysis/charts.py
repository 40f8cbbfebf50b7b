"""Charts as inline SVG: text stays text, colours are the page's CSS variables.

Each chart is a ``<figure>`` with its title, a legend, the drawing (``role="img"`` and a label that
says the numbers that matter) and, where one is given, a sentence below. All of it is markup that a
template may insert as it stands; titles and labels are escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from opd_core.analysis.drawing import canvas, dress, svg_of, tone

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import ArrayLike, NDArray

MAX_POINTS = 400
"""A longer curve is drawn by the smallest and the largest value of each of ``MAX_POINTS / 2``
stretches: nothing that an eye could see is lost."""
FEW_POINTS = 12
"""A curve of so few has a mark at each of them."""
LARGE = 10_000
MAX_LABEL = 28
"""Characters of a row's label that are shown beside it."""
SERIES_COLOURS = 8


@dataclass(frozen=True)
class Curve:
    """Values ``y`` at ``x``, and a band from ``low`` to ``high`` where given (all of one length).

    What is not finite is left out. ``colour`` is the number of the series' colour (0 to 7); None
    takes the curve's place in the chart.
    """

    label: str
    x: ArrayLike
    y: ArrayLike
    low: ArrayLike | None = None
    high: ArrayLike | None = None
    dashed: bool = False
    colour: int | None = None


@dataclass(frozen=True)
class Line:
    """A reference line at a value of the y axis, or of the x axis where ``vertical``."""

    label: str
    at: float
    vertical: bool = False


@dataclass(frozen=True)
class Bar:
    """One bar, with a whisker from ``low`` to ``high`` where given. Bars of one ``label`` stand
    together; each ``group`` has its colour."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    group: str = ""


@dataclass(frozen=True)
class IntervalRow:
    """An estimate and its interval; without an interval, ``low`` and ``high`` are None."""

    label: str
    estimate: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class _Finite:
    """The finite points of a curve, thinned."""

    x: NDArray[Any]
    y: NDArray[Any]
    low: NDArray[Any] | None = field(default=None)
    high: NDArray[Any] | None = field(default=None)


def line_chart(
    curves: Sequence[Curve],
    *,
    title: str,
    x_label: str,
    y_label: str,
    percent: bool = False,
    log_y: bool = False,
    lines: Sequence[Line] = (),
    caption: str = "",
) -> Markup:
    """Curves over one x axis; "" if none has a finite value. ``percent`` writes shares as %."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    shown = [(number, curve, _finite(curve)) for number, curve in enumerate(curves)]
    shown = [each for each in shown if each[2].y.size]
    if not shown:
        return Markup("")
    figure, axes = canvas()
    if log_y and all((points.y > 0).all() for _, _, points in shown):
        axes.set_yscale("log")
    legend = []
    for number, curve, points in shown:
        colour = (number if curve.colour is None else curve.colour) % SERIES_COLOURS
        legend.append((curve.label, colour, "dashed" if curve.dashed else "solid"))
        _draw_curve(axes, points, colour, curve.dashed)
    for line in lines:
        legend.append((line.label, -1, "dotted"))
        draw = axes.axvline if line.vertical else axes.axhline
        draw(line.at, color=tone("ink"), linewidth=1, linestyle=(0, (1.5, 2)))
    dress(axes, x_label=x_label, y_label=y_label, percent=percent, axis="y")
    if all(np.equal(np.mod(points.x, 1), 0).all() for _, _, points in shown):
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if max(points.x.max() for _, _, points in shown) >= LARGE:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 120k: longer ones would overlap
    said = "; ".join(_said(curve.label, points, percent) for _, curve, points in shown)
    return _figure(svg_of(figure, f"{title}. {said}"), title, legend, caption)


def bar_chart(
    bars: Sequence[Bar],
    *,
    title: str,
    x_label: str,
    percent: bool = False,
    caption: str = "",
) -> Markup:
    """Horizontal bars in the order given, from the top; "" without a finite one."""
    bars = [bar for bar in bars if math.isfinite(bar.value)]
    if not bars:
        return Markup("")
    labels = list(dict.fromkeys(bar.label for bar in bars))
    groups = list(dict.fromkeys(bar.group for bar in bars))
    thick = 0.8 / len(groups)
    figure, axes = canvas(height=0.75 + len(labels) * max(0.2, 0.15 * len(groups)))
    for bar in bars:
        at = labels.index(bar.label) - 0.4 + thick * (groups.index(bar.group) + 0.5)
        axes.barh(at, bar.value, thick * 0.92, color=tone(groups.index(bar.group)))
        if bar.low is not None and bar.high is not None:
            axes.plot([bar.low, bar.high], [at, at], color=tone("ink"), linewidth=1)
    axes.set_yticks(range(len(labels)), [_short(label) for label in labels])
    axes.invert_yaxis()
    axes.axvline(0, color=tone("muted"), linewidth=0.8)
    dress(axes, x_label=x_label, percent=percent, axis="x")
    said = "; ".join(f"{b.label} {b.group} {shown_number(b.value, percent)}" for b in bars)
    legend = [(group, number, "bar") for number, group in enumerate(groups)]
    return _figure(svg_of(figure, f"{title}. {said}"), title, legend, caption)


def interval_chart(
    rows: Sequence[IntervalRow],
    *,
    margin: float | None = None,
    title: str,
    x_label: str,
    percent: bool = False,
    caption: str = "",
) -> Markup:
    """Differences with their intervals, one row each from the top; a line at 0 and, where given,
    the band of ±``margin``. "" without rows."""
    rows = [row for row in rows if math.isfinite(row.estimate)]
    if not rows:
        return Markup("")
    figure, axes = canvas(height=0.75 + 0.3 * len(rows))
    legend: list[tuple[str, int, str]] = []
    if margin is not None:
        axes.axvspan(-margin, margin, color=tone("band"), linewidth=0)
        legend.append((f"within ±{shown_number(margin, percent)}", -2, "bar"))
    axes.axvline(0, color=tone("muted"), linewidth=1)
    for at, row in enumerate(rows):
        if row.low is not None and row.high is not None:
            axes.plot([row.low, row.high], [at, at], color=tone(0), linewidth=2)
        axes.plot([row.estimate], [at], "o", color=tone(0), markersize=5)
    axes.set_yticks(range(len(rows)), [_short(row.label) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    dress(axes, x_label=x_label, percent=percent, axis="x")
    said = "; ".join(_interval_said(row, percent) for row in rows)
    return _figure(svg_of(figure, f"{title}. {said}"), title, legend, caption)


def shown_number(value: float, percent: bool = False) -> str:
    """A number as a person reads it: three figures, or a share in per cent."""
    if percent:
        return f"{value:.1%}".replace("%", " %")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _short(label: str) -> str:
    """A label that leaves room for the chart: the middle of a long line is left out."""
    half = MAX_LABEL // 2
    lines = label.split("\n")
    return "\n".join(
        line if len(line) <= MAX_LABEL else f"{line[:half]}…{line[-half:]}" for line in lines
    )


def _draw_curve(axes: Axes, points: _Finite, colour: int, dashed: bool) -> None:
    if points.low is not None and points.high is not None:
        axes.fill_between(
            points.x, points.low, points.high, color=tone(colour), alpha=0.2, linewidth=0
        )
    axes.plot(
        points.x,
        points.y,
        color=tone(colour),
        linewidth=1.6,
        linestyle=(0, (5, 2)) if dashed else "solid",
        marker="o" if points.x.size <= FEW_POINTS else None,
        markersize=3.5,
    )


def _finite(curve: Curve) -> _Finite:
    x, y = np.asarray(curve.x, float), np.asarray(curve.y, float)
    keep = np.isfinite(x) & np.isfinite(y)
    low, high = (
        None if side is None else np.asarray(side, float) for side in (curve.low, curve.high)
    )
    x, y = x[keep], y[keep]
    low = None if low is None else np.where(np.isfinite(low[keep]), low[keep], y)
    high = None if high is None else np.where(np.isfinite(high[keep]), high[keep], y)
    at = _extremes(y)
    return _Finite(
        x[at], y[at], None if low is None else low[at], None if high is None else high[at]
    )


def _extremes(y: NDArray[Any]) -> NDArray[Any]:
    """Indices of the first, the last, and each stretch's smallest and largest value."""
    if y.size <= MAX_POINTS:
        return np.arange(y.size)
    kept = {0, y.size - 1}
    for stretch in np.array_split(np.arange(y.size), MAX_POINTS // 2):
        kept |= {int(stretch[y[stretch].argmin()]), int(stretch[y[stretch].argmax()])}
    return np.array(sorted(kept))


def _said(label: str, points: _Finite, percent: bool) -> str:
    first, last = (shown_number(float(points.y[at]), percent) for at in (0, -1))
    return f"{label}: {first} at {points.x[0]:g}, {last} at {points.x[-1]:g}"


def _interval_said(row: IntervalRow, percent: bool) -> str:
    said = f"{row.label}: {shown_number(row.estimate, percent)}"
    if row.low is None or row.high is None:
        return said
    return f"{said} ({shown_number(row.low, percent)} to {shown_number(row.high, percent)})"


def _figure(
    svg: Markup, title: str, legend: Sequence[tuple[str, int, str]], caption: str
) -> Markup:
    entries = [entry for entry in legend if entry[0]]
    items = Markup("").join(
        Markup('<li><span class="key {}" style="--key: {}"></span>{}</li>').format(
            style, _key_colour(colour), label
        )
        for label, colour, style in entries
    )
    wanted = len(entries) > 1 or (entries and entries[0][2] != "solid")
    below = Markup("<p>{}</p>").format(caption) if caption else Markup("")
    return Markup(
        '<figure class="chart"><figcaption><h3>{}</h3>{}</figcaption>{}{}</figure>'
    ).format(
        title, Markup('<ul class="legend">{}</ul>').format(items) if wanted else "", svg, below
    )


def _key_colour(colour: int) -> str:
    named = {-1: "var(--ink)", -2: "var(--band)"}
    return named.get(colour, f"var(--series-{colour + 1})")
