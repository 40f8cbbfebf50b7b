"""A curve as a small stand-alone SVG picture, drawn in a millisecond while a run is under way.

It is shown as an image, so no page's style reaches it: it brings its own light background, and is
readable on a dark page too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from statistics import fmean

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 78, 44, 28
MOST_POINTS = 240
"""More points of a curve than a picture of this width can show are drawn as means of neighbours."""
INK, MUTED, RULE = "#1f2328", "#59636e", "#d1d9e0"
FONT = "font-family='system-ui, sans-serif'"

Points = Sequence[tuple[float, float]]


def curve_svg(
    title: str, points: Points, until: float, *, percent: bool = False, colour: str = "#0969da"
) -> str:
    """The curve of ``points``, (train step, value) with ascending steps, as SVG text. The axis goes
    from 0 to the train step ``until``, or further where the points do.

    Values that are not finite are left out; without any other the picture says so.
    """
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    shown, per_point = _thinned(finite)
    said = title if per_point == 1 else f"{title} (means of {per_point} neighbours)"
    drawn = _drawn(shown, finite[-1][1], until, percent, colour) if shown else _nothing()
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' "
        f"width='{WIDTH}' height='{HEIGHT}' {FONT} font-size='12'>"
        f"<rect width='{WIDTH}' height='{HEIGHT}' rx='8' fill='#fff'/>"
        f"<text x='14' y='21' font-size='13' font-weight='600' fill='{INK}'>{escape(said)}</text>"
        f"{drawn}</svg>"
    )


def _thinned(points: Points) -> tuple[Points, int]:
    size = math.ceil(len(points) / MOST_POINTS) or 1
    if size == 1:
        return points, 1
    parts = (points[start : start + size] for start in range(0, len(points), size))
    return [(part[-1][0], fmean(y for _, y in part)) for part in parts], size


def _nothing() -> str:
    return f"<text x='14' y='{HEIGHT / 2}' fill='{MUTED}'>nothing measured yet</text>"


def _drawn(points: Points, last: float, until: float, percent: bool, colour: str) -> str:
    ticks = _ticks([y for _, y in points])
    x_high = max(points[-1][0], until, 1)
    y_low, y_high = ticks[0], ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / x_high * (WIDTH - LEFT - RIGHT)
        up = (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return round(across, 1), round(HEIGHT - BOTTOM - up, 1)

    placed = [at(x, y) for x, y in points]
    line = " ".join(f"{x},{y}" for x, y in placed)
    (end_x, end_y), spacing = placed[-1], ticks[1] - ticks[0]
    return "".join(
        (
            *(_rule(at(0, tick)[1], _said(tick, spacing, percent)) for tick in ticks),
            _below(LEFT, "start", "0"),
            _below(WIDTH - RIGHT, "end", f"train step {x_high:g}"),
            f"<polyline points='{line}' fill='none' stroke='{colour}' stroke-width='2' "
            "stroke-linejoin='round'/>",
            f"<circle cx='{end_x}' cy='{end_y}' r='3.5' fill='{colour}'/>",
            f"<text x='{end_x + 8}' y='{end_y + 4}' font-weight='600' fill='{INK}'>"
            f"{_said(last, spacing / 10, percent)}</text>",
        )
    )


def _rule(y: float, label: str) -> str:
    return (
        f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y}' y2='{y}' stroke='{RULE}'/>"
        f"<text x='{LEFT - 8}' y='{y + 4}' text-anchor='end' fill='{MUTED}'>{label}</text>"
    )


def _below(x: float, anchor: str, text: str) -> str:
    return f"<text x='{x}' y='{HEIGHT - 9}' text-anchor='{anchor}' fill='{MUTED}'>{text}</text>"


def _ticks(values: Sequence[float]) -> list[float]:
    """Three to seven round numbers, evenly spaced, that enclose all values."""
    low, high = min(values), max(values)
    wide = (high - low) or abs(high) or 1.0
    power = 10 ** math.floor(math.log10(wide / 3))
    step = next(power * by for by in (1, 2, 5, 10) if wide / (power * by) <= 5)
    first = math.floor(low / step)
    last = max(math.ceil(high / step), first + 1)
    return [number * step for number in range(first, last + 1)]


def _said(value: float, spacing: float, percent: bool) -> str:
    if percent:
        return f"{100 * value:.{_digits(100 * spacing)}f}\u00a0%"
    return f"{value:.{_digits(spacing)}f}"


def _digits(spacing: float) -> int:
    """Decimals that tell numbers of this spacing apart."""
    return min(max(0, -math.floor(math.log10(spacing))), 6)
