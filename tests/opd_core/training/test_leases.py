"""Agent loops in several processes never ask for more than the teacher's limit together."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

from opd_core.errors import ConfigError, TrainingError
from opd_core.scoring.limits import FlowLimit, LeaseBook, Share
from opd_core.training.leases import LeasedLimit, start_leases

WHOLE = Share(8, 800)
SERVICE_S = 0.005
"""An answer takes so long: the loops are always short of slots, never of requests."""


class FakeLeases:
    """A lease actor whose answers are given by hand."""

    def __init__(self) -> None:
        self.renew = SimpleNamespace(remote=self._renew)
        self.asked: list[tuple[str, int, Share]] = []
        self.answer: asyncio.Future[Share] = asyncio.get_running_loop().create_future()

    def _renew(self, member: str, demand: int, in_flight: Share) -> asyncio.Future[Share]:
        self.asked.append((member, demand, in_flight))
        return self.answer


async def test_a_limit_is_closed_until_its_lease_is_there_and_tells_what_is_in_flight() -> None:
    leases, limit = FakeLeases(), FlowLimit(WHOLE)
    leased = LeasedLimit(leases, "loop-0", limit)
    assert limit.try_slot(1) is None
    leases.answer.set_result(Share(2, 200))
    assert await leased.begin_batch(64) == Share(2, 200)
    slot = limit.try_slot(30)
    assert slot is not None
    leases.answer = asyncio.get_running_loop().create_future()
    renewal = asyncio.create_task(leased.begin_batch(32))
    while len(leases.asked) < 2:
        await asyncio.sleep(0)
    assert leases.asked[1] == ("loop-0", 32, Share(1, 30))
    with slot:
        pass
    assert limit.try_slot(1) is None
    leases.answer.set_result(Share(1, 100))
    await renewal
    assert limit.try_slot(1) is not None
    assert limit.try_slot(1) is None


async def test_a_lost_lease_actor_is_told_and_the_limit_stays_closed() -> None:
    leases, limit = FakeLeases(), FlowLimit(WHOLE)
    leases.answer.set_exception(ActorDiedError())
    with pytest.raises(TrainingError, match=r"'loop-0': the lease actor, .* cannot be asked"):
        await LeasedLimit(leases, "loop-0", limit).begin_batch(64)
    assert limit.try_slot(1) is None


class CountingServer:
    """Counts the requests in flight over all clients. It answers nobody before ``gate`` requests
    are in flight together, so a limit that leaves room unused is seen as well."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.peak = 0
        self.answered = 0
        self._gate = 1
        self._opened = asyncio.Event()

    def gate(self, requests: int) -> None:
        """Start again: the next answers are given when so many are in flight."""
        self.peak, self.answered, self._gate = 0, 0, requests
        self._opened.clear()

    async def serve(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        if self.in_flight >= self._gate:
            self._opened.set()
        await self._opened.wait()
        await asyncio.sleep(SERVICE_S)
        self.in_flight -= 1  # before the client can know
        self.answered += 1
        writer.write(b"scored")
        writer.close()
        await writer.wait_closed()


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    here = str(Path(__file__).parent)  # where the workers find the loop
    root = str(Path(__file__).parents[3])
    sys.path.insert(0, here)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=80 * 2**20,
            _temp_dir=folder,
            runtime_env={"env_vars": {"PYTHONPATH": f"{root}:{here}"}},
        )
        yield
        ray.shutdown()
    sys.path.remove(here)


@pytest.fixture
async def server() -> AsyncIterator[tuple[CountingServer, int]]:
    counting = CountingServer()
    listening = await asyncio.start_server(counting.serve, "127.0.0.1", 0)
    async with listening:
        yield counting, listening.sockets[0].getsockname()[1]


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
async def test_two_loops_never_exceed_the_total_and_an_idle_one_leaves_it_to_the_other(
    server: tuple[CountingServer, int],
) -> None:
    from counted_loop import start_loop  # found once the fixture has named its folder

    counting, port = server
    leases = start_leases(LeaseBook(WHOLE, 2))
    loops = [start_loop(name, leases, port) for name in ("loop-0", "loop-1")]
    await asyncio.gather(*(loop.batch.remote(0) for loop in loops))
    for _ in range(4):  # uneven demand settles in the first batches
        counting.gate(1)
        await asyncio.gather(loops[0].batch.remote(300), loops[1].batch.remote(100))
        assert counting.answered == 400
        assert counting.peak <= WHOLE.requests
    counting.gate(WHOLE.requests)
    shares = await asyncio.gather(loops[0].batch.remote(300), loops[1].batch.remote(100))
    assert counting.peak == sum(shares) == WHOLE.requests
    assert shares[0] > shares[1] > 1
    await loops[1].batch.remote(0)
    counting.gate(WHOLE.requests - 1)
    assert await loops[0].batch.remote(300) == counting.peak == WHOLE.requests - 1


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
async def test_errors_of_the_real_lease_actor_arrive_in_plain_words() -> None:
    leases: Any = start_leases(LeaseBook(WHOLE, 1))
    leased = LeasedLimit(leases, "loop-0", FlowLimit(WHOLE))
    assert await leased.begin_batch(64) == WHOLE
    with pytest.raises(ConfigError, match="'loop-1' is one agent loop too many"):
        await LeasedLimit(leases, "loop-1", FlowLimit(WHOLE)).begin_batch(64)
    await leases.release.remote("loop-0")
    assert await LeasedLimit(leases, "loop-1", FlowLimit(WHOLE)).begin_batch(64) == WHOLE
    ray.kill(leases)
    with pytest.raises(TrainingError, match="'loop-0': the lease actor"):
        await leased.begin_batch(64)
    assert leased.limit.try_slot(1) is None
