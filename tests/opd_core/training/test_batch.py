"""Cutting a step's groups for ranks and micro-batches changes no number."""

from __future__ import annotations

import pytest
import torch

from opd_core.rollout import Group, Prompt, RolloutState, Status
from opd_core.training.batch import build_batch, collate, micro_batches, shard


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


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_shards_hold_every_sample_once_and_the_whole_batchs_counts(ranks: int) -> None:
    batch = batch_of([group_of(i, [1 + i, 4]) for i in range(5)])
    shards = shard(batch, ranks)
    dealt = [s for part in shards for s in part.mini_batches[0].samples]
    assert sorted(s.token_ids for s in dealt) == sorted(
        s.token_ids for s in batch.mini_batches[0].samples
    )
    assert {part.mini_batches[0].valid_tokens for part in shards} == {
        batch.mini_batches[0].valid_tokens
    }
    assert {part.baseline for part in shards} == {batch.baseline}


def test_micro_batches_keep_to_the_token_budget_and_lose_nothing() -> None:
    samples = batch_of([group_of(i, [1 + i * 3]) for i in range(9)]).mini_batches[0].samples
    parts = list(micro_batches(samples, max_tokens=40))
    assert sum(len(part) for part in parts) == len(samples)
    assert all(
        len(part) == 1 or len(part) * max(len(s.token_ids) for s in part) <= 40 for part in parts
    )


def test_every_per_token_field_describes_its_token() -> None:
    samples = batch_of([group_of(0, [3]), group_of(1, [1])]).mini_batches[0].samples
    padded = collate(samples, pad_id=0, device=torch.device("cpu"))
    assert padded.token_ids.tolist() == [[2, 3, 5, 6, 7], [2, 3, 4, 5, 0]]
    assert padded.response_mask.tolist() == [[False] * 2 + [True] * 3, [False] * 3 + [True, False]]
    assert padded.teacher_logprobs.tolist() == [[0, 0, -1.5, -1.5, -1.5], [0, 0, 0, -2.5, 0]]
    assert padded.flat.tolist() == [2, 3, 4, 8]
    assert padded.source_index[:, 0].tolist() == [0, 1]


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
