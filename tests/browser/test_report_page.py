"""The run report as a reader meets it: in a browser, on a desktop and on a phone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Page, expect

from opd_core.analysis.report import write_report
from opd_core.training.token_kl import read_token_kl, write_token_kl
from tests.browser.conftest import DESKTOP, PHONE, OpenPage
from tests.opd_core.analysis.run_builder import RUN_ID, RunBuilder

pytestmark = pytest.mark.slow

BAD = "<script>document.title = 'broken'</script>"
LONG = 4000


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = RunBuilder(prompt=BAD, data_sources=("chain_sum", "a_source_with_a_name_" * 5))
    return write_report(build.write(tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def worst_first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report whose first rollout has known tokens: "7" with k = 4, a tool's, "<i>" with
    k = -2."""
    directory = RunBuilder(steps=4).write(tmp_path_factory.mktemp("known"))
    for step in (1, 4):
        path = directory / "token_kl" / f"step-{step:06d}.json"
        record = read_token_kl(path)
        known = replace(
            record.rollouts[0],
            tokens=("7", "tool", "<i>"),
            response_mask=(True, False, True),
            student=(-0.5, 0.0, -3.0),
            teacher=(-4.5, 0.0, -1.0),
            answer_from=0,
        )
        write_token_kl(path, replace(record, rollouts=(known, *record.rollouts[1:])))
    return write_report(directory)


def tokens(page: Page) -> Page:
    """The page, at the tokens of the worst rollout that is shown."""
    page.locator(".step:visible .tokens").first.scroll_into_view_if_needed()
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_report_opens_without_a_complaint(
    open_page: OpenPage, report: Path, size: tuple[int, int], scheme: Literal["light", "dark"]
) -> None:
    opened = open_page(report, size, scheme)
    for summary in opened.page.locator("summary:visible").all():
        summary.click()
    assert opened.page.title() == f"{RUN_ID}: run report"
    assert opened.overflow == 0
    assert opened.complaints == []


def test_text_of_a_prompt_shows_as_text(open_page: OpenPage, report: Path) -> None:
    opened = open_page(report)
    expect(opened.page.locator(".step:visible .prompt").first).to_have_text(BAD)
    assert opened.page.title() != "broken"


def test_both_schemes_have_their_own_colours(open_page: OpenPage, report: Path) -> None:
    look = (
        "(({backgroundColor, color}) => [backgroundColor, color])(getComputedStyle(document.body))"
    )
    light, dark = (
        [
            sum(map(int, re.findall(r"\d+", colour)))
            for colour in open_page(report, scheme=scheme).page.evaluate(look)
        ]
        for scheme in ("light", "dark")
    )
    assert light[0] > 600 > 200 > light[1]
    assert dark[0] < 200 < 600 < dark[1]


def test_pointing_at_a_token_shows_its_numbers(open_page: OpenPage, worst_first: Path) -> None:
    page = tokens(open_page(worst_first).page)
    card = page.locator("#token-card")
    expect(card).to_be_hidden()
    page.locator(".step:visible .tokens i", has_text="7").first.hover()
    expect(card).to_be_visible()
    for said in ("7 token 1", "-0.500", "60.7 %", "-4.500", "1.11 %"):
        expect(card).to_contain_text(said)
    expect(card).to_contain_text("k = +4.000: the student likes it 54.6 times as much")
    page.locator(".step:visible .tokens i", has_text="<i>").first.hover()
    expect(card).to_contain_text("k = -2.000: the teacher likes it 7.39 times as much")
    page.locator("h1").hover()
    expect(card).to_be_hidden()


def test_tapping_a_token_shows_its_numbers_inside_the_window(
    open_page: OpenPage, worst_first: Path
) -> None:
    opened = open_page(worst_first, PHONE)
    page = tokens(opened.page)
    card = page.locator("#token-card")
    page.locator(".step:visible .tokens i", has_text="tool").first.tap()
    expect(card).to_contain_text("written by a tool: not sampled, not scored")
    page.locator(".step:visible .tokens i", has_text="<i>").first.tap()
    expect(card).to_contain_text("k = -2.000")
    box = card.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= PHONE[0]
    assert box["y"] + box["height"] <= PHONE[1]
    page.locator(".step:visible h4").first.tap()
    expect(card).to_be_hidden()
    assert opened.complaints == []


def test_the_arrow_keys_go_through_a_rollout(open_page: OpenPage, worst_first: Path) -> None:
    page = tokens(open_page(worst_first).page)
    page.locator(".step:visible .tokens").first.focus()
    card = page.locator("#token-card")
    page.keyboard.press("ArrowRight")
    expect(card).to_contain_text("token 1")
    page.keyboard.press("ArrowRight")
    expect(card).to_contain_text("token 2")
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()


def test_before_and_after_are_one_click_apart(open_page: OpenPage, report: Path) -> None:
    page = open_page(report).page
    heading = page.locator(".step:visible h4").first
    after = heading.inner_text()
    page.get_by_text("Before (train step 1)").click()
    expect(page.locator(".step:visible")).to_have_count(1)
    assert heading.inner_text() != after


def test_the_numbers_of_a_shortened_rollout_are_those_of_its_tokens(
    open_page: OpenPage, tmp_path: Path
) -> None:
    build = RunBuilder(steps=2, response_tokens=LONG, rollouts_kept=2)
    page = tokens(open_page(write_report(build.write(tmp_path))).page)
    expect(page.locator(".step:visible .gap").first).to_contain_text("tokens left out")
    page.locator(".step:visible .tokens i").last.scroll_into_view_if_needed()
    page.locator(".step:visible .tokens i").last.hover()
    expect(page.locator("#token-card")).to_contain_text(f"<|end|> token {LONG}")


def test_wide_tables_scroll_inside_themselves(open_page: OpenPage, report: Path) -> None:
    opened = open_page(report, PHONE)
    table = opened.page.locator(".scroll", has=opened.page.get_by_text("what to do"))
    assert table.evaluate("box => box.scrollWidth > box.clientWidth")
    assert opened.overflow == 0


def test_every_drawing_has_a_label_and_every_section_a_heading(
    open_page: OpenPage, report: Path
) -> None:
    page = open_page(report).page
    drawings = page.locator("figure svg").all()
    assert len(drawings) > 10
    assert all(drawing.get_attribute("aria-label") for drawing in drawings)
    assert page.locator("h1").count() == 1
    headings = page.locator("section > h2").all_inner_texts()
    assert len(headings) == page.locator("section").count() == 11
    links = page.locator("nav a").all()
    targets = [link.get_attribute("href") or "" for link in links]
    assert all(page.locator(target).count() == 1 for target in targets)
