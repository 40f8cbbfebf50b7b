"""The comparison's page: one file that needs nothing else, and charts that stand alone."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from opd_core.analysis.comparison_charts import comparison_charts
from opd_core.analysis.comparison_page import comparison_page
from opd_core.analysis.outcome import Comparison
from tests.opd_core.analysis.example_comparison import MODELS, TRAINING, arm, example, pair

HOSTILE = "<script>alert('a')</script>"


class Page(HTMLParser):
    """What a test asks of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.links: dict[str, str] = {}
        self.charts: list[str] = []
        self.scripts = 0
        self._link = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.scripts += tag == "script"
        if tag == "a":
            self._link = given["href"] or ""
        if tag == "svg":
            self.charts.append(given["aria-label"] or "")

    def handle_data(self, data: str) -> None:
        self.words += data.split()
        if self._link:
            self.links[data], self._link = self._link, ""

    @property
    def text(self) -> str:
        return " ".join(self.words)


def page_of(comparison: Comparison, folder: Path, directories: dict[str, Path]) -> str:
    charts = comparison_charts(comparison)
    return comparison_page(comparison, charts, directories=directories, page_folder=folder)


def test_the_page_says_everything_the_verdict_first(tmp_path: Path) -> None:
    comparison = example()
    text = Page(page_of(comparison, tmp_path, {})).text
    first = text.index(comparison.pairs[0].sentence)
    assert first < text.index("How sure that is") < text.index("In what they differ")
    for said in (*comparison.warnings, MODELS, TRAINING, "+5.0 points", "93.0 %"):
        assert said in text
    for difference in comparison.differences:
        assert difference.key in text
    for run in comparison.arms[2].runs:
        assert run.run_id in text


def test_there_is_a_chart_for_each_interval_axis_and_further_metric(tmp_path: Path) -> None:
    labels = [label.partition(".")[0] for label in Page(page_of(example(), tmp_path, {})).charts]
    assert labels[:2] == ["These models, new questions", "New training runs"]
    axes = ("train steps", "student tokens", "teacher tokens", "device-seconds", "money")
    assert labels[2:7] == [f"held-out accuracy by {axis}" for axis in axes]
    along = "by student tokens"
    assert labels[7:] == [
        f"opd_reverse_kl (nats/token) {along}",
        f"response length (tokens) {along}",
        f"entropy (nats/token) {along}",
    ]


def test_without_intervals_curves_and_differences_there_is_still_a_page(tmp_path: Path) -> None:
    bare = replace(
        example(),
        arms=tuple(replace(each, curves=()) for each in example().arms),
        pairs=tuple(replace(each, models=None, training=None) for each in example().pairs),
        differences=(),
        warnings=(),
    )
    page = Page(page_of(bare, tmp_path, {}))
    assert page.charts == []
    assert "differ in nothing but the seed" in page.text


def test_a_run_with_a_report_is_linked_relative_to_the_page(tmp_path: Path) -> None:
    first, second, *_ = example().arms[0].runs
    run = tmp_path / "runs" / first.run_id
    run.mkdir(parents=True)
    (run / "report.html").write_text("")
    folder = tmp_path / "runs" / "comparisons" / "one"
    directories = {first.run_id: run, second.run_id: tmp_path}
    page = Page(page_of(example(), folder, directories))
    assert page.links[first.run_id] == f"../../{first.run_id}/report.html"
    assert second.run_id not in page.links


def test_a_link_leads_to_its_run_whatever_it_is_called(tmp_path: Path) -> None:
    first = example().arms[0].runs[0]
    run = tmp_path / "a #1?%20" / "r"
    run.mkdir(parents=True)
    (run / "report.html").write_text("")
    page = Page(page_of(example(), tmp_path, {first.run_id: run}))
    assert page.links[first.run_id] == "a%20%231%3F%2520/r/report.html"


def test_a_metric_without_a_direction_or_a_margin_has_a_neutral_page(tmp_path: Path) -> None:
    target = replace(example().target, metric="entropy", margin=None)
    pairs = tuple(replace(each, verdict="higher") for each in example().pairs)
    html = page_of(replace(example(), target=target, pairs=pairs), tmp_path, {})
    assert '<span class="badge note">higher</span>' in html
    assert "does not matter" not in html


def test_names_of_runs_and_arms_are_text_and_nothing_else(tmp_path: Path) -> None:
    arms = (example().arms[0], arm(HOSTILE, 0.5, number=1))
    comparison = replace(
        example(), arms=arms, pairs=(pair(HOSTILE, 0.05, "better"),), warnings=(HOSTILE,)
    )
    page = Page(page_of(comparison, tmp_path, {}))
    assert page.scripts == 0
    assert page.text.count(HOSTILE) > 3


def test_the_page_asks_nothing_of_the_network(tmp_path: Path) -> None:
    html = page_of(example(), tmp_path, {})
    assert not re.search(r'(?:src|href)="(?:https?:)?//', html)
    assert "url(http" not in html
    assert len(html) < 500_000


def test_a_chart_stands_alone_with_its_legend_and_its_colours() -> None:
    charts = comparison_charts(example())
    assert len({chart.file for chart in charts}) == len(charts)
    for chart in charts:
        text = chart.standalone()
        ElementTree.fromstring(text)
        style = text[text.index("<style>") : text.index("</style>")]
        for variable in set(re.findall(r"var\((--[\w-]+)\)", text)):
            assert f"{variable}:" in style
    (accuracy,) = (chart for chart in charts if chart.name == "eval-accuracy-student_tokens")
    words = "".join(ElementTree.fromstring(accuracy.standalone()).itertext())
    for label in ("pure OPD", "opd.task_adv_weight=0.5", "teacher", "compared here"):
        assert label in words
