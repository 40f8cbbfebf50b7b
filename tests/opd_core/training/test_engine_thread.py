"""An engine in a thread: what is asked, interrupted and told from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from opd_core.errors import SamplingError
from opd_core.sampling.protocol import Completion, SampleRequest, Ticketed
from opd_core.training.engine_thread import ABORTED, EngineThread
from opd_core.training.local import LocalSampler
from tests.opd_core.training.stepping_engine import SteppingEngine, tokens_of


class Weights:
    async def weights(self) -> dict[str, object]:
        return {}


def request(seed: int, tokens: int = 4) -> SampleRequest:
    return SampleRequest((0, seed), (3,), seed, tokens)


@pytest.fixture
async def engine() -> AsyncIterator[SteppingEngine]:
    made = SteppingEngine()
    yield made
    made.ended = True


async def test_requests_that_come_while_it_decodes_join_and_all_are_handed_out(
    engine: SteppingEngine,
) -> None:
    got: dict[int, Completion] = {}
    thread = EngineThread(engine, got.update, pytest.fail)
    engine.limits = {0: 3}
    thread.submit([(0, request(10)), (1, request(20, 2))])
    async with asyncio.timeout(20):
        while 1 not in got:
            await asyncio.sleep(0)
        thread.submit([(2, request(30, 1))])
        while 2 not in got:
            await asyncio.sleep(0)
        assert 0 not in got
        engine.limits = {}
        while 0 not in got:
            await asyncio.sleep(0)
    assert engine.submissions == [[0, 1], [2]]
    assert [got[t].response_ids for t in range(3)] == [(10, 11, 12, 13), (20, 21), (30,)]


async def test_an_interruption_that_overtakes_requests_ends_them_too(
    engine: SteppingEngine,
) -> None:
    got: list[tuple[int, Completion]] = []

    def deliver(finished: Sequence[Ticketed]) -> None:
        got.extend(finished)

    thread = EngineThread(engine, deliver, pytest.fail)
    engine.limits = {0: 2}
    thread.submit([(0, request(10))])
    async with asyncio.timeout(20):
        while not engine.all_have(2):
            await asyncio.sleep(0)
        await thread.interrupt(3)
    assert [(ticket, c.response_ids, c.finish_reason) for ticket, c in got] == [
        (0, (10, 11), "abort")
    ]
    thread.submit([(1, request(20)), (3, request(30, 2)), (2, request(40))])
    async with asyncio.timeout(20):
        while len(got) < 4:
            await asyncio.sleep(0)
    assert got[1:3] == [(1, ABORTED), (2, ABORTED)]
    assert got[3][1].response_ids == (30, 31)


async def test_an_interruption_ends_requests_that_have_not_reached_the_engine(
    engine: SteppingEngine,
) -> None:
    got: dict[int, Completion] = {}
    thread = EngineThread(engine, got.update, pytest.fail)
    thread.submit([(0, request(10))])
    await thread.interrupt(1)
    assert got == {0: ABORTED}
    assert engine.submissions == []


async def test_a_local_sampler_answers_syncs_and_goes_on(engine: SteppingEngine) -> None:
    sampler = LocalSampler(engine)
    engine.limits = {0: 3}
    tasks = [asyncio.create_task(sampler.sample(request(seed, 5))) for seed in (10, 20)]
    async with asyncio.timeout(20):
        while not engine.all_have(3):
            await asyncio.sleep(0)
        await sampler.sync(Weights(), 4)
        assert await sampler.ready() == 4
        for seed, cut in zip((10, 20), await asyncio.gather(*tasks), strict=True):
            assert cut.finish_reason == "abort"
            assert cut.response_ids == tokens_of(request(seed, 3))
            assert cut.policy_versions == (0, 0, 0)
        done = await sampler.sample(request(7))
    assert (done.response_ids, done.policy_versions) == ((7, 8, 9, 10), (4,) * 4)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (SteppingEngine(error=ValueError("slot")), "sampling on cpu failed: ValueError: slot"),
        (SteppingEngine(keeps_version=True), "policy version 1 was synced last, tokens are of {0}"),
    ],
    ids=["an engine that fails", "an engine that keeps old weights"],
)
async def test_a_local_sampler_raises_what_its_engine_does_wrong(
    engine: SteppingEngine, said: str
) -> None:
    sampler = LocalSampler(engine)
    await sampler.sync(Weights(), 1)
    for _ in range(2):  # whoever waits, and whoever comes later
        with pytest.raises(SamplingError) as raised:
            await sampler.sample(request(1))
        assert str(raised.value) == said
