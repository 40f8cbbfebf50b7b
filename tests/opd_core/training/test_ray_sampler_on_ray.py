"""Real sampling actors: killed by SIGKILL while they sample, replaced in their places."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import ray

from opd_core.config import ExperimentConfig
from opd_core.errors import SamplingError
from opd_core.sampling.protocol import Completion, SampleRequest
from opd_core.training.handles import RayLearner
from opd_core.training.placement import start_actors
from opd_core.training.ray_sampler import RaySampler
from tests.opd_core.training.whole_loop import config_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

MAX_RESTARTS = 3
REQUESTS = [
    SampleRequest((group, i), (5 + group % 8, 12, 13), 64 * group + i, 100, stop_ids=())
    for group in range(16)
    for i in range(8)
]


@dataclass(frozen=True)
class Cluster:
    sampler: RaySampler
    learner: RayLearner
    undisturbed: list[Completion]


def sampling_processes() -> list[psutil.Process]:
    """The sampling actors' processes, of this test's own Ray."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any("SamplingActor" in word for word in process.cmdline()):
                found.append(process)
    return found


async def sample_all(sampler: RaySampler) -> list[Completion]:
    async with asyncio.timeout(100):
        return list(await asyncio.gather(*map(sampler.sample, REQUESTS)))


def same(found: list[Completion], expected: list[Completion]) -> bool:
    """Equal but for the rounding that depends on a row's neighbours."""
    return [c.response_ids for c in found] == [c.response_ids for c in expected] and all(
        mine == pytest.approx(theirs, abs=1e-4)
        for mine, theirs in zip(
            (c.rollout_logprobs for c in found),
            (c.rollout_logprobs for c in expected),
            strict=True,
        )
    )


@pytest.fixture(scope="module")
def config(student_dir: Path, data_dir: Path) -> ExperimentConfig:
    return config_of(
        student_dir,
        data_dir / "rows.jsonl",
        None,
        task={"judge": "m:f", "group_size": 2},
        sampling={"actors": 2, "max_rows": 16, "max_restarts": MAX_RESTARTS},
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(config: ExperimentConfig) -> AsyncIterator[Cluster]:
    root = str(Path(__file__).parents[3])
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=3,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=80 * 2**20,
            _temp_dir=folder,
            runtime_env={"env_vars": {"PYTHONPATH": root}},
        )
        sampler, learner = await start_actors(config)
        assert sampler is not None
        yield Cluster(sampler, learner, await sample_all(sampler))
        sampler.close()
        ray.shutdown()


async def kill_during(cluster: Cluster, answers: int, rng: random.Random) -> list[Completion]:
    """Sample everything; one actor is killed after so many answers."""
    left, due = answers, asyncio.Event()

    async def one(request: SampleRequest) -> Completion:
        nonlocal left
        completion = await cluster.sampler.sample(request)
        left -= 1
        if left == 0:
            due.set()
        return completion

    tasks = [asyncio.create_task(one(request)) for request in REQUESTS]
    async with asyncio.timeout(100):
        await due.wait()
        rng.choice(sampling_processes()).kill()
        return list(await asyncio.gather(*tasks))


async def replaced(cluster: Cluster, number: int) -> None:
    """Wait until so many deaths were noticed, also of actors that had nothing to do."""
    async with asyncio.timeout(100):
        while cluster.sampler.replaced < number:
            await asyncio.sleep(0.01)
    assert cluster.sampler.replaced == number


async def test_a_killed_actor_changes_no_answer(cluster: Cluster) -> None:
    rng = random.Random(5)
    done = await kill_during(cluster, rng.randrange(1, len(REQUESTS) // 2), rng)
    assert same(done, cluster.undisturbed)
    await replaced(cluster, 1)


async def test_an_actor_killed_while_weights_are_synced_leaves_no_stale_ones(
    cluster: Cluster,
) -> None:
    for version in (1, 2):
        asked = asyncio.create_task(sample_all(cluster.sampler))
        await asyncio.sleep(0)
        syncing = asyncio.create_task(cluster.sampler.sync(cluster.learner, version))
        if version == 2:
            sampling_processes()[0].kill()
        async with asyncio.timeout(100):
            await syncing
        assert all(set(c.policy_versions) <= {version - 1} for c in await asked)
        done = await sample_all(cluster.sampler)
        assert same(done, cluster.undisturbed)  # nothing was trained
        assert {v for c in done for v in c.policy_versions} == {version}
    await replaced(cluster, 2)


async def test_when_none_is_left_everybody_is_told_at_once(cluster: Cluster) -> None:
    asked: list[asyncio.Task[Completion]] = []
    async with asyncio.timeout(100):
        while not asked or not all(task.done() for task in asked):
            for process in sampling_processes():  # the replacements as soon as they are there
                process.kill()
            asked = asked or [asyncio.create_task(cluster.sampler.sample(r)) for r in REQUESTS]
            await asyncio.wait(asked, timeout=0.05)
    said = {str(task.exception()) for task in asked}
    assert len(said) == 1
    assert said.pop().startswith(f"no sampling actor is left after {MAX_RESTARTS} replacements")
    assert cluster.sampler.replaced == MAX_RESTARTS
    with pytest.raises(SamplingError, match=f"left after {MAX_RESTARTS} replacements"):
        await cluster.sampler.sample(REQUESTS[0])
