"""Nothing gets into the replay buffer that must not train."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from opd_core.agent_loop.replay_buffer import ReplayBuffer
from opd_core.config import TruncatedPolicy
from opd_core.errors import TrainingError
from opd_core.rollout import Group, RolloutState, Status

MakeGroup = Callable[..., Group]
MakeRollout = Callable[..., RolloutState]
SCORES = (-0.4, -1.4)


@pytest.fixture
def buffer() -> ReplayBuffer:
    return ReplayBuffer(needs_scores=True, needs_rewards=True)


def test_a_scored_and_judged_group_is_accepted(
    buffer: ReplayBuffer, make_group: MakeGroup, make_rollout: MakeRollout
) -> None:
    group = make_group(make_rollout(teacher_logprobs=SCORES, reward=0.0))
    buffer.put(group)
    assert len(buffer) == 1
    assert buffer.take(1) == [group]
    assert len(buffer) == 0


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.COMPLETED])
def test_a_group_that_is_not_completed_is_refused(
    status: Status, buffer: ReplayBuffer, make_group: MakeGroup, make_rollout: MakeRollout
) -> None:
    good = make_rollout(teacher_logprobs=SCORES, reward=1.0)
    with pytest.raises(TrainingError, match=f"group 0 is {status}"):
        buffer.put(make_group(good, status=status))
    assert len(buffer) == 0


BAD: dict[str, dict[str, Any]] = {
    "failed member": {"status": Status.FAILED},
    "not scored": {"teacher_logprobs": None},
    "one score less": {"teacher_logprobs": (-0.4,)},
    "one score more": {"teacher_logprobs": (-0.4, -1.4, -2.0)},
    "score is NaN": {"teacher_logprobs": (-0.4, math.nan)},
    "score is -inf": {"teacher_logprobs": (-0.4, -math.inf)},
    "one rollout_logprob less": {"rollout_logprobs": (-0.5,)},
    "rollout_logprob is NaN": {"rollout_logprobs": (-0.5, math.nan)},
    "rollout_logprob is -inf": {"rollout_logprobs": (-math.inf, -0.5)},
    "mask of a token less": {"response_mask": (True,)},
    "versions of a token more": {"policy_versions": (0, 0, 0)},
    "not judged": {"reward": None},
    "reward is NaN": {"reward": math.nan},
    "reward is infinite": {"reward": math.inf},
}


@pytest.mark.parametrize("name", BAD)
def test_a_member_that_must_not_train_is_refused_by_name(
    name: str,
    buffer: ReplayBuffer,
    make_group: MakeGroup,
    make_rollout: MakeRollout,
    make_prompt: Any,
) -> None:
    prompt = make_prompt(31)
    good = {"teacher_logprobs": SCORES, "reward": 1.0}
    group = make_group(
        make_rollout(0, prompt, group_id=5, **good),
        make_rollout(1, prompt, group_id=5, **(good | BAD[name])),
    )
    with pytest.raises(TrainingError, match=r"rollout 1 of group 5 \(data row 31\)"):
        buffer.put(group)
    assert len(buffer) == 0


def test_pure_opd_needs_no_reward(make_group: MakeGroup, make_rollout: MakeRollout) -> None:
    buffer = ReplayBuffer(needs_scores=True, needs_rewards=False)
    buffer.put(make_group(make_rollout(teacher_logprobs=SCORES)))
    assert len(buffer) == 1


def test_without_teachers_no_scores_are_needed(
    make_group: MakeGroup, make_rollout: MakeRollout
) -> None:
    buffer = ReplayBuffer(needs_scores=False, needs_rewards=True)
    buffer.put(make_group(make_rollout(reward=1.0)))
    assert len(buffer) == 1


CUT: dict[str, Any] = {"finish_reason": "length"}


@pytest.mark.parametrize(
    ("truncated", "rollout", "accepted"),
    [
        ("mask", CUT | {"reward": 1.0}, True),
        ("mask", CUT, False),
        ("drop", CUT, True),
        ("train", CUT | {"reward": 1.0}, False),
        ("mask", {"reward": 1.0}, False),
        ("drop", {"reward": 1.0}, False),
    ],
)
def test_a_truncated_member_carries_what_becomes_of_it(
    truncated: TruncatedPolicy,
    rollout: dict[str, Any],
    accepted: bool,
    make_group: MakeGroup,
    make_rollout: MakeRollout,
) -> None:
    """None of these has scores: cut ones need none unless they train, dropped ones no reward."""
    buffer = ReplayBuffer(needs_scores=True, needs_rewards=True, truncated=truncated)
    whole = make_rollout(0, teacher_logprobs=SCORES, reward=0.0)
    group = make_group(whole, make_rollout(1, **rollout))
    with nullcontext() if accepted else pytest.raises(TrainingError, match="rollout 1 of group 0"):
        buffer.put(group)
    assert len(buffer) == accepted


def test_a_tools_tokens_are_scored_and_carry_a_placeholder(
    buffer: ReplayBuffer, make_group: MakeGroup, make_rollout: MakeRollout
) -> None:
    fields = {"response_mask": (True, False), "policy_versions": (3, 3), "reward": 0.0}
    own = {"rollout_logprobs": (-0.5, 0.0)}
    buffer.put(make_group(make_rollout(teacher_logprobs=SCORES, **own, **fields)))
    assert len(buffer) == 1
    with pytest.raises(TrainingError, match="teacher_logprobs are not 2 finite"):
        buffer.put(make_group(make_rollout(teacher_logprobs=(-0.4, math.nan), **own, **fields)))


def test_an_empty_response_may_train(
    buffer: ReplayBuffer, make_group: MakeGroup, make_rollout: MakeRollout
) -> None:
    empty = make_rollout(response_ids=(), rollout_logprobs=(), teacher_logprobs=(), reward=0.0)
    buffer.put(make_group(empty))
    assert len(buffer) == 1


def test_groups_leave_in_the_order_of_their_ids(
    buffer: ReplayBuffer, make_group: MakeGroup, make_rollout: MakeRollout
) -> None:
    for group_id in (3, 1, 2, 0):
        buffer.put(make_group(make_rollout(group_id=group_id, teacher_logprobs=SCORES, reward=1.0)))
    assert [g.group_id for g in buffer.take(3)] == [0, 1, 2]
    assert [g.group_id for g in buffer.take(3)] == [3]


def test_a_restored_buffer_holds_the_same_groups_and_no_others(
    buffer: ReplayBuffer, make_group: MakeGroup, make_rollout: MakeRollout
) -> None:
    groups = [
        make_group(make_rollout(group_id=i, teacher_logprobs=SCORES, reward=i / 3)) for i in (4, 2)
    ]
    for group in groups:
        buffer.put(group)
    later = ReplayBuffer(needs_scores=True, needs_rewards=True)
    later.put(make_group(make_rollout(group_id=9, teacher_logprobs=SCORES, reward=1.0)))
    later.restore(json.loads(json.dumps(buffer.state())))
    assert later.state() == buffer.state()
    assert later.take(9) == groups[::-1]


def test_a_restored_group_must_be_fit_to_train_too(
    buffer: ReplayBuffer, make_group: MakeGroup, make_rollout: MakeRollout
) -> None:
    buffer.put(make_group(make_rollout(teacher_logprobs=SCORES, reward=1.0)))
    (plain,) = buffer.state()
    plain["rollouts"][0]["teacher_logprobs"] = [-0.4]
    told = "state of the replay buffer: rollout 0 of group 0"
    with pytest.raises(TrainingError, match=told):
        ReplayBuffer(needs_scores=True, needs_rewards=True).restore([plain])
    with pytest.raises(TrainingError, match="state of the replay buffer: expected a group"):
        buffer.restore([3])
