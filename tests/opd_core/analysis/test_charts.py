"""Charts: what a reader, a screen reader and the page's style sheet get of them."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import numpy as np

from opd_core.analysis.charts import (
    MAX_POINTS,
    Bar,
    Curve,
    IntervalRow,
    Line,
    bar_chart,
    interval_chart,
    line_chart,
    shown_number,
)


def chart(*curves: Curve, **options: object) -> str:
    return line_chart(curves, title="T", x_label="train step", y_label="nats", **options)  # type: ignore[arg-type]


def drawing(figure: str) -> ElementTree.Element:
    figure = str(figure)  # markup would escape what is put into it
    svg = figure[figure.index("<svg") : figure.index("</svg>") + len("</svg>")]
    return ElementTree.fromstring(svg.replace("<svg ", '<svg xmlns:xlink="x" ', 1))


def test_colours_are_the_pages_variables_and_nothing_else() -> None:
    drawn = chart(Curve("a", [1, 2], [0.5, 0.3], [0.4, 0.2], [0.6, 0.4]), lines=[Line("top", 1.0)])
    assert "var(--series-1)" in drawn
    assert not re.search(r"#[0-9a-f]{6}", drawn)


def test_text_stays_text_in_the_pages_font() -> None:
    texts = [element.text for element in drawing(chart(Curve("a", [1, 2], [1, 3]))).iter("text")]
    assert "train step" in texts
    assert "DejaVu" not in chart(Curve("a", [1, 2], [1, 3]))


def test_titles_and_labels_with_markup_show_as_they_are() -> None:
    drawn = line_chart(
        [Curve("<b>&", [1, 2], [1, 2]), Curve("b", [1, 2], [2, 1])],
        title="<script>x</script>",
        x_label="<i>--></i>#010101 0.12345",
        y_label="$y_1$",
        caption="<u>",
    )
    assert not re.search("<(script|b|i|u)[> ]", drawn)
    texts = {element.text for element in drawing(drawn).iter("text")}
    assert {"<i>--></i>#010101 0.12345", "$y_1$"} <= texts


def test_the_drawing_says_its_numbers() -> None:
    drawn = drawing(chart(Curve("student", [1, 50], [0.5, 0.25])))
    assert drawn.get("role") == "img"
    assert drawn.get("aria-label") == "T. student: 0.5 at 1, 0.25 at 50"


def test_what_is_not_finite_is_left_out() -> None:
    drawn = chart(Curve("a", [1, 2, 3, 4], [math.nan, 1.0, math.inf, 2.0], [0, math.nan, 0, 1]))
    assert "a: 1 at 2, 2 at 4" in drawn
    assert "nan" not in drawn


def test_nothing_to_draw_is_no_chart() -> None:
    assert chart(Curve("a", [], []), Curve("b", [1], [math.nan])) == ""
    assert bar_chart([Bar("a", math.nan)], title="T", x_label="x") == ""
    assert interval_chart([], title="T", x_label="x") == ""


def test_a_long_curve_is_thinned_and_keeps_its_extremes() -> None:
    values = np.ones(100_000)
    values[70_123], values[31_007] = 900.0, -900.0
    drawn = chart(Curve("a", np.arange(values.size), values))
    assert len(drawn) < 40_000
    outline = max(re.findall(r' d="([^"]+)"', drawn), key=len)
    heights = [float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", outline)]
    assert len(heights) <= MAX_POINTS + 2
    assert min(heights) < 20 < 50 < np.median(heights) < 100 < 130 < max(heights)
    assert not re.search(r"\.\d{3}", outline)  # no eye sees a thousandth of a point


def test_a_logarithmic_axis_has_plain_numbers_and_needs_positive_values() -> None:
    assert ">0.0001<" in chart(Curve("a", [1, 2], [1e-4, 10.0]), log_y=True)
    assert ">0.0001<" not in chart(Curve("a", [1, 2], [0.0, 10.0]), log_y=True)


def test_bars_have_a_colour_for_each_group_and_a_legend() -> None:
    bars = [Bar("digit", 0.4, 0.3, 0.5, "before"), Bar("digit", 0.1, None, None, "after")]
    drawn = bar_chart(bars, title="T", x_label="nats")
    assert "var(--series-1)" in drawn
    assert "var(--series-2)" in drawn
    assert "digit before 0.4; digit after 0.1" in drawn
    assert re.findall(r"</span>(\w+)</li>", drawn) == ["before", "after"]


def test_intervals_say_estimate_and_bounds() -> None:
    rows = [IntervalRow("mixed", 0.03, 0.01, 0.05), IntervalRow("one seed", -0.02)]
    drawn = interval_chart(rows, margin=0.02, title="T", x_label="accuracy", percent=True)
    assert "mixed: 3.0 % (1.0 % to 5.0 %); one seed: -2.0 %" in drawn
    assert "within ±2.0 %" in drawn


def test_numbers_as_a_person_reads_them() -> None:
    shown = [shown_number(value) for value in (0.123456, 12.3456, 1234.5, 1e-7)]
    assert shown == ["0.123", "12.3", "1,234", "1e-07"]
    assert shown_number(0.6126, percent=True) == "61.3 %"


def test_a_long_label_leaves_room_for_the_chart() -> None:
    drawn = bar_chart([Bar("first_" + "x" * 200 + "_last", 0.4)], title="T", x_label="nats")
    (label,) = (e.text for e in drawing(drawn).iter("text") if e.text and "first" in e.text)
    assert label == "first_xxxxxxxx…xxxxxxxxx_last"
    assert "x" * 200 in str(drawing(drawn).get("aria-label"))
