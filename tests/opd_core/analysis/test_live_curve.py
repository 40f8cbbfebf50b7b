"""The small picture of a curve: readable XML, true to its points, never larger than it can show."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from opd_core.analysis.live_curve import MOST_POINTS, WIDTH, curve_svg

SVG = "{http://www.w3.org/2000/svg}"


def line(svg: str) -> list[tuple[float, float]]:
    found = ElementTree.fromstring(svg).find(f"{SVG}polyline")
    assert found is not None
    pairs = (pair.split(",") for pair in found.attrib["points"].split())
    return [(float(x), float(y)) for x, y in pairs]


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_higher_values_are_higher_up_and_later_steps_further_right() -> None:
    (x1, y1), (x2, y2), (x3, y3) = line(curve_svg("kl", [(1, 0.9), (2, 0.1), (4, 0.5)], 10))
    assert x1 < x2 < x3 < WIDTH / 2  # the axis goes on to the recipe's last step
    assert y1 < y3 < y2
    assert x3 - x2 == pytest.approx(2 * (x2 - x1), abs=0.2)


def test_it_names_its_title_the_last_value_and_round_ticks() -> None:
    svg = curve_svg("a <title> & more", [(0, 0.436), (50, 0.829)], 60, percent=True)
    assert texts(svg)[0] == "a <title> & more"
    assert texts(svg)[1:6] == ["40\u00a0%", "50\u00a0%", "60\u00a0%", "70\u00a0%", "80\u00a0%"]
    assert texts(svg)[-1] == "83\u00a0%" or texts(svg)[-1] == "82.9\u00a0%"
    assert "train step 60" in texts(svg)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-9, 12345.0])
def test_a_single_point_or_a_level_curve_is_drawn(value: float) -> None:
    for points in ([(0, value)], [(1, value), (2, value)]):
        assert all(math.isfinite(x + y) for x, y in line(curve_svg("level", points, 2)))


def test_values_that_are_not_finite_are_left_out_and_nothing_else_is_said_so() -> None:
    assert len(line(curve_svg("kl", [(1, 0.5), (2, math.nan), (3, math.inf), (4, 0.4)], 4))) == 2
    assert "nothing measured yet" in texts(curve_svg("kl", [(1, math.nan)], 4))


def test_a_long_run_is_drawn_as_means_and_says_so() -> None:
    points = [(step, float(step % 2)) for step in range(1, 10_001)]
    svg = curve_svg("kl", points, 10_000)
    assert len(line(svg)) <= MOST_POINTS
    assert len({y for _, y in line(svg)[:-1]}) == 1  # every mean is a half
    assert texts(svg)[0] == "kl (means of 42 neighbours)"
    assert len(svg) < 8_000
