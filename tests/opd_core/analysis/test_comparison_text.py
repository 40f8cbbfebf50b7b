"""The same comparison on a terminal and as markdown: verdict, numbers, differences, doubts."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from opd_core.analysis.comparison_text import comparison_markdown, comparison_text, title
from opd_core.analysis.comparison_words import shown_difference, shown_interval, shown_value
from opd_core.analysis.outcome import Comparison
from tests.opd_core.analysis.example_comparison import MODELS, TRAINING, arm, example, interval


def on_terminal(comparison: Comparison, width: int = 160) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(comparison_text(comparison))
    return out.getvalue()


def markdown_row(text: str, start: str) -> list[str]:
    """The cells of the table row that begins so."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split(" | ")]


@pytest.mark.parametrize("surface", [on_terminal, comparison_markdown])
def test_each_surface_says_everything(surface: Callable[[Comparison], str]) -> None:
    comparison = example()
    text = surface(comparison)
    flat = " ".join(text.split())
    for said in (*(each.sentence for each in comparison.pairs), *comparison.warnings):
        assert said in flat
    for covered in (MODELS, TRAINING):
        assert flat.count(covered) == 1
    for cell in ("71.0 %", "+5.0 points", "[+3.5, +6.5]", "[+2.0, +8.0]", "93.0 %", "14"):
        assert cell in text
    for difference in comparison.differences:
        assert difference.key in text
        assert all(what in text.replace("\\|", "|") for _, what in difference.values)


def test_the_verdict_comes_first() -> None:
    assert on_terminal(example()).startswith(example().pairs[0].sentence)


def test_markdown_is_a_table_whatever_stands_in_a_cell() -> None:
    text = comparison_markdown(example())
    assert "`tiny-20260-0002: 2.12.1 <a\\|b>`" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    widths = {line.replace("\\|", "").count("|") for line in tables}
    assert widths == {10, 6, 7}  # arms, differences, runs


def test_an_arm_has_its_own_row_of_numbers() -> None:
    row = markdown_row(comparison_markdown(example()), "opd=null task_adv_weight=1")
    assert row[1:4] == ["3", "70.0 %", "-1.0 points"]
    assert row[-2:] == ["cannot tell", "14"]


def test_charts_are_referred_to_where_there_are_any() -> None:
    text = comparison_markdown(example(), [("by steps", "accuracy.svg")])
    assert "![by steps](accuracy.svg)" in text
    assert "![" not in comparison_markdown(example())


def test_headings_fit_into_another_page() -> None:
    text = comparison_markdown(example(), heading="##")
    levels = [line.split()[0] for line in text.splitlines() if line.startswith("#")]
    assert levels == ["##", "###", "###"]


def test_arms_that_differ_in_nothing_say_so() -> None:
    comparison = replace(example(), differences=())
    assert "differ in nothing but the seed" in on_terminal(comparison)
    assert "differ in nothing but the seed" in comparison_markdown(comparison)


def test_numbers_are_written_in_the_unit_of_the_metric() -> None:
    assert shown_value("eval/accuracy", 0.6126) == "61.3 %"
    assert shown_value("opd_reverse_kl", 0.25) == "0.25"
    assert shown_difference("eval/accuracy", -0.031) == "-3.1 points"
    assert shown_difference("opd_reverse_kl", 0.5) == "+0.5"
    assert shown_interval("entropy", interval(-0.5, 0.25, MODELS)) == "[-0.5, +0.25]"
    assert shown_interval("entropy", None) == "-"


def test_the_title_names_the_arms_the_baseline_last() -> None:
    comparison = example()
    mixed, task_only = (each.label for each in comparison.arms[1:])
    assert title(comparison) == f"{mixed}, {task_only} against pure OPD"
    many = replace(comparison, arms=(*comparison.arms, arm("another", 0.5)))
    assert title(many) == "3 arms against pure OPD"
