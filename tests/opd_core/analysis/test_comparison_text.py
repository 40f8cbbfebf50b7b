"""The same comparison on a terminal and as markdown: verdict, numbers, differences, doubts."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from opd_core.analysis.comparison_text import comparison_markdown, comparison_text, title
from opd_core.analysis.comparison_words import shown_difference, shown_interval, shown_value
from opd_core.analysis.outcome import Comparison, Target
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
    assert "points" in flat
    for said in (*(each.sentence for each in comparison.pairs), *comparison.warnings):
        assert said in flat
    for covered in (MODELS, TRAINING):
        assert flat.count(covered) == 1
    for cell in ("71.0 %", "+5.0", "[+3.5, +6.5]", "[+2.0, +8.0]", "93.0 %", "14"):
        assert cell in text
    for difference in comparison.differences:
        assert difference.key in text
        assert all(what in text.replace("\\|", "|") for _, what in difference.values)


@pytest.mark.parametrize("width", [60, 80, 100, 130])
def test_no_number_is_broken_however_narrow_the_terminal(width: int) -> None:
    comparison = replace(example(), arms=example().arms[:1], differences=(), references=())
    text = on_terminal(replace(comparison, arms=example().arms), width)
    lines = text.splitlines()
    for whole in ("71.0 %", "[+3.5, +6.5]", "[+2.0, +8.0]", "cannot tell", "better", "baseline"):
        assert any(whole in line for line in lines), whole
    assert "…" not in text
    assert max(map(len, lines)) <= width


def test_square_brackets_are_letters_at_a_terminal() -> None:
    odd = "[red]x[/red][/]"
    first, *others = example().arms
    pairs = tuple(replace(each, baseline=odd) for each in example().pairs)
    target = replace(example().target, metric="eval/accuracy/[/b]")
    comparison = replace(example(), arms=(replace(first, label=odd), *others), pairs=pairs)
    text = on_terminal(replace(comparison, target=target))
    assert text.count(odd) == 2  # its row, and the heading of what it has
    assert "eval/accuracy/[/b] at" in text


def test_markdown_takes_a_name_for_nothing_but_a_name() -> None:
    odd = "<img src=x> *a* [b](c) `d` \\ &lt; _e_ f_g"
    first, *others = example().arms
    comparison = replace(example(), arms=(replace(first, label=odd), *others), warnings=(odd,))
    text = comparison_markdown(comparison)
    said = r"\<img src=x> \*a\* [b]\(c) \`d\` \\ \&lt; \_e\_ f_g"
    assert text.splitlines()[0].endswith(f"against {said}")
    assert f"> **Warning:** {said}" in text
    assert text.count(said) == 7  # title, warning, arms, differences, three runs
    assert odd not in text


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


def test_a_run_against_itself_is_told_as_the_same_run() -> None:
    one = replace(example().arms[0], runs=example().arms[0].runs[:1])
    comparison = replace(example(), differences=(), arms=(one, replace(one, label="again")))
    assert "It is the same run." in on_terminal(comparison)
    assert "the seed" not in on_terminal(comparison)


def test_what_lies_between_two_evaluations_is_told_so() -> None:
    first, *others = example().arms
    between = replace(first.runs[0], train_step=25, train_step_after=50, fraction=0.5)
    comparison = replace(example(), arms=(replace(first, runs=(between,)), *others))
    assert "between 25 and 50" in markdown_row(comparison_markdown(comparison), between.run_id)


def test_a_comparison_without_a_margin_is_asked_for_without_one() -> None:
    without = replace(example(), target=Target("entropy"))
    assert "--margin" not in comparison_markdown(without)
    assert "--margin 0.1" in comparison_markdown(
        replace(example(), target=Target("entropy", margin=0.1))
    )


def test_numbers_are_written_in_the_unit_of_the_metric() -> None:
    assert shown_value("eval/accuracy", 0.6126) == "61.3 %"
    assert shown_value("opd_reverse_kl", 0.25) == "0.25"
    assert shown_difference("eval/accuracy", -0.031) == "-3.1 points"
    assert shown_difference("opd_reverse_kl", 0.5) == "+0.5"
    assert shown_value("eval/pass_at_4", 0.5) == "50.0 %"
    assert shown_interval("entropy", interval(-0.5, 0.25, MODELS)) == "[-0.5, +0.25]"
    assert shown_interval("entropy", None) == "-"


def test_the_title_names_the_arms_the_baseline_last() -> None:
    comparison = example()
    mixed, task_only = (each.label for each in comparison.arms[1:])
    assert title(comparison) == f"{mixed}, {task_only} against pure OPD"
    many = replace(comparison, arms=(*comparison.arms, arm("another", 0.5)))
    assert title(many) == "3 arms against pure OPD"
