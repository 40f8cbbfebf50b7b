"""The whole train loop with stale rollouts, tools and truncated answers, on real parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opd_core.errors import ActorLost
from tests.opd_core.training.test_resume import Dying
from tests.opd_core.training.whole_loop import config_of, journal, records_of, steps_of, train

STEPS, GROUPS = 6, 4


def pipelined(student: Path, data: Path, url: str | None, **changes: Any) -> Any:
    training = {"steps": STEPS, "checkpoint_every": 0} | changes.pop("training", {})
    return config_of(student, data, url, training=training, **changes)


def rollouts_of(run_dir: Path) -> dict[int, list[Any]]:
    """The rollouts that each train step trained."""
    return {r.train_step: [x for g in r.groups for x in g.rollouts] for r in records_of(run_dir)}


def assert_nothing_twice_nothing_lost(run_dir: Path) -> None:
    records = records_of(run_dir)
    trained = [group.group_id for record in records for group in record.groups]
    assert len(trained) == len(set(trained)) == STEPS * GROUPS
    state = records[-1].state
    waiting = [g["group_id"] for g in (*state["buffer"], *state["under_way"])]
    lost = sum(state["survivors"]["by_status"].values()) - len(trained)
    assert len(trained) + len(waiting) + lost == state["next_group_id"]


@pytest.mark.parametrize("staleness", [1, 2])
async def test_stale_batches_stay_within_their_bound_and_are_weighed(
    staleness: int, student_dir: Path, data: Path, teacher_url: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = pipelined(student_dir, data, teacher_url, sampling={"max_staleness": staleness})
    await train(config, run_dir)
    for step, rollouts in rollouts_of(run_dir).items():
        behind = [step - 1 - version for r in rollouts for version in r.policy_versions]
        assert 0 <= min(behind) <= max(behind) <= staleness
        assert all(len(r.policy_versions) == len(r.response_ids) for r in rollouts)
        assert all(len(r.teacher_logprobs) == len(r.response_ids) for r in rollouts)
    steps = steps_of(run_dir)
    assert max(step["staleness_max"] for step in steps) >= 1  # it did sample ahead
    assert all(0.5 < step["importance_weight_mean"] < 1.5 for step in steps)
    fresh = [step["engine_logprob_gap"] for step in steps if "engine_logprob_gap" in step]
    assert fresh  # of the first step at least
    assert max(fresh) < 1e-4
    assert steps[-1]["sampling/groups_ahead"] == 0
    assert_nothing_twice_nothing_lost(run_dir)


async def test_on_policy_no_token_is_stale_and_nothing_is_weighed(
    student_dir: Path, data: Path, teacher_url: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    over = {"over_sampling": 1.5}
    await train(pipelined(student_dir, data, teacher_url, sampling=over), run_dir)
    for step, rollouts in rollouts_of(run_dir).items():
        assert {version for r in rollouts for version in r.policy_versions} == {step - 1}
    steps = steps_of(run_dir)
    assert all(step["staleness_max"] == 0 for step in steps)
    assert not any("importance_weight_mean" in step for step in steps)
    assert_nothing_twice_nothing_lost(run_dir)


@pytest.mark.parametrize("checkpoint_every", [0, 2])
async def test_a_stale_run_that_dies_trains_no_group_twice(
    checkpoint_every: int, student_dir: Path, data: Path, teacher_url: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = pipelined(
        student_dir,
        data,
        teacher_url,
        sampling={"max_staleness": 1},
        training={"checkpoint_every": checkpoint_every, "keep_checkpoints": 99},
    )
    trained: dict[int, list[int]] = {}

    def note() -> None:
        for record in records_of(run_dir):
            ids = [group.group_id for group in record.groups]
            assert trained.setdefault(record.train_step, ids) == ids  # and never another batch

    for _ in range(2):
        with pytest.raises(ActorLost):
            await train(config, run_dir, around=lambda x: Dying(x, "update", 2, after=True))
        note()
    await train(config, run_dir)
    note()
    assert sorted(trained) == list(range(1, STEPS + 1))
    ids = [group_id for step in trained.values() for group_id in step]
    assert len(ids) == len(set(ids)) == STEPS * GROUPS
    told = [r["train_step"] for r in journal(run_dir) if "time/step_s" in r["metrics"]]
    assert told == sorted(trained)


async def test_a_tools_tokens_are_scored_with_the_trace_and_train_nothing(
    student_dir: Path, data: Path, teacher_url: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    task = {
        "tool": "opd_core.agent_loop.tools:calculator",
        "tool_stop": ["=", "a", "b", "0", "1", "2", "3"],
        "judge": "opd_core.agent_loop.judges:arithmetic",
    }
    config = pipelined(student_dir, data, teacher_url, task=task, sampling={"max_new_tokens": 24})
    await train(config, run_dir)
    answered = 0
    for rollouts, step in zip(rollouts_of(run_dir).values(), steps_of(run_dir), strict=True):
        assert step["response_tokens"] == sum(r.sampled_tokens for r in rollouts)
        for r in rollouts:
            answered += len(r.response_ids) - r.sampled_tokens
            assert len(r.teacher_logprobs) == len(r.response_ids)
            assert len(r.response_mask) in (0, len(r.response_ids))
        assert step["engine_logprob_gap"] < 1e-4
    assert answered > 0  # the calculator had something to say


@pytest.mark.parametrize("policy", ["mask", "drop"])
async def test_truncated_answers_train_nothing_and_cost_no_request(
    policy: str, student_dir: Path, data: Path, teacher_url: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = pipelined(
        student_dir,
        data,
        teacher_url,
        task={"group_size": 4, "max_groups_per_step": 99},
        training={"truncated": policy},
    )
    await train(config, run_dir)
    cut = 0
    for rollouts, step in zip(rollouts_of(run_dir).values(), steps_of(run_dir), strict=True):
        whole = [r for r in rollouts if not r.truncated]
        cut += len(rollouts) - len(whole)
        assert step["response_tokens"] == sum(len(r.response_ids) for r in whole)
        assert all(r.teacher_logprobs is None for r in rollouts if r.truncated)
        assert all(r.teacher_logprobs is not None for r in whole)
    assert cut > 0
