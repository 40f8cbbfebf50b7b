"""Two prompts side by side: nothing that differs is hidden, and every data_source is looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from opd_core.preflight.renderings import (
    Rendered,
    Rendering,
    choose_rows,
    excerpt,
    rendering_diff,
    sample_rows,
)


def rendering(student: str, teacher: str) -> Rendering:
    return Rendering(3, "sums", Rendered(student), Rendered(teacher))


def diff_lines(student: str, teacher: str) -> list[str]:
    return rendering_diff(rendering(student, teacher)).split("\n")


# ------------------------------------------------------------------ the diff


def test_equal_prompts_have_no_diff() -> None:
    assert rendering_diff(rendering("<user>1", "<user>1")) == ""


def test_a_prompt_that_is_not_given_has_no_diff() -> None:
    refused = Rendering(3, "sums", Rendered("<user>1"), Rendered(refusal="no"))
    assert (rendering_diff(refused), refused.differs, refused.compared) == ("", False, False)


def test_the_diff_shows_both_sides_with_newlines() -> None:
    lines = diff_lines("<user>1+1\n<assistant>", "<user>1+1\n<assistant><think>\n")
    assert lines == [
        "--- student",
        "+++ teacher",
        "@@ row 3 (sums) @@",
        " <user>1+1↵",
        " <assistant>",
        "+<think>↵",
    ]


def test_control_characters_and_spaces_at_an_edge_are_visible() -> None:
    lines = diff_lines("answer:", "answer:\t ")
    assert lines[3:] == ["-answer:", "+answer:\\t·"]
    assert diff_lines("a\u200b \n", "b")[3:] == ["-a\\u200b·↵", "+b"]


def test_what_both_have_is_shortened() -> None:
    question = " ".join(f"word{i}" for i in range(200))
    lines = diff_lines(f"<user>{question}<end>", f"<human>{question}<end>")
    assert lines[3:5] == ["-<user>", "+<human>"]
    assert len(lines) == 6
    whole = f"{question}<end>"
    left_out = len(whole) - 96
    between = f"… {left_out} characters that both have …"
    assert lines[5] == f" {whole[:48]}{between}{whole[-48:]}"


def test_a_change_in_the_middle_of_a_long_prompt_is_shown() -> None:
    words = [f"word{i}" for i in range(400)]
    other = [*words[:200], "CHANGED", *words[201:]]
    lines = diff_lines(" ".join(words), " ".join(other))
    assert "-word200·" in lines
    assert "+CHANGED·" in lines


def test_what_only_one_side_has_is_never_shortened() -> None:
    system = " ".join(f"rule{i}" for i in range(300))
    lines = diff_lines("<user>1", f"<system>{system}<user>1")
    assert f"+<system>{system}" in lines


def restored(lines: list[str], mark: str) -> str:
    """The text of one side, read back from the diff."""
    of_side = (line[1:] for line in lines[3:] if line[0] in (" ", mark))
    return "".join(of_side).replace("↵", "\n").replace("·", " ")


# Short enough that nothing of it is left out.
TEXT = st.text(alphabet="ab <>\n", max_size=60)


@given(TEXT, TEXT)
@example("a b", "a  b")
@example("\n", "\n\n")
def test_both_prompts_can_be_read_back_from_the_diff(student: str, teacher: str) -> None:
    if student != teacher:
        lines = diff_lines(student, teacher)
        assert (restored(lines, "-"), restored(lines, "+")) == (student, teacher)


def test_an_excerpt_is_around_the_first_difference() -> None:
    assert excerpt("same", "same but longer") == "same"
    long = "a" * 100 + "X" + "b" * 100
    shown = excerpt(long, "a" * 100 + "Y")
    assert shown == "…" + "a" * 48 + "X" + "b" * 47 + "…"


# ------------------------------------------------------------------ think tags


@pytest.mark.parametrize(
    ("prompt", "tag"),
    [
        ("<user>1<assistant>", ""),
        ("<assistant><think>\n", "<think>"),
        ("<assistant><think>\n\n</think>\n\n", "</think>"),
        ("<think> is a word here<assistant>", ""),
        ("[INST]1[/INST][THINK]", "[THINK]"),
        ("<|assistant|><|thinking|>", "<|thinking|>"),
        ("", ""),
    ],
)
def test_the_think_tag_at_a_prompts_end_is_found(prompt: str, tag: str) -> None:
    assert Rendered(prompt).think_tag == tag


# ------------------------------------------------------------------ which rows


def write_rows(file: Path, sources: str) -> str:
    rows = [
        {"data_source": source, "prompt": [{"role": "user", "content": str(i)}]}
        for i, source in enumerate(sources)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.parametrize(
    ("sources", "numbers"),
    [
        ("aaa", [0, 1, 2]),
        ("a" * 30, list(range(8))),
        ("a" * 20 + "b" + "a" * 5 + "c", [0, 1, 2, 3, 4, 5, 20, 26]),
        ("aabbccddeeffgghhii", [0, 2, 4, 6, 8, 10, 12, 14, 16]),
    ],
)
def test_rows_are_of_every_data_source_and_at_most_eight_where_that_suffices(
    tmp_path: Path, sources: str, numbers: list[int]
) -> None:
    rows = sample_rows(write_rows(tmp_path / "rows.jsonl", sources))
    assert [row.number for row in choose_rows(rows)] == numbers
