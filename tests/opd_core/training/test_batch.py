"""Cutting a step's groups for ranks and micro-batches changes no number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opd_core.rollout import Group, Prompt, RolloutState, Status
from opd_core.training.batch import TrainBatch, build_batch


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


def changed(group: Group, index: int, **fields: object) -> Group:
    """The group with other fields of one member."""
    member = replace(group.rollouts[index], **fields)  # type: ignore[arg-type]
    return replace(group, rollouts=(*group.rollouts[:index], member, *group.rollouts[index + 1 :]))


def batch_of(groups: list[Group], **changes: object) -> TrainBatch:
    settings = {
        "policy_version": 0,
        "truncated": "train",
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


def test_a_tools_tokens_are_in_no_count_and_in_no_mean() -> None:
    group = changed(
        group_of(0, [2, 4]),
        1,
        response_mask=(True, False, False, True),
        rollout_logprobs=(-1.0, 0.0, 0.0, -2.0),
        teacher_logprobs=(-1.5, -7.0, -9.0, -4.0),
    )
    batch = batch_of([group])
    (mini,) = batch.mini_batches
    assert mini.valid_tokens == 2 + 2
    assert [len(sample.token_ids) for sample in mini.samples] == [4, 6]
    assert batch.baseline == pytest.approx((0.5 + 0.5 + 0.5 + 2.0) / 4)


def test_staleness_is_measured_from_the_weights_that_train() -> None:
    group = changed(group_of(0, [3, 3]), 0, policy_versions=(4, 6, 7))
    group = changed(group, 1, policy_versions=(7, 7, 7))
    samples = batch_of([group], policy_version=7).mini_batches[0].samples
    assert [sample.staleness for sample in samples] == [(3, 1, 0), ()]


@pytest.mark.parametrize(
    ("truncated", "advantages"),
    [
        ("train", {0: -0.5, 1: -0.5, 2: -0.5, 3: 1.5}),
        ("mask", {0: -0.5, 1: -0.5, 2: -0.5}),
        ("drop", {0: 0.0, 1: 0.0, 2: 0.0}),
    ],
)
def test_a_truncated_answer_trains_or_counts_in_its_group_or_neither(
    truncated: str, advantages: dict[int, float]
) -> None:
    group = group_of(0, [2, 2, 2, 5], [0.0, 0.0, 0.0, 4.0])
    unscored = {} if truncated == "train" else {"teacher_logprobs": None}
    group = changed(group, 3, finish_reason="length", **unscored)
    batch = batch_of([group], truncated=truncated, use_rewards=True)
    (mini,) = batch.mini_batches
    assert {s.rollout[1]: s.task_advantage for s in mini.samples} == pytest.approx(advantages)
    assert mini.valid_tokens == sum(s.response_tokens for s in mini.samples)


def test_a_group_with_one_answer_left_has_no_task_advantage() -> None:
    group = changed(group_of(0, [2, 2], [1.0, 0.0]), 1, finish_reason="length", reward=None)
    (sample,) = batch_of([group], truncated="drop", use_rewards=True).mini_batches[0].samples
    assert (sample.rollout, sample.task_advantage) == ((0, 0), 0.0)


def test_a_batch_of_truncated_answers_only_has_no_mini_batch() -> None:
    group = changed(group_of(0, [2], [1.0]), 0, finish_reason="length")
    batch = batch_of([group], truncated="drop", use_rewards=True)
    assert (batch.mini_batches, batch.baseline) == ((), 0.0)


def test_more_optimizer_steps_than_samples_make_no_empty_mini_batch() -> None:
    batch = batch_of([group_of(0, [2, 2])], mini_batches=5)
    assert [mini.valid_tokens for mini in batch.mini_batches] == [2, 2]


@pytest.mark.parametrize("asked", [False, True])
def test_the_wish_for_the_teachers_own_gradient_goes_with_the_batch(asked: bool) -> None:
    assert batch_of([group_of(0, [2])], measure_teacher=asked).measure_teacher is asked
