"""The comparison's page as a reader meets it, and its charts as files of their own."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Literal

import pytest

from opd_core.analysis.comparison_charts import comparison_charts
from opd_core.analysis.comparison_page import comparison_page
from tests.browser.conftest import DESKTOP, PHONE, OpenPage
from tests.opd_core.analysis.example_comparison import arm, example, pair

pytestmark = pytest.mark.slow

LONG = "an_arm_with_a_name_without_end_" * 6
BAD = "<script>document.title = 'broken'</script>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    base = example()
    comparison = replace(
        base,
        arms=(*base.arms, arm(LONG, 0.6, number=3), arm(BAD, 0.5, number=4)),
        pairs=(*base.pairs, pair(LONG, -0.11, "worse"), pair(BAD, 0.0, "no difference")),
    )
    charts = comparison_charts(comparison)
    for chart in charts:
        (folder / chart.file).write_text(chart.standalone())
    file = folder / "comparison.html"
    file.write_text(comparison_page(comparison, charts, directories={}, page_folder=folder))
    return file


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_comparison_opens_without_a_complaint(
    open_page: OpenPage, page: Path, size: tuple[int, int], scheme: Literal["light", "dark"]
) -> None:
    opened = open_page(page, size, scheme)
    for summary in opened.page.locator("summary:visible").all():
        summary.click()
    assert opened.page.title() == "4 arms against pure OPD"
    assert opened.overflow == 0
    assert opened.complaints == []


def test_the_verdict_is_seen_without_scrolling(open_page: OpenPage, page: Path) -> None:
    box = open_page(page, PHONE).page.locator("blockquote").first.bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < PHONE[1]


def test_labels_of_a_chart_cover_neither_each_other_nor_the_card(
    open_page: OpenPage, page: Path
) -> None:
    chart = open_page(page).page.locator(".chart").first
    card = chart.bounding_box()
    boxes = [box for each in chart.locator("svg text").all() if (box := each.bounding_box())]
    assert card is not None
    assert len(boxes) > 8
    for box in boxes:
        assert card["x"] < box["x"] < box["x"] + box["width"] < card["x"] + card["width"]
    for one, other in combinations(boxes, 2):
        beside = (
            min(one["x"] + one["width"] - other["x"], other["x"] + other["width"] - one["x"]) < 1
        )
        above = (
            min(one["y"] + one["height"] - other["y"], other["y"] + other["height"] - one["y"]) < 6
        )  # line spacing
        assert beside or above, (one, other)


def test_each_chart_is_a_picture_by_itself(open_page: OpenPage, page: Path) -> None:
    files = sorted(path.name for path in page.parent.glob("*.svg"))
    gallery = page.with_name("gallery.html")
    gallery.write_text(
        '<link rel="icon" href="data:,">' + "".join(f'<img src="{file}">' for file in files)
    )
    opened = open_page(gallery)
    widths = opened.page.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert len(widths) == len(files) > 5
    assert min(widths) > 300
    assert opened.complaints == []
