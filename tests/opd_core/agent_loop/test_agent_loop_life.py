"""The life of a group: when it is sampled, scored, judged and filtered, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from opd_core.agent_loop.loop import AgentLoop, GroupRequest
from opd_core.errors import SamplingError, TeacherAway
from opd_core.rollout import RolloutState, Status
from opd_core.sampling.protocol import SampleRequest

MakeLoop = Callable[..., AgentLoop]
Requests = Callable[..., list[GroupRequest]]
LIMIT_S = 10


def other_tasks() -> set[asyncio.Task[Any]]:
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}


# ------------------------------------------------------------------------------------- plain course


async def test_every_rollout_of_a_group_is_sampled_and_scored(
    make_loop: MakeLoop, requests_for: Requests, scorer: Any
) -> None:
    (group,) = await make_loop(group_size=3).run(requests_for(1), train_step=1)
    assert group.status is Status.COMPLETED
    assert [r.index for r in group.rollouts] == [0, 1, 2]
    assert sorted(scorer.scored) == [(0, 0), (0, 1), (0, 2)]
    rollout = group.rollouts[1]
    assert rollout.status is Status.COMPLETED
    assert rollout.response_ids == (10, 11, 1)
    assert rollout.rollout_logprobs == (-0.5, -0.5, -0.1)
    assert rollout.teacher_logprobs == (-1.0, -1.0, -1.0)
    assert rollout.text == "10 11 1"
    assert rollout.finish_reason == "length"
    assert rollout.truncated
    assert rollout.policy_versions == (4, 4, 4)
    assert rollout.response_mask == ()  # all of it is the student's
    assert rollout.reward is None  # pure OPD needs no judge


async def test_without_a_scorer_groups_complete_unscored(
    make_loop: MakeLoop, requests_for: Requests, judge: Any
) -> None:
    (group,) = await make_loop(scorer=None, judge=judge).run(requests_for(1), train_step=1)
    assert group.status is Status.COMPLETED
    assert [r.teacher_logprobs for r in group.rollouts] == [None, None]
    assert [r.reward for r in group.rollouts] == [1.0, 1.0]


async def test_the_end_token_stays_in_the_response(
    make_loop: MakeLoop, requests_for: Requests
) -> None:
    (group,) = await make_loop().run(requests_for(1), train_step=1)
    assert {r.response_ids[-1] for r in group.rollouts} == {1}
    assert {len(r.teacher_logprobs or ()) for r in group.rollouts} == {3}


async def test_no_requests_give_no_groups(make_loop: MakeLoop) -> None:
    assert await make_loop().run([], train_step=1) == []


@pytest.mark.parametrize("mix", ["forwards", "backwards", "interleaved"])
async def test_the_order_of_groups_does_not_depend_on_the_order_of_completion(
    mix: str, make_loop: MakeLoop, requests_for: Requests, sampler: Any, scorer: Any
) -> None:
    async def slow_first_groups(rollout: RolloutState) -> None:
        for _ in range(20 - 4 * rollout.group_id):
            await asyncio.sleep(0)

    orders: dict[str, Any] = {
        "forwards": lambda r: r,
        "backwards": lambda r: r[::-1],
        "interleaved": lambda r: r[::2] + r[1::2],
    }
    sampler.order = orders[mix]
    scorer.before = slow_first_groups
    groups = await make_loop(group_size=3).run(requests_for(4), train_step=1)
    assert [g.group_id for g in groups] == [0, 1, 2, 3]
    assert [[r.index for r in g.rollouts] for g in groups] == [[0, 1, 2]] * 4
    assert [g.rollouts[2].response_ids for g in groups] == [(10 + g, 12, 1) for g in range(4)]


async def test_every_rollout_gets_its_own_seed_and_the_plain_policy(
    make_loop: MakeLoop, requests_for: Requests, sampler: Any
) -> None:
    await make_loop(group_size=3).run(requests_for(4), train_step=1)
    (asked,) = sampler.calls
    assert len({r.seed for r in asked}) == 12
    assert {r.temperature for r in asked} == {1.0}
    assert {r.max_new_tokens for r in asked} == {3}
    assert {r.token_ids for r in asked} == {(3, 4, 5)}


async def test_seeds_depend_on_run_step_row_and_try_but_not_on_the_group_id(
    make_loop: MakeLoop, make_prompt: Any, sampler: Any
) -> None:
    async def seeds(
        *, seed: int = 7, step: int = 1, row: int = 0, tries: int = 0, group_id: int = 0
    ) -> tuple[int, ...]:
        request = GroupRequest(group_id, make_prompt(row), tries)
        await make_loop(seed=seed).run([request], step)
        return tuple(r.seed for r in sampler.calls[-1])

    usual = await seeds()
    assert await seeds() == usual
    assert await seeds(group_id=5) == usual
    others = [await seeds(seed=8), await seeds(step=2), await seeds(row=1), await seeds(tries=1)]
    assert len({usual, *others}) == 5


# -------------------------------------------------------------------------------- overlap and order


async def test_a_rollout_is_scored_before_its_siblings_are_sampled(
    make_loop: MakeLoop, requests_for: Requests, sampler: Any, scorer: Any
) -> None:
    first_is_scored = asyncio.Event()

    async def wait_for_the_first_score(request: SampleRequest) -> None:
        if request.key != (0, 0):
            await first_is_scored.wait()

    async def tell(rollout: RolloutState) -> None:
        first_is_scored.set()

    sampler.before = wait_for_the_first_score
    scorer.before = tell
    async with asyncio.timeout(LIMIT_S):
        (group,) = await make_loop(group_size=3).run(requests_for(1), train_step=1)
    assert group.status is Status.COMPLETED


async def test_a_group_is_finished_while_another_is_still_sampled(
    make_loop: MakeLoop, requests_for: Requests, sampler: Any, judge: Any
) -> None:
    first_group_is_judged = asyncio.Event()

    async def wait(request: SampleRequest) -> None:
        if request.key[0] == 1:
            await first_group_is_judged.wait()

    async def tell(_: object) -> None:
        first_group_is_judged.set()

    sampler.before = wait
    judge.before = tell
    async with asyncio.timeout(LIMIT_S):
        groups = await make_loop(batch_judge=judge).run(requests_for(2), train_step=1)
    assert [g.status for g in groups] == [Status.COMPLETED] * 2


async def test_a_per_sample_judge_runs_beside_scoring(
    make_loop: MakeLoop, requests_for: Requests, scorer: Any, judge: Any
) -> None:
    scoring, judging = asyncio.Event(), asyncio.Event()

    async def score(rollout: RolloutState) -> None:
        scoring.set()
        await judging.wait()

    async def judge_it(_: object) -> None:
        judging.set()
        await scoring.wait()

    scorer.before, judge.before = score, judge_it
    async with asyncio.timeout(LIMIT_S):
        (group,) = await make_loop(judge=judge).run(requests_for(1), train_step=1)
    assert [r.reward for r in group.rollouts] == [1.0, 1.0]
    assert all(r.teacher_logprobs for r in group.rollouts)


async def test_a_batch_judge_comes_after_all_scores(
    make_loop: MakeLoop, requests_for: Requests, judge: Any, log: list[Any]
) -> None:
    judge.reward = lambda text, prompt: float(text.split()[1])  # 10 + index
    (group,) = await make_loop(group_size=3, batch_judge=judge).run(requests_for(1), train_step=1)
    assert [what for what, _ in log] == ["score"] * 3 + ["judge together"]
    assert all(r.teacher_logprobs for r in judge.batches[0])
    assert [r.index for r in judge.batches[0]] == [0, 1, 2]
    assert [r.reward for r in group.rollouts] == [10.0, 11.0, 12.0]
    assert all(r.teacher_logprobs for r in group.rollouts)


@pytest.mark.parametrize("kind", ["judge", "batch_judge"])
async def test_with_a_filter_nothing_is_scored_before_it_has_passed(
    kind: str, make_loop: MakeLoop, requests_for: Requests, judge: Any, log: list[Any]
) -> None:
    def keep_all(rollouts: tuple[RolloutState, ...]) -> bool:
        log.append(("filter", rollouts[0].group_id))
        assert [r.reward for r in rollouts] == [1.0, 1.0, 1.0]
        assert [r.index for r in rollouts] == [0, 1, 2]
        return True

    loop = make_loop(group_size=3, filter_func=keep_all, **{kind: judge})
    (group,) = await loop.run(requests_for(1), train_step=1)
    judged = ["judge"] * 3 if kind == "judge" else ["judge together"]
    assert [what for what, _ in log] == [*judged, "filter", *["score"] * 3]
    assert group.status is Status.COMPLETED
    assert all(r.teacher_logprobs for r in group.rollouts)
    assert [r.index for r in group.rollouts] == [0, 1, 2]


async def test_a_filter_works_without_a_teacher_and_without_a_judge(
    make_loop: MakeLoop, requests_for: Requests
) -> None:
    loop = make_loop(scorer=None, filter_func=lambda rollouts: rollouts[0].group_id == 1)
    groups = await loop.run(requests_for(2), train_step=1)
    assert [g.status for g in groups] == [Status.FILTERED, Status.COMPLETED]


# ----------------------------------------------------------------------------------- how groups end


async def test_a_filtered_group_costs_no_teacher_request(
    make_loop: MakeLoop, requests_for: Requests, judge: Any, scorer: Any
) -> None:
    loop = make_loop(judge=judge, filter_func=lambda rollouts: rollouts[0].group_id == 1)
    groups = await loop.run(requests_for(2), train_step=1)
    assert [g.status for g in groups] == [Status.FILTERED, Status.COMPLETED]
    assert {r.status for r in groups[0].rollouts} == {Status.FILTERED}
    assert groups[0].cause == "filtered"
    assert sorted(scorer.scored) == [(1, 0), (1, 1)]


async def test_one_failed_score_fails_the_group_with_its_reason(
    make_loop: MakeLoop, requests_for: Requests, scorer: Any
) -> None:
    scorer.fails.add((0, 1))
    groups = await make_loop(group_size=3).run(requests_for(2), train_step=1)
    assert [g.status for g in groups] == [Status.FAILED, Status.COMPLETED]
    assert groups[0].cause == "http_503"
    assert groups[0].error_msg == "teacher 'big': HTTP 503"
    assert [r.status for r in groups[0].rollouts] == [
        Status.COMPLETED,
        Status.FAILED,
        Status.COMPLETED,
    ]


async def test_a_group_with_a_failed_member_is_not_judged_together(
    make_loop: MakeLoop, requests_for: Requests, scorer: Any, judge: Any
) -> None:
    scorer.fails.add((0, 0))
    (group,) = await make_loop(batch_judge=judge).run(requests_for(1), train_step=1)
    assert group.status is Status.FAILED
    assert judge.batches == []
    assert [r.reward for r in group.rollouts] == [None, None]


async def test_a_group_with_an_unjudged_member_is_neither_filtered_nor_scored(
    make_loop: MakeLoop, requests_for: Requests, scorer: Any, judge: Any, log: list[Any]
) -> None:
    judge.error = "no truth"
    loop = make_loop(judge=judge, filter_func=lambda rollouts: log.append(("filter", 0)) or True)
    (group,) = await loop.run(requests_for(1), train_step=1)
    assert (group.status, group.cause, group.error_msg) == (Status.FAILED, "judge", "no truth")
    assert scorer.scored == []
    assert ("filter", 0) not in log


@pytest.mark.parametrize("kind", ["judge", "batch_judge"])
async def test_a_judge_that_fails_is_a_reason_and_not_a_reward_of_0(
    kind: str, make_loop: MakeLoop, requests_for: Requests, judge: Any
) -> None:
    judge.error = "ValueError: row 0 has no truth"
    (group,) = await make_loop(**{kind: judge}).run(requests_for(1), train_step=1)
    assert group.status is Status.FAILED
    assert group.cause == "judge"
    assert group.error_msg == "ValueError: row 0 has no truth"
    assert [r.reward for r in group.rollouts] == [None, None]


async def test_when_score_and_judge_both_fail_the_teachers_reason_is_kept(
    make_loop: MakeLoop, requests_for: Requests, scorer: Any, judge: Any
) -> None:
    scorer.fails |= {(0, 0), (0, 1)}
    judge.error = "no truth"
    (group,) = await make_loop(judge=judge).run(requests_for(1), train_step=1)
    assert {(r.status, r.cause) for r in group.rollouts} == {(Status.FAILED, "http_503")}


async def test_a_filter_that_raises_fails_its_group_only(
    make_loop: MakeLoop, requests_for: Requests, scorer: Any
) -> None:
    def fussy(rollouts: tuple[RolloutState, ...]) -> bool:
        if rollouts[0].group_id == 0:
            raise ZeroDivisionError("no spread")
        return True

    groups = await make_loop(filter_func=fussy).run(requests_for(2), train_step=1)
    assert [g.status for g in groups] == [Status.FAILED, Status.COMPLETED]
    assert groups[0].cause == "filter_func"
    assert groups[0].error_msg == "filter_func raised ZeroDivisionError: no spread"
    assert {key[0] for key in scorer.scored} == {1}


async def test_a_score_that_fails_after_the_filter_fails_the_group(
    make_loop: MakeLoop, requests_for: Requests, scorer: Any
) -> None:
    scorer.fails.add((0, 1))
    loop = make_loop(filter_func=lambda rollouts: True)
    (group,) = await loop.run(requests_for(1), train_step=1)
    assert (group.status, group.cause) == (Status.FAILED, "http_503")


# --------------------------------------------------------------------------- errors that end it all


@pytest.mark.parametrize("filtered", [False, True])
async def test_a_teacher_that_is_away_cancels_everything(
    filtered: bool, make_loop: MakeLoop, requests_for: Requests, sampler: Any, scorer: Any
) -> None:
    async def hang_after_two_groups(request: SampleRequest) -> None:
        if request.key[0] == 2:
            await asyncio.Event().wait()

    async def away(rollout: RolloutState) -> None:
        if rollout.group_id == 1:
            raise TeacherAway("teacher 'big': cannot connect", "away")
        await asyncio.Event().wait()

    sampler.before, scorer.before = hang_after_two_groups, away
    loop = make_loop(filter_func=(lambda rollouts: True) if filtered else None)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(TeacherAway, match="teacher 'big'"):
            await loop.run(requests_for(3), train_step=1)
    assert sampler.streams_open == 0
    assert other_tasks() == set()


async def test_a_teacher_that_is_away_leaves_no_judgement_running(
    make_loop: MakeLoop, requests_for: Requests, scorer: Any, judge: Any
) -> None:
    judging = asyncio.Event()
    cancelled = []

    async def think_for_ever(text: object) -> None:
        judging.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(text)
            raise

    async def away(rollout: RolloutState) -> None:
        await judging.wait()
        raise TeacherAway("teacher 'big': cannot connect", "away")

    judge.before, scorer.before = think_for_ever, away
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(TeacherAway):
            await make_loop(group_size=1, judge=judge).run(requests_for(1), train_step=1)
    assert cancelled == ["10 10 1"]
    assert other_tasks() == set()


async def test_an_engine_that_is_lost_ends_the_call_with_its_error(
    make_loop: MakeLoop, requests_for: Requests, sampler: Any, scorer: Any
) -> None:
    async def hang(_: object) -> None:
        await asyncio.Event().wait()

    sampler.error = SamplingError("every sampling actor was lost")
    sampler.omit.add((1, 1))
    scorer.before = hang
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(SamplingError, match="actor was lost"):
            await make_loop().run(requests_for(2), train_step=1)
    assert other_tasks() == set()


async def test_a_cancelled_call_leaves_no_task(
    make_loop: MakeLoop, requests_for: Requests, sampler: Any, scorer: Any
) -> None:
    scoring = asyncio.Event()

    async def hang(_: object) -> None:
        scoring.set()
        await asyncio.Event().wait()

    scorer.before = hang
    call = asyncio.create_task(make_loop().run(requests_for(2), train_step=1))
    await scoring.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert other_tasks() == set()
    assert sampler.streams_open == 0


async def test_a_loop_can_be_used_again_after_an_error(
    make_loop: MakeLoop, requests_for: Requests, sampler: Any
) -> None:
    loop = make_loop()
    sampler.error = SamplingError("lost")
    sampler.omit.add((0, 0))
    with pytest.raises(SamplingError):
        await loop.run(requests_for(1), train_step=1)
    sampler.omit.clear()
    (group,) = await loop.run(requests_for(1), train_step=1)
    assert group.status is Status.COMPLETED
    assert loop.sampling.seconds > 0
