"""Several servers behind one teacher: a group keeps to one, a failure goes to the next."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from opd_core.errors import TeacherAway, TeacherTransient

PROMPT, RESPONSE = [3, 4, 5], [6, 7]
THREE = [{"endpoint": f"http://{name}"} for name in ("a", "b", "c")]


async def test_a_group_keeps_to_one_replica_and_groups_are_spread(connect: Any, fake: Any) -> None:
    client = connect(replicas=THREE)
    for group_id in (0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 4):
        await client.score(PROMPT, RESPONSE, group_id=group_id)
    assert fake.hosts == [*"aaabbbccc", "a", "b"]


async def test_each_replica_is_asked_in_its_own_wire_format(connect: Any, fake: Any) -> None:
    replicas = [
        {"endpoint": "http://a", "backend": "sglang"},
        {"endpoint": "http://b", "backend": "lmdeploy"},
    ]
    client = connect(replicas=replicas)
    await client.score(PROMPT, RESPONSE, group_id=0)
    fake.backend = "lmdeploy"
    await client.score(PROMPT, RESPONSE, group_id=1)
    assert "sampling_params" in fake.bodies[0]
    assert fake.bodies[1]["max_tokens"] == 0


async def test_a_failed_attempt_goes_to_the_next_replica(connect: Any, fake: Any) -> None:
    fake.broken.add("b")
    score = await connect(replicas=THREE).score(PROMPT, RESPONSE, group_id=1)
    assert fake.hosts == ["b", "c"]
    assert score.attempts == 2


async def test_the_last_replica_is_followed_by_the_first(connect: Any, fake: Any) -> None:
    fake.broken.add("c")
    await connect(replicas=THREE).score(PROMPT, RESPONSE, group_id=2)
    assert fake.hosts == ["c", "a"]


@pytest.mark.parametrize("max_retry", [0, 1, 4])
async def test_attempts_are_bounded_over_all_replicas_together(
    max_retry: int, connect: Any, fake: Any
) -> None:
    fake.broken |= {"a", "b", "c"}
    client = connect(replicas=THREE, max_retry_per_sample=max_retry)
    with pytest.raises(TeacherTransient, match=f"given up after {1 + max_retry} attempts"):
        await client.score(PROMPT, RESPONSE)
    assert fake.hosts == [*"abcab"][: 1 + max_retry]


async def test_a_dead_replica_costs_neither_an_attempt_nor_a_wait(
    connect: Any, fake: Any, naps: Any
) -> None:
    fake.down.add("a")
    client = connect(replicas=THREE, max_retry_per_sample=0, away_limit_s=0)
    score = await client.score(PROMPT, RESPONSE, group_id=0)
    assert fake.hosts == ["a", "b"]
    assert score.attempts == 1
    assert naps == []


async def test_a_teacher_is_away_only_when_no_replica_answers(
    connect: Any, fake: Any, naps: Any
) -> None:
    fake.down |= {"a", "b", "c"}
    with pytest.raises(TeacherAway):
        await connect(replicas=THREE, away_limit_s=0).score(PROMPT, RESPONSE)
    assert fake.hosts == ["a", "b", "c"]
    assert naps == []


async def test_a_replica_that_answers_badly_is_not_away(connect: Any, fake: Any) -> None:
    fake.down |= {"b"}
    fake.broken |= {"a"}
    client = connect(replicas=THREE[:2], away_limit_s=0, max_retry_per_sample=1)
    with pytest.raises(TeacherTransient):
        await client.score(PROMPT, RESPONSE)
    assert fake.hosts == ["a", "b", "a"]


async def test_between_two_rounds_over_dead_replicas_there_is_one_wait(
    connect: Any, fake: Any
) -> None:
    fake.down |= {"a", "b", "c"}
    asked_at_wait = []

    async def come_back(_: float) -> None:
        asked_at_wait.append(len(fake.requests))
        if len(asked_at_wait) == 2:
            fake.down.clear()

    score = await connect(replicas=THREE, sleep=come_back).score(PROMPT, RESPONSE)
    assert asked_at_wait == [3, 6]
    assert score.attempts == 1


async def test_the_limit_counts_all_replicas_together(connect: Any, fake: Any) -> None:
    fake.work = lambda: asyncio.sleep(0.001)
    client = connect(replicas=THREE, max_concurrency=4)
    await asyncio.gather(*(client.score(PROMPT, RESPONSE, group_id=i) for i in range(30)))
    assert fake.most_in_flight == 4
    assert set(fake.hosts) == {"a", "b", "c"}
