"""In order: everything is sampled first, then dealt with one rollout at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from opd_core.agent_loop.loop import AgentLoop, GroupRequest
from opd_core.errors import TeacherAway
from opd_core.rollout import RolloutState, Status
from opd_core.sampling.protocol import SampleRequest

MakeLoop = Callable[..., AgentLoop]
Requests = Callable[..., list[GroupRequest]]
LIMIT_S = 10
KEYS = [(group_id, index) for group_id in range(3) for index in range(2)]


@pytest.fixture
def busy(sampler: Any, scorer: Any, judge: Any) -> list[int]:
    """How many rollouts were with the scorer at once, and 99 if one came while others were sampled;
    earlier rollouts take longer."""
    seen: list[int] = []
    at_once: set[tuple[int, int]] = set()

    async def score(rollout: RolloutState) -> None:
        key = (rollout.group_id, rollout.index)
        at_once.add(key)
        seen.append(99 if sampler.streams_open else len(at_once))
        for _ in range(20 - 2 * KEYS.index(key)):
            await asyncio.sleep(0)
        at_once.remove(key)

    scorer.before = score
    return seen


@pytest.mark.parametrize("mixed", range(4))
@pytest.mark.parametrize("filtered", [False, True])
async def test_the_scorer_sees_one_at_a_time_in_the_order_of_ids(
    mixed: int,
    filtered: bool,
    make_loop: MakeLoop,
    requests_for: Requests,
    sampler: Any,
    scorer: Any,
    busy: list[int],
) -> None:
    def shuffled(requests: list[SampleRequest]) -> list[SampleRequest]:
        return random.Random(mixed).sample(requests, len(requests))

    sampler.order = shuffled
    keep = (lambda rollouts: True) if filtered else None
    groups = await make_loop(in_order=True, filter_func=keep).run(requests_for(3), train_step=1)
    assert scorer.scored == KEYS
    assert busy == [1] * 6
    assert [g.status for g in groups] == [Status.COMPLETED] * 3


@pytest.mark.parametrize("kind", ["judge", "batch_judge"])
async def test_judges_are_asked_in_the_order_of_ids(
    kind: str, make_loop: MakeLoop, requests_for: Requests, sampler: Any, judge: Any, busy: Any
) -> None:
    sampler.order = lambda requests: requests[::-1]
    await make_loop(in_order=True, **{kind: judge}).run(requests_for(3), train_step=1)
    one_by_one = [f"{10 + group_id} {10 + index} 1" for group_id, index in KEYS]
    assert judge.seen == (one_by_one if kind == "judge" else [])
    together = [[(r.group_id, r.index) for r in batch] for batch in judge.batches]
    assert together == ([] if kind == "judge" else [KEYS[:2], KEYS[2:4], KEYS[4:]])


async def test_the_groups_are_the_same_as_without_order(
    make_loop: MakeLoop, requests_for: Requests, sampler: Any, scorer: Any, judge: Any
) -> None:
    scorer.fails.add((2, 1))
    usual = await make_loop(judge=judge).run(requests_for(4), train_step=1)
    sampler.order = lambda requests: requests[::-1]
    ordered = await make_loop(judge=judge, in_order=True).run(requests_for(4), train_step=1)
    assert ordered == usual
    assert [g.status for g in ordered] == [
        Status.COMPLETED, Status.COMPLETED, Status.FAILED, Status.COMPLETED,
    ]  # fmt: skip


async def test_groups_of_higher_ids_come_later_even_if_they_were_requested_first(
    make_loop: MakeLoop, requests_for: Requests, scorer: Any
) -> None:
    groups = await make_loop(in_order=True).run(requests_for(3)[::-1], train_step=1)
    assert scorer.scored == KEYS
    assert [g.group_id for g in groups] == [2, 1, 0]


async def test_a_teacher_that_is_away_ends_the_call_at_once(
    make_loop: MakeLoop, requests_for: Requests, scorer: Any
) -> None:
    async def away(rollout: RolloutState) -> None:
        if rollout.group_id == 1:
            raise TeacherAway("teacher 'big': cannot connect", "away")

    scorer.before = away
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(TeacherAway, match="teacher 'big'"):
            await make_loop(in_order=True).run(requests_for(3), train_step=1)
    assert scorer.scored == [(0, 0), (0, 1), (1, 0)]
