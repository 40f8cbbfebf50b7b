"""Sampling actors that die: nothing is lost, doubled or stale."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from opd_core.errors import SamplingError
from opd_core.sampling.protocol import Completion
from tests.opd_core.training.sampler_cast import (
    ENDLESS,
    REQUESTS,
    Cast,
    Weights,
    all_of,
    ask,
    end_all,
    errors_of,
    request,
    whole,
)
from tests.opd_core.training.stepping_engine import MortalActor, tokens_of


@pytest.fixture(autouse=True)
async def the_end_of_all() -> AsyncIterator[None]:
    """Nobody steps on when a test is over."""
    yield
    end_all()


async def test_a_replacement_that_loads_while_a_sync_begins_gets_those_weights_too() -> None:
    loading, may_load = asyncio.Event(), asyncio.Event()

    class Slow(MortalActor):
        def __init__(self) -> None:
            super().__init__()
            load = self.load_weights.remote

            async def slow(*arguments: Any) -> Any:
                loading.set()
                await may_load.wait()
                return await load(*arguments)

            self.load_weights.remote = slow

    cast = Cast(MortalActor(), MortalActor(), spawned=Slow)
    sampler = cast.sampler()
    async with asyncio.timeout(20):
        await sampler.sync(Weights(), 1)
        cast.all[0].die()
        await loading.wait()
        syncing = asyncio.create_task(sampler.sync(Weights(), 2))
        for _ in range(20):
            await asyncio.sleep(0)
        may_load.set()
        await syncing
    done = await all_of(await ask(sampler, REQUESTS))
    assert {c.policy_versions for c in done} == {(2,) * 4}
    assert cast.all[2].asked
    assert sampler.replaced == 1


@pytest.mark.parametrize("seed", range(25))
async def test_deaths_at_any_moment_change_no_answer(seed: int) -> None:
    rng = random.Random(seed)
    cast = Cast(MortalActor(), MortalActor())
    sampler = cast.sampler(max_restarts=8)
    asked = [request(g, i, rng.choice([1, 40, 4000])) for g in range(6) for i in range(4)]
    tasks: list[asyncio.Task[Completion]] = []
    for part in range(0, len(asked), 6):
        tasks += await ask(sampler, asked[part : part + 6])
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
        for victim in rng.sample(cast.living, k=rng.randint(0, len(cast.living))):
            victim.die()
    done = await all_of(tasks)
    assert [c.response_ids for c in done] == [tokens_of(r) for r in asked]
    assert {c.finish_reason for c in done} == {"length"}


@pytest.mark.parametrize("seed", range(15))
async def test_deaths_around_a_sync_leave_no_stale_weights(seed: int) -> None:
    rng = random.Random(seed)
    cast = Cast(
        *(MortalActor(dies_in=rng.choice(["", "interrupt", "load_weights"])) for _ in range(3))
    )
    sampler = cast.sampler(max_restarts=12)
    asked = [request(g, tokens=rng.choice([1, 2000])) for g in range(12)]
    rollouts = [asyncio.create_task(whole(sampler, r)) for r in asked]
    for version in range(1, 4):
        for _ in range(rng.randrange(8)):
            await asyncio.sleep(0)
        if rng.random() < 0.5:
            rng.choice(cast.living).die()
        async with asyncio.timeout(20):
            await sampler.sync(Weights(), version)
        late = await all_of(await ask(sampler, [request(g) for g in range(6)]))
        assert {c.policy_versions for c in late} == {(version,) * 4}
    async with asyncio.timeout(60):
        done = await asyncio.gather(*rollouts)
    assert [tuple(ids) for ids, _ in done] == [tokens_of(r) for r in asked]


async def test_all_dead_requests_wait_for_the_replacement_and_the_living_get_them_at_once() -> None:
    starts = asyncio.Event()

    class Slow(MortalActor):
        def __init__(self) -> None:
            super().__init__()
            ready = self.ready.remote

            async def when_started() -> Any:
                await starts.wait()
                return await ready()

            self.ready.remote = when_started

    cast = Cast(MortalActor(), MortalActor(), spawned=Slow)
    sampler = cast.sampler()
    endless = await ask(sampler, [request(0, tokens=ENDLESS)])
    cast.all[0].die()
    while not cast.all[1].asked:
        await asyncio.sleep(0)
    assert [c.response_ids for c in await all_of(await ask(sampler, [request(2)]))] == [
        tokens_of(request(2))
    ]
    assert cast.all[0].asked == [[0]]
    cast.all[1].die()
    waiting = await ask(sampler, [request(g) for g in range(3)])
    while len(cast.all) < 4:
        await asyncio.sleep(0)
    starts.set()
    assert [c.response_ids for c in await all_of(waiting)] == [
        tokens_of(request(g)) for g in range(3)
    ]
    assert sampler.replaced == 2
    await sampler.sync(Weights(), 1)
    assert (await all_of(endless))[0].finish_reason == "abort"


async def test_none_left_is_told_to_everybody_with_its_cause_and_the_number() -> None:
    cast = Cast(MortalActor(), spawned=lambda: MortalActor(dies_in="submit"))
    sampler = cast.sampler(max_restarts=2)
    tasks = await ask(sampler, [request(g, tokens=ENDLESS) for g in range(4)])
    cast.all[0].die()
    (said,) = await errors_of(tasks)
    assert said.startswith(
        "no sampling actor is left after 2 replacements (sampling.max_restarts 2); the last one: "
    )
    assert "died" in said
    with pytest.raises(SamplingError, match="after 2 replacements"):
        await sampler.sample(request(0))
    with pytest.raises(SamplingError, match="after 2 replacements"):
        await sampler.sync(Weights(), 1)


async def test_the_others_go_on_when_no_replacement_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cast = Cast(MortalActor(), MortalActor())
    sampler = cast.sampler(max_restarts=0)
    cast.all[0].engine.limits = {0: 1}  # it is not done when it dies
    tasks = await ask(sampler, [request(g) for g in range(4)])
    with caplog.at_level(logging.WARNING):
        cast.all[0].die()
        done = await all_of(tasks)
    assert [c.response_ids for c in done] == [tokens_of(request(g)) for g in range(4)]
    (told,) = [r.getMessage() for r in caplog.records if r.name.endswith("ray_sampler")]
    assert told.startswith("sampling actor 0 is lost (")
    assert told.endswith("): 1 others go on")
    assert sampler.replaced == 0


async def test_a_replacement_that_never_comes_is_not_waited_for() -> None:
    class Stuck(MortalActor):
        def __init__(self) -> None:
            super().__init__()
            self.ready.remote = lambda: asyncio.get_running_loop().create_future()

    cast = Cast(MortalActor(), spawned=Stuck)
    sampler = cast.sampler(max_restarts=1, limit_s=0.01)
    tasks = await ask(sampler, [request(0, tokens=ENDLESS)])
    cast.all[0].die()
    (said,) = await errors_of(tasks)
    assert said.endswith("the last one: its replacement was not ready after 0.01 s")
    assert cast.living == []


def hanging(method: str) -> MortalActor:
    """An actor that never answers these calls."""
    actor = MortalActor()
    getattr(actor, method).remote = lambda *_: asyncio.get_running_loop().create_future()
    return actor


@pytest.mark.parametrize("method", ["interrupt", "load_weights"])
async def test_an_actor_that_hangs_in_a_sync_is_replaced(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    cast = Cast(hanging(method), MortalActor())
    sampler = cast.sampler(limit_s=0.2)
    asked = await ask(sampler, [request(g, tokens=ENDLESS) for g in range(2)])
    async with asyncio.timeout(20):
        await sampler.sync(Weights(), 1)
    assert {c.finish_reason for c in await all_of(asked)} == {"abort"}
    assert "it does not answer within 0.2 s" in caplog.text
    assert cast.all[0].dead
    done = await all_of(await ask(sampler, REQUESTS))
    assert {c.policy_versions for c in done} == {(1,) * 4}
    assert sampler.replaced == 1


async def test_a_replacement_that_hangs_while_it_loads_is_not_waited_for() -> None:
    cast = Cast(MortalActor(), spawned=lambda: hanging("load_weights"))
    sampler = cast.sampler(max_restarts=1, limit_s=0.2)
    async with asyncio.timeout(20):
        await sampler.sync(Weights(), 1)
    tasks = await ask(sampler, [request(0, tokens=ENDLESS)])
    cast.all[0].die()
    (said,) = await errors_of(tasks)
    assert said.endswith("the last one: its replacement was not ready after 0.2 s")
    assert cast.living == []


async def test_a_replacement_that_cannot_be_started_is_told() -> None:
    def refuse() -> MortalActor:
        raise ValueError("no such bundle")

    cast = Cast(MortalActor(), spawned=refuse)
    tasks = await ask(cast.sampler(), [request(0, tokens=ENDLESS)])
    cast.all[0].die()
    (said,) = await errors_of(tasks)
    assert said.endswith(
        "after 3 replacements (sampling.max_restarts 3); the last one: no such bundle"
    )


async def test_what_a_lost_actor_still_says_is_not_heard() -> None:
    away = MortalActor()
    interrupt = away.interrupt.remote

    async def unreachable(before: int) -> None:
        await interrupt(before)
        raise ActorDiedError

    away.interrupt.remote = unreachable
    away.die = lambda: None  # it is not dead yet when it is taken to be
    away.engine.limits = {0: 2}
    sampler = Cast(away).sampler()
    asked = await ask(sampler, [request(g) for g in range(3)])
    async with asyncio.timeout(20):
        await sampler.sync(Weights(), 1)
    assert {c.finish_reason for c in await all_of(asked)} == {"abort"}
    done = await all_of(await ask(sampler, REQUESTS))
    assert {c.policy_versions for c in done} == {(1,) * 4}


async def test_an_actor_that_loads_another_version_is_replaced() -> None:
    astray = MortalActor()

    async def wrong(*_: Any) -> int:
        return 7

    astray.load_weights.remote = wrong
    cast = Cast(astray, MortalActor())
    sampler = cast.sampler()
    await sampler.sync(Weights(), 1)
    assert astray.dead
    done = await all_of(await ask(sampler, REQUESTS))
    assert {c.policy_versions for c in done} == {(1,) * 4}
