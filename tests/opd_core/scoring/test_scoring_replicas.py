"""Several servers behind one teacher: a group keeps to one, a failure goes to the next."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from opd_core.errors import TeacherAway, TeacherTransient
from opd_core.scoring.facts import TeacherFacts
from opd_core.scoring.replicas import KNOCK_EVERY_S

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


def never(_: float) -> Any:
    """A sleep that does not end."""
    return asyncio.Event().wait()


async def test_a_dead_replica_costs_neither_an_attempt_nor_a_wait(connect: Any, fake: Any) -> None:
    fake.down.add("a")
    client = connect(replicas=THREE, max_retry_per_sample=0, away_limit_s=0, sleep=never)
    score = await client.score(PROMPT, RESPONSE, group_id=0)
    assert fake.hosts == ["a", "b"]
    assert score.attempts == 1


async def test_a_dead_replica_is_not_asked_again_before_a_knock_is_answered(
    connect: Any, fake: Any
) -> None:
    fake.down.add("a")
    client = connect(replicas=THREE, sleep=never)
    for _ in range(3):
        await client.score(PROMPT, RESPONSE, group_id=0)
    assert fake.hosts == ["a", "b", "b", "b"]


async def test_a_replica_that_recovers_comes_back(connect: Any, fake: Any) -> None:
    fake.down.add("a")
    client = connect(replicas=THREE)
    await client.score(PROMPT, RESPONSE, group_id=0)
    fake.down.clear()
    while client.replicas.all[0].away:
        await asyncio.sleep(0)
    await client.score(PROMPT, RESPONSE, group_id=0)
    assert fake.hosts[-1] == "a"


async def test_knocks_are_made_one_at_a_time(connect: Any, fake: Any) -> None:
    fake.down.add("a")
    client = connect(replicas=THREE)
    await asyncio.gather(*(client.score(PROMPT, RESPONSE, group_id=0) for _ in range(20)))
    knocking = asyncio.Event()
    knocks = 0

    async def hang() -> None:
        nonlocal knocks
        knocks += 1
        knocking.set()
        await asyncio.Event().wait()

    fake.work = hang
    fake.down.clear()
    await knocking.wait()
    for _ in range(50):
        await asyncio.sleep(0)
    assert knocks == 1


async def test_a_replica_that_keeps_failing_is_away_until_it_scores(
    connect: Any, fake: Any
) -> None:
    fake.broken.add("a")
    client = connect(replicas=THREE[:2], sleep=lambda _: asyncio.sleep(0))
    for _ in range(5):
        await client.score(PROMPT, RESPONSE, group_id=0)
    assert "HTTP 500" in client.replicas.all[0].away
    fake.broken.clear()
    while client.replicas.all[0].away:
        await asyncio.sleep(0)


async def test_a_replica_that_moved_is_found_where_it_is_now(connect: Any, fake: Any) -> None:
    fake.down.add("a")
    facts = TeacherFacts(100, endpoints=("http://new-a", "http://b", "http://c"))
    client = connect(replicas=THREE, current_facts=lambda: facts)
    await client.score(PROMPT, RESPONSE, group_id=0)
    while client.replicas.all[0].away:
        await asyncio.sleep(0)
    await client.score(PROMPT, RESPONSE, group_id=0)
    assert fake.hosts[-1] == "new-a"


LONG = [3 + i % 90 for i in range(40)]


async def test_the_first_of_a_group_goes_ahead_and_the_others_follow_together(
    connect: Any, fake: Any
) -> None:
    client = connect()
    answered = asyncio.Event()
    fake.work = answered.wait
    siblings = [asyncio.create_task(client.score(LONG, [6, 7 + i], group_id=1)) for i in range(4)]
    other_group = asyncio.create_task(client.score(LONG, [6, 7], group_id=2))
    for _ in range(20):
        await asyncio.sleep(0)
    assert [body["input_ids"][-1] for body in fake.bodies] == [7, 7]
    follow = asyncio.Event()
    fake.work = follow.wait
    answered.set()
    while fake.in_flight < 3:  # all that waited, together
        await asyncio.sleep(0)
    follow.set()
    await asyncio.gather(other_group, *siblings)


async def test_siblings_do_not_wait_for_one_whose_teacher_is_away(connect: Any, fake: Any) -> None:
    fake.down.add("one")
    away: list[int] = []
    client = connect(away_limit_s=0, sleep=never)
    scores = [
        client.score(LONG, [6, 7], group_id=1, on_away=lambda i=i: away.append(i)) for i in range(3)
    ]
    for result in await asyncio.gather(*scores, return_exceptions=True):
        assert isinstance(result, TeacherAway)
    assert away == [0, 1, 2]


async def test_late_siblings_wait_for_nobody(connect: Any, fake: Any) -> None:
    client = connect()
    await client.score(LONG, [6, 7], group_id=1)
    fake.work = asyncio.Event().wait
    late = [asyncio.create_task(client.score(LONG, [6, 8 + i], group_id=1)) for i in range(3)]
    while fake.in_flight < 3:
        await asyncio.sleep(0)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)


async def test_siblings_wait_for_the_first_try_only(connect: Any, fake: Any) -> None:
    client = connect(sleep=never)  # the first one's back-off does not end
    fake.script.append(503)
    first = asyncio.create_task(client.score(LONG, [6, 7], group_id=1))
    siblings = [client.score(LONG, [6, 8 + i], group_id=1) for i in range(3)]
    assert all(score.attempts == 1 for score in await asyncio.gather(*siblings))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_short_prompts_are_not_waited_for(connect: Any, fake: Any) -> None:
    client = connect()
    fake.work = asyncio.Event().wait
    tasks = [asyncio.create_task(client.score(PROMPT, RESPONSE, group_id=1)) for _ in range(4)]
    while fake.in_flight < 4:
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_teacher_is_away_only_when_no_replica_answers(connect: Any, fake: Any) -> None:
    fake.down |= {"a", "b", "c"}
    with pytest.raises(TeacherAway, match=r"http://a: .*http://b: .*http://c: "):
        await connect(replicas=THREE, away_limit_s=0, sleep=never).score(PROMPT, RESPONSE)
    assert fake.hosts == ["a", "b", "c"]


async def test_a_replica_that_answers_badly_once_is_not_away(connect: Any, fake: Any) -> None:
    fake.down |= {"b"}
    fake.broken |= {"a"}
    client = connect(
        replicas=THREE[:2],
        away_limit_s=0,
        max_retry_per_sample=1,
        sleep=lambda s: never(s) if s == KNOCK_EVERY_S else asyncio.sleep(0),
    )
    with pytest.raises(TeacherTransient):
        await client.score(PROMPT, RESPONSE)
    assert fake.hosts == ["a", "b", "a"]


async def test_the_first_replica_that_comes_back_is_asked(connect: Any, fake: Any) -> None:
    fake.down |= {"a", "b", "c"}
    waits = 0

    async def come_back(_: float) -> None:
        nonlocal waits
        waits += 1
        if waits == 6:
            fake.down.remove("b")
        await asyncio.sleep(0)

    score = await connect(replicas=THREE, sleep=come_back).score(PROMPT, RESPONSE)
    answered = [
        request.url.host
        for request, body in zip(fake.requests, fake.bodies, strict=True)
        if body["input_ids"] == PROMPT + RESPONSE
    ]
    assert answered == ["a", "b", "c", "b"]
    assert score.attempts == 1


async def test_the_limit_counts_all_replicas_together(connect: Any, fake: Any) -> None:
    fake.work = lambda: asyncio.sleep(0.001)
    client = connect(replicas=THREE, max_concurrency=4)
    await asyncio.gather(*(client.score(PROMPT, RESPONSE, group_id=i) for i in range(30)))
    assert fake.most_in_flight == 4
    assert set(fake.hosts) == {"a", "b", "c"}
