"""Group-relative advantages, by hand and against a numpy loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opd_core.objective import group_relative_advantages


def numpy_group_advantages(
    rewards: list[float], groups: list[int], num_groups: int, eps: float = 1e-8
) -> list[float]:
    """Mean and ddof=1 std, one group after the other."""
    values, index = np.array(rewards, dtype=np.float64), np.array(groups)
    result = np.zeros(len(rewards))
    for group in range(num_groups):
        members = values[index == group]
        if len(members) > 1:
            result[index == group] = (members - members.mean()) / (members.std(ddof=1) + eps)
    return [float(value) for value in result]


def test_numbers_by_hand() -> None:
    # Mean 2, unbiased variance (1 + 0 + 1) / 2 = 1; and mean 0.5, variance 0.5.
    result = group_relative_advantages(
        torch.tensor([1.0, 2.0, 3.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 1, 1]), 2
    )
    half = math.sqrt(0.5)
    torch.testing.assert_close(result, torch.tensor([-1.0, 0.0, 1.0, -half, half]))


@settings(max_examples=100, deadline=None)
@given(
    members=st.lists(
        st.tuples(st.integers(0, 4), st.integers(-8, 8).map(lambda n: n / 4)), max_size=24
    )
)
def test_ragged_and_shuffled_groups_equal_a_numpy_loop(members: list[tuple[int, float]]) -> None:
    groups, rewards = [group for group, _ in members], [reward for _, reward in members]

    result = group_relative_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups, dtype=torch.int64), 5
    )

    assert result.tolist() == pytest.approx(
        numpy_group_advantages(rewards, groups, 5), rel=1e-9, abs=1e-9
    )


@settings(max_examples=100, deadline=None)
@given(reward=st.floats(-100, 100, width=32), size=st.integers(1, 9))
def test_equal_rewards_give_exactly_zero_however_they_round(reward: float, size: int) -> None:
    result = group_relative_advantages(
        torch.full((size,), reward), torch.zeros(size, dtype=torch.int64), 1
    )
    assert result.tolist() == [0.0] * size


def test_a_group_of_one_gives_zero_and_leaves_its_neighbours_alone() -> None:
    result = group_relative_advantages(torch.tensor([7.0, 0.0, 1.0]), torch.tensor([0, 2, 2]), 3)
    torch.testing.assert_close(result, torch.tensor([0.0, -(0.5**0.5), 0.5**0.5]))


def test_one_broken_reward_stays_in_its_group() -> None:
    result = group_relative_advantages(
        torch.tensor([math.nan, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]), 2
    )
    assert result.isfinite().tolist() == [False, False, True, True]


def test_no_rollouts_give_no_advantages() -> None:
    result = group_relative_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 0)
    assert result.shape == (0,)


def test_rewards_are_not_changed() -> None:
    rewards = torch.tensor([1.0, 2.0, 4.0])
    group_relative_advantages(rewards, torch.zeros(3, dtype=torch.int64), 1)
    assert rewards.tolist() == [1.0, 2.0, 4.0]


def test_integer_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="floating-point rewards"):
        group_relative_advantages(torch.tensor([0, 1]), torch.tensor([0, 0]), 1)


def test_an_eps_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="eps > 0"):
        group_relative_advantages(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]), 1, eps=0.0)


def test_a_group_per_token_is_refused() -> None:
    with pytest.raises(ValueError, match="group_index"):
        group_relative_advantages(torch.zeros(2), torch.zeros(3, dtype=torch.int64), 1)
