"""What the driver tells of a step's rollouts, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from opd_core.rollout import Prompt, RolloutState, Status
from opd_core.training.rollout_metrics import rollout_metrics


def rollout_of(length: int, **fields: Any) -> RolloutState:
    settings = {"finish_reason": "stop", "rollout_logprobs": (-1.0,) * length}
    return RolloutState(
        0,
        0,
        Prompt(0, "math", (1, 2, 3)),
        Status.COMPLETED,
        response_ids=tuple(range(length)),
        **(settings | fields),
    )


def scored(length: int, last: float, **fields: Any) -> RolloutState:
    """With teacher logprobs of -7 but for the last token's."""
    teacher = (*[-7.0] * (length - 1), last)
    return rollout_of(length, teacher_logprobs=teacher, teacher_attempts=1, **fields)


def test_lengths_and_how_the_rollouts_ended() -> None:
    metrics = rollout_metrics(
        [
            rollout_of(4),
            rollout_of(9, finish_reason="length"),
            rollout_of(6, response_mask=(True, False, False, False, True, True)),
            rollout_of(2, finish_reason=""),
        ]
    )
    assert metrics == {
        "rollout/response_tokens_mean": (4 + 9 + 3 + 2) / 4,
        "rollout/response_tokens_max": 9,
        "rollout/truncated_fraction": 0.25,
        "rollout/eos_fraction": 0.5,
    }


def test_the_longest_counts_the_students_own_tokens() -> None:
    toolful = rollout_of(6, response_mask=(True, *[False] * 4, True))
    metrics = rollout_metrics([toolful, rollout_of(3)])
    assert metrics["rollout/response_tokens_max"] == 3


def test_the_end_tokens_k_is_of_scored_rollouts_that_ended_by_themselves() -> None:
    ended = scored(3, -3.0), scored(2, -1.5)
    others = scored(4, -100.0, finish_reason="length"), rollout_of(2)
    metrics = rollout_metrics([*ended, *others])
    assert metrics["rollout/end_token_kl"] == pytest.approx((2.0 + 0.5) / 2)


@pytest.mark.parametrize(
    "rollouts",
    [[], [rollout_of(3)], [scored(3, -3.0, finish_reason="length")]],
    ids=["none", "unscored", "cut"],
)
def test_without_a_scored_end_token_nothing_is_said_of_it(rollouts: list[RolloutState]) -> None:
    assert "rollout/end_token_kl" not in rollout_metrics(rollouts)


def test_the_teachers_tokens_are_prompts_and_responses_of_what_it_scored() -> None:
    cached = scored(5, -1.0, teacher_cached_tokens=2)
    metrics = rollout_metrics([scored(4, -1.0), cached, rollout_of(50)])
    assert metrics["teacher/scored_tokens"] == (3 + 4) + (3 + 5)
    assert metrics["teacher/cached_fraction"] == 2 / (3 + 5)


def test_without_scores_nothing_is_said_of_the_teacher() -> None:
    assert not any(name.startswith("teacher/") for name in rollout_metrics([rollout_of(3)]))


def test_no_rollouts_are_zeros() -> None:
    assert set(rollout_metrics([]).values()) == {0.0}
