"""Sampling actors behind one name: what is asked, synced and told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from opd_core.errors import SamplingError
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
from tests.opd_core.training.stepping_engine import MortalActor, SteppingEngine, tokens_of


@pytest.fixture(autouse=True)
async def the_end_of_all() -> AsyncIterator[None]:
    """Nobody steps on when a test is over."""
    yield
    end_all()


async def test_what_is_asked_in_one_turn_is_one_call_in_its_order_and_groups_keep_together() -> (
    None
):
    cast = Cast(MortalActor(), MortalActor(), MortalActor())
    tasks = await ask(cast.sampler(), REQUESTS)
    assert [c.response_ids for c in await all_of(tasks)] == [tokens_of(r) for r in REQUESTS]
    assert [actor.asked for actor in cast.all] == [[[0, 1, 6, 7]], [[2, 3, 8, 9]], [[4, 5]]]


async def test_a_rollout_that_is_interrupted_goes_on_with_the_new_weights() -> None:
    cast = Cast(MortalActor(), MortalActor())
    sampler = cast.sampler()
    asked = [request(group, index, tokens=10) for group in range(2) for index in range(3)]
    limits = {0: 3, 1: 7}
    for actor in cast.all:
        actor.engine.limits = limits
    rollouts = [asyncio.create_task(whole(sampler, r)) for r in asked]
    async with asyncio.timeout(20):
        for version, tokens in limits.items():
            while not all(actor.engine.all_have(tokens) for actor in cast.all):
                await asyncio.sleep(0)
            await sampler.sync(Weights(), version + 1)
            assert await sampler.ready() == version + 1
        done = await asyncio.gather(*rollouts)
    for wanted, (ids, versions) in zip(asked, done, strict=True):
        assert tuple(ids) == tokens_of(wanted)
        assert versions == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]


async def test_nobody_samples_while_weights_are_loaded() -> None:
    loading, may_load = asyncio.Event(), asyncio.Event()
    actor = MortalActor()
    load = actor.load_weights.remote

    async def slow(*arguments: Any) -> Any:
        loading.set()
        await may_load.wait()
        return await load(*arguments)

    actor.load_weights.remote = slow
    sampler = Cast(actor).sampler()
    syncing = asyncio.create_task(sampler.sync(Weights(), 1))
    await loading.wait()
    ready = asyncio.create_task(sampler.ready())
    (asked,) = await ask(sampler, [request(0)])
    assert not ready.done()
    assert actor.asked == []
    may_load.set()
    assert (await all_of([asked]))[0].policy_versions == (1,) * 4
    assert await ready == 1
    await syncing


async def test_weights_are_loaded_when_all_that_the_old_ones_sampled_is_there() -> None:
    actor = MortalActor()
    actor.engine.limits = {0: 2}
    actor.heard.clear()
    sampler = Cast(actor).sampler()
    asked = await ask(sampler, [request(g) for g in range(3)])
    async with asyncio.timeout(20):
        while not actor.engine.all_have(2):
            await asyncio.sleep(0)
        syncing = asyncio.create_task(sampler.sync(Weights(), 1))
        while not actor.engine.idle:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert actor.engine.policy_version == 0
        actor.heard.set()
        await syncing
    assert {c.policy_versions for c in await all_of(asked)} == {(0, 0)}
    assert actor.engine.policy_version == 1
    assert sampler.replaced == 0


async def test_tokens_of_other_weights_are_never_taken() -> None:
    cast = Cast(MortalActor(SteppingEngine(keeps_version=True)))
    sampler = cast.sampler()
    await sampler.sync(Weights(), 1)
    done = await all_of(await ask(sampler, REQUESTS))
    assert {c.policy_versions for c in done} == {(1,) * 4}
    assert cast.all[0].dead
    assert sampler.replaced == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SamplingError("no room for 9 rows"), "no room for 9 rows"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore"),
            "out of memory on cpu while sampling (DefaultCPUAllocator: can't allocate memory): "
            "lower sampling.max_rows (now 64) or sampling.max_new_tokens",
        ),
    ],
)
async def test_an_error_of_an_engine_is_everybodys_at_once(error: Exception, said: str) -> None:
    cast = Cast(MortalActor(), MortalActor(SteppingEngine(error=error)))
    sampler = cast.sampler()
    tasks = await ask(sampler, [request(g, tokens=ENDLESS) for g in range(4)])
    assert await errors_of(tasks) == {said}
    assert sampler.replaced == 0
    with pytest.raises(SamplingError):
        await sampler.ready()


async def test_an_error_that_is_none_of_ours_costs_the_actor_only() -> None:
    broken = MortalActor(SteppingEngine(error=KeyError("slot")))
    cast = Cast(broken, MortalActor())
    sampler = cast.sampler()
    done = await all_of(await ask(sampler, REQUESTS))
    assert [c.response_ids for c in done] == [tokens_of(r) for r in REQUESTS]
    assert broken.dead
    assert sampler.replaced == 1


async def test_an_error_that_comes_in_every_actor_ends_with_its_words() -> None:
    def broken() -> MortalActor:
        return MortalActor(SteppingEngine(error=KeyError("slot")))

    sampler = Cast(broken(), spawned=broken).sampler(max_restarts=2)
    (said,) = await errors_of(await ask(sampler, [request(g, tokens=ENDLESS) for g in range(4)]))
    assert said.startswith("no sampling actor is left after 2 replacements")
    assert said.endswith("sampling on cpu failed: KeyError: 'slot'")


async def test_weights_that_do_not_fit_end_the_sync_and_all_who_wait_for_it() -> None:
    actor = MortalActor()

    def refuse(*_: Any) -> None:
        raise SamplingError("they do not fit")

    actor.engine.load_weights = refuse
    sampler = Cast(actor).sampler()
    syncing = asyncio.create_task(sampler.sync(Weights(), 1))
    (waiting,) = await ask(sampler, [request(0)])
    with pytest.raises(SamplingError, match="they do not fit"):
        await syncing
    assert (
        (await all_of([waiting]))[0].policy_versions in {(0,) * 4}
        if waiting.exception() is None
        else True
    )


async def test_a_caller_that_is_cancelled_leaves_nothing_behind() -> None:
    cast = Cast(MortalActor())
    sampler = cast.sampler()
    sent, kept = await ask(sampler, [request(0, tokens=ENDLESS), request(1, tokens=30_000)])
    unsent = asyncio.create_task(sampler.sample(request(2, tokens=ENDLESS)))
    await asyncio.sleep(0)
    for task in (sent, unsent):
        task.cancel()
    assert len((await all_of([kept]))[0].response_ids) == 30_000
    assert cast.all[0].asked == [[0, 1]]
    async with asyncio.timeout(20):
        await sampler.sync(Weights(), 1)
    (done,) = await all_of(await ask(sampler, [request(3)]))
    assert done.policy_versions == (1,) * 4
