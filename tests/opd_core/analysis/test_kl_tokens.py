"""Rollouts token by token: colours, what is shortened, what is escaped."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from opd_core.analysis.kl_tokens import mean_k, shown_rollout, shown_rollouts, visible
from opd_core.training.token_kl import KeptRollout


def rollout(*k: float, tokens: tuple[str, ...] = (), mask: tuple[bool, ...] = ()) -> KeptRollout:
    """A rollout whose tokens have these k; all tokens are "x" and the student's by default."""
    return KeptRollout(
        group_id=1,
        index=0,
        row=3,
        data_source="sums",
        why="worst",
        reward=None,
        finish_reason="stop",
        prompt_text="3+4=",
        prompt_tokens=4,
        tokens=tokens or ("x",) * len(k),
        response_mask=mask or (True,) * len(k),
        student=(-1.0,) * len(k),
        teacher=tuple(-1.0 - value for value in k),
        answer_from=len(k),
    )


def classes(shown: str) -> list[str]:
    return [name or "" for name in re.findall(r'<i(?: class="(\w+)")?>', shown)]


def test_a_tint_says_who_likes_the_token_more_and_how_much() -> None:
    shown = shown_rollout(rollout(0.0, 0.1, 0.5, 1.5, 3.0, 9.0, -0.1, -9.0))
    assert classes(shown.tokens) == ["", "s1", "s2", "s3", "s4", "s5", "t1", "t5"]


def test_a_tools_tokens_are_grey_and_have_no_numbers() -> None:
    one = rollout(2.0, 0.0, 4.0, mask=(True, False, True))
    shown = shown_rollout(one)
    assert classes(shown.tokens) == ["s3", "m", "s4"]
    assert json.loads(shown.data)["student"] == [-1.0, None, -1.0]
    assert (shown.mean_k, shown.sampled) == (3.0, 2)


def test_the_numbers_are_those_of_the_tokens_shown() -> None:
    shown = shown_rollout(rollout(0.25, -0.5))
    assert json.loads(shown.data) == {
        "at": [0, 1],
        "student": [-1.0, -1.0],
        "teacher": [-1.25, -0.5],
    }


def test_text_is_shown_and_never_markup() -> None:
    shown = shown_rollout(rollout(0, 0, tokens=("<script>", "</i>&")))
    assert shown.tokens == "<i>&lt;script&gt;</i><i>&lt;/i&gt;&amp;</i>"


@pytest.mark.parametrize(
    ("token", "seen"),
    [
        ("", "∅"),
        ("a\n", "a↵\n"),
        ("\t", "⇥\t"),
        ("\x00\x1b", "␀␛"),
        ("\u202e", "\ufffd"),
        ("\ud800", "\ufffd"),
        (" 7", " 7"),
        ("é", "é"),
    ],
)
def test_what_cannot_be_seen_is_made_visible(token: str, seen: str) -> None:
    assert visible(token) == seen


def test_the_answers_beginning_is_marked() -> None:
    shown = shown_rollout(replace(rollout(0, 0, 0), answer_from=2))
    assert re.sub("<[^>]+>", "|", shown.tokens) == "|x||x||answer||x|"


def test_a_long_rollout_is_shown_around_its_worst_tokens() -> None:
    k = [0.01] * 5000
    k[1000], k[4000] = 8.0, -7.0
    shown = shown_rollout(rollout(*k), max_tokens=120)
    at = json.loads(shown.data)["at"]
    assert {0, 4999, 988, 1000, 1012, 4000} <= set(at)
    assert 120 <= len(at) < 160
    assert len(at) == len(classes(shown.tokens))
    gaps = re.findall(r"… ([\d,]+) tokens left out, mean k ([\d.-]+)<", shown.tokens)
    assert sum(int(count.replace(",", "")) for count, _ in gaps) == shown.left_out
    assert shown.left_out == 5000 - len(at)
    assert gaps[0] == ("948", "0.010")


def test_a_gap_that_is_not_worth_it_is_not_made() -> None:
    k = [0.0] * 400
    k[100] = k[100 + 30] = 5.0  # five tokens between their surroundings
    at = json.loads(shown_rollout(rollout(*k), max_tokens=125).data)["at"]
    assert set(range(88, 143)) <= set(at)


def test_the_worst_come_first_as_far_as_there_is_room() -> None:
    kept = [replace(rollout(k), row=row) for row, k in enumerate((0.5, 3.0, -2.0, 1.0))]
    assert [shown.rollout.row for shown in shown_rollouts(kept)] == [1, 3, 0, 2]
    size = shown_rollout(kept[0]).size
    room = int(2.5 * size)
    assert [shown.rollout.row for shown in shown_rollouts(kept, max_bytes=room)] == [1, 3]


def test_a_rollout_without_a_token_of_the_student_has_mean_0() -> None:
    assert mean_k(rollout(3.0, mask=(False,))) == 0.0
    assert mean_k(rollout()) == 0.0
    assert shown_rollout(rollout()).tokens == ""
