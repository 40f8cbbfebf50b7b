"""The charts of a comparison: for its page as they stand, for markdown as files of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from xml.sax.saxutils import escape

from markupsafe import Markup

from opd_core.analysis.charts import Curve, IntervalRow, Line, interval_chart, line_chart
from opd_core.analysis.comparison_words import axis_name, metric_name, slug
from opd_core.analysis.measuring import is_share
from opd_core.analysis.outcome import Comparison
from opd_core.analysis.page import TEMPLATES

LEGEND_LINE, MARGIN = 15, 8
LABEL_WIDTH, LEGEND_WIDTH = 26, 60
SVG = re.compile(
    r'<svg role="img" aria-label="([^"]*)" viewBox="0 0 ([\d.]+) ([\d.]+)">(.*)</svg>', re.S
)


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a legend: series colour 0 to 7, or None for a line in the text's colour."""

    label: str
    colour: int | None


@dataclass(frozen=True, slots=True)
class NamedChart:
    """A chart: ``name`` is good for a file, ``kind`` is ``differences``, ``target`` (its metric
    along an axis) or ``training`` (what else was measured)."""

    name: str
    kind: str
    title: str
    figure: Markup
    keys: tuple[Key, ...] = ()

    @property
    def file(self) -> str:
        """What its own file is called."""
        return f"{self.name}.svg"

    def standalone(self) -> str:
        """An SVG file of its own, with title, legend and colours for light and dark."""
        found = SVG.search(self.figure)
        if found is None:
            raise ValueError(f"{self.name}: expected an SVG in the chart")
        label, width, height = found[1], float(found[2]), float(found[3])
        top = 22 + LEGEND_LINE * len(self.keys)
        palette = (TEMPLATES / "base.css").read_text(encoding="utf-8").partition("*, *::before")[0]
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'role="img" aria-label="{label}" viewBox="0 0 {width + 2 * MARGIN:g} '
            f'{top + height + MARGIN:g}" width="{1.6 * width:.0f}" font-family="sans-serif">\n'
            f'<style>\n{palette}</style>\n<rect width="100%" height="100%" fill="var(--card)"/>\n'
            f'<text x="{MARGIN}" y="16" font-size="11" font-weight="600" fill="var(--ink)">'
            f"{escape(self.title)}</text>\n"
            + "".join(_key(key, 22 + LEGEND_LINE * at) for at, key in enumerate(self.keys))
            + f'<svg x="{MARGIN}" y="{top}" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}">{found[4]}</svg>\n</svg>\n'
        )


def comparison_charts(comparison: Comparison) -> tuple[NamedChart, ...]:
    """Every chart for which there are numbers."""
    charts = (*_differences(comparison), *_target(comparison), *_training(comparison))
    return tuple(chart for chart in charts if chart.figure)


def _differences(comparison: Comparison) -> Iterator[NamedChart]:
    """What each interval says: those of one kind in one chart. Shares differ by points."""
    target, baseline = comparison.target, comparison.arms[0].label
    scale, unit = (100, "points") if is_share(target.metric) else (1, metric_name(target.metric))
    for name, title in (
        ("models", "These models, new questions"),
        ("training", "New training runs"),
    ):
        rows = [
            (pair, interval)
            for pair in comparison.pairs
            if (interval := getattr(pair, name)) is not None
        ]
        if not rows:
            continue
        figure = interval_chart(
            [
                IntervalRow(
                    _wrapped(pair.label), *(scale * v for v in (pair.difference, i.low, i.high))
                )
                for pair, i in rows
            ],
            margin=None if target.margin is None else scale * target.margin,
            title=title,
            x_label=f"{unit} above or below {_cut(baseline, LABEL_WIDTH)}",
            caption=" ".join(dict.fromkeys(interval.covers for _, interval in rows)),
        )
        yield NamedChart(f"difference-{name}", "differences", title, figure)


def _cut(label: str, width: int) -> str:
    return label if len(label) <= width else f"{label[: width - 1]}…"


def _wrapped(label: str) -> str:
    return "\n".join(wrap(label, LABEL_WIDTH, max_lines=2, placeholder=" …"))


def _target(comparison: Comparison) -> Iterator[NamedChart]:
    """The target's metric along every axis that all runs have."""
    target = comparison.target
    references = [Line(each.label, each.value) for each in comparison.references]
    for axis in comparison.axes:
        here = [Line("compared here", comparison.at, vertical=True)] if axis == target.axis else []
        yield _curves(comparison, "target", target.metric, axis, [*references, *here])


def _training(comparison: Comparison) -> Iterator[NamedChart]:
    """What else was measured, along the target's axis."""
    target = comparison.target
    curves = [curve for arm in comparison.arms for curve in arm.curves if curve.axis == target.axis]
    for metric in dict.fromkeys(curve.metric for curve in curves):
        if metric != target.metric:
            yield _curves(comparison, "training", metric, target.axis, [])


def _curves(
    comparison: Comparison, kind: str, metric: str, axis: str, lines: Sequence[Line]
) -> NamedChart:
    curves = [
        Curve(arm.label, c.x, c.y, c.low, c.high, colour=number)
        for number, arm in enumerate(comparison.arms)
        if (c := arm.curve(metric, axis)) is not None
    ]
    title = f"{metric_name(metric)} by {axis_name(axis)}"
    figure = line_chart(
        curves,
        title=title,
        x_label=axis_name(axis),
        y_label=metric_name(metric),
        percent=is_share(metric),
        lines=lines,
    )
    keys = [Key(curve.label, curve.colour) for curve in curves]
    keys += [Key(line.label, None) for line in lines]
    return NamedChart(f"{slug(metric)}-{axis}", kind, title, figure, tuple(keys))


def _key(key: Key, y: float) -> str:
    colour = "var(--ink)" if key.colour is None else f"var(--series-{key.colour % 8 + 1})"
    dotted = ' stroke-dasharray="1.5 2"' if key.colour is None else ""
    return (
        f'<path d="M{MARGIN} {y + 8}h16" stroke="{colour}" stroke-width="2"{dotted}/>'
        f'<text x="{MARGIN + 22}" y="{y + 11}" font-size="9.5" fill="var(--muted)">'
        f"{escape(_cut(key.label, LEGEND_WIDTH))}</text>\n"
    )
