"""From a matplotlib figure to an SVG that takes part in a page: its text is text in the page's
font, its colours are the page's CSS variables, its ids are unique."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, Literal

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, HEIGHT_INCHES = 4.2, 2.6
# A colour that matplotlib writes down stands for a variable of the page.
_TONES = {"ink": "#010101", "muted": "#010102", "rule": "#010103", "band": "#010104"}
_VARIABLES = {hexa: f"var(--{name})" for name, hexa in _TONES.items()} | {
    f"#02020{number}": f"var(--series-{number})" for number in range(1, 9)
}
_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": True,
    "text.parse_math": False,
}
_STAND_IN = re.compile("#01010[1-4]|#02020[1-8]")
_LEFT_OUT = re.compile(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", re.S)
_TAG = re.compile("<[^>]+>")
_IN_TAGS = (
    (re.compile('<g id="[^"]*"'), "<g"),
    (re.compile(r"font: ([\d.]+)px 'DejaVu Sans'"), r"font-size: \1px"),
    (re.compile("; font-family: 'DejaVu Sans'"), ""),
    (re.compile(r' transform="rotate\(-0 [^"]*"'), ""),
    (re.compile(r"(\d\.\d\d)\d+"), r"\1"),
    (re.compile(r"\s*\n\s*"), " "),
)


def tone(name: str | int) -> str:
    """The stand-in for a variable of the page, by name, or of the series with this number (0…)."""
    return f"#02020{name % 8 + 1}" if isinstance(name, int) else _TONES[name]


def canvas(height: float = HEIGHT_INCHES) -> tuple[Figure, Axes]:
    """An empty figure of the page's width, with its axes. No global state of matplotlib is used."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
        return figure, figure.add_subplot()


def dress(
    axes: Axes, *, x_label: str, y_label: str = "", percent: bool, axis: Literal["x", "y"]
) -> None:
    """Labels, tones and a quiet grid along the axis of values; ``percent`` writes its ticks in
    %."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.set_xlabel(x_label, color=tone("muted"))
    axes.set_ylabel(y_label, color=tone("muted"))
    axes.tick_params(colors=tone("muted"), labelcolor=tone("muted"), length=3)
    for spine in axes.spines.values():
        spine.set_color(tone("rule"))
    axes.grid(axis=axis, color=tone("rule"), linewidth=0.6)
    axes.set_axisbelow(True)
    axes.patch.set_visible(False)
    values = axes.xaxis if axis == "x" else axes.yaxis
    if percent:
        values.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    elif values.get_scale() == "log":
        values.set_major_formatter(lambda value, _: f"{value:g}")
    if values.get_scale() == "linear":
        values.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))


def svg_of(figure: Figure, label: str) -> Markup:
    """The drawing as one ``<svg role="img">`` with ``label``.

    matplotlib hashes what an id names, so charts of one page may share an id, never its meaning.
    """
    import matplotlib

    figure.patch.set_visible(False)
    out = io.StringIO()
    with matplotlib.rc_context({**_RC, "svg.hashsalt": "opd"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    start = text.index("<svg")
    view_box = re.compile(r'viewBox="[^"]*"').search(text, start)
    if view_box is None:
        raise ValueError("expected a viewBox in matplotlib's SVG; use the version that was tested")
    body = text[text.index(">", start) + 1 :]
    body = _TAG.sub(_trimmed, _LEFT_OUT.sub("", body))
    opening = Markup('<svg role="img" aria-label="{}" {}>').format(label, Markup(view_box[0]))
    return opening + Markup(body)  # matplotlib escapes what it writes


def _trimmed(tag: re.Match[str]) -> str:
    """A tag without what the page does not need; the text between tags stays as it is."""
    text = tag[0]
    for pattern, instead in _IN_TAGS:
        text = pattern.sub(instead, text)
    return _STAND_IN.sub(lambda found: _VARIABLES[found[0]], text)
