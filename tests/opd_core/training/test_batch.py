"""Cutting a step's groups for ranks and micro-batches changes no number."""

from __future__ import annotations

import pytest

from opd_core.rollout import Group, Prompt, RolloutState, Status
from opd_core.training.batch import build_batch


def group_of(group_id: int, lengths: list[int], rewards: list[float] | None = None) -> Group:
    prompt = Prompt(group_id, "math" if group_id % 2 else "code", tuple(range(2, 4 + group_id % 3)))
    rollouts = tuple(
        RolloutState(
            group_id,
            i,
            prompt,
            Status.COMPLETED,
            response_ids=tuple(range(5, 5 + length)),
            rollout_logprobs=(-1.0,) * length,
            teacher_logprobs=(-1.5 - group_id,) * length,
            reward=rewards[i] if rewards else None,
        )
        for i, length in enumerate(lengths)
    )
    return Group(group_id, prompt, rollouts, Status.COMPLETED)


def batch_of(groups: list[Group], **changes: object) -> object:
    settings = {
        "sources": ("code", "math"),
        "scored": True,
        "use_rewards": False,
        "use_baseline": True,
        "mini_batches": 1,
    }
    return build_batch(groups, **(settings | changes))  # type: ignore[arg-type]


def test_valid_tokens_and_baseline_are_those_of_the_whole_batch() -> None:
    batch = batch_of([group_of(0, [2, 3]), group_of(1, [5])])
    (mini,) = batch.mini_batches
    assert mini.valid_tokens == 10
    assert batch.baseline == pytest.approx((5 * 0.5 + 5 * 1.5) / 10)


def test_task_advantages_are_relative_to_the_group() -> None:
    batch = batch_of([group_of(0, [1, 1, 1], [0.0, 0.0, 3.0])], use_rewards=True)
    advantages = [s.task_advantage for s in batch.mini_batches[0].samples]
    assert advantages == pytest.approx([-(3**-0.5), -(3**-0.5), 2 * 3**-0.5], abs=1e-6)


def test_a_missing_reward_is_named() -> None:
    with pytest.raises(ValueError, match="rollout 0 of group 3 has no reward"):
        batch_of([group_of(3, [1, 1])], use_rewards=True)


def test_more_optimizer_steps_than_samples_make_no_empty_mini_batch() -> None:
    batch = batch_of([group_of(0, [2, 2])], mini_batches=5)
    assert [mini.valid_tokens for mini in batch.mini_batches] == [2, 2]
