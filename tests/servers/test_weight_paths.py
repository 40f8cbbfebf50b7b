"""Weights pushed to a real server are those it computes with, whichever way they came."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
import torch

from opd_core.config import Backend
from opd_core.lifecycle.errors import ChildDied
from opd_core.sampling.server_calls import StudentServer
from opd_core.sampling.weight_paths import WeightPath
from opd_core.scoring.proof import TOLERANCE
from opd_core.serving.commands import START_RACE
from opd_core.serving.readiness import wait_until_healthy
from opd_core.training.learner import Learner
from opd_core.training.local import LocalLearner
from opd_core.training.weight_buckets import Bucket, HeldWeights
from opd_core.training.weight_push import DistributedPath, TensorPath
from tests.opd_core.training.engine import learner_of

from .conftest import KEY, MODEL, STARTUP_LIMIT_S, Measure, Server, interpreter, report_of

VOCAB_SIZE = 32
BUCKET_BYTES = 40_000
"""So that the tiny model makes many buckets."""
PATHS = {"by handle": TensorPath, "in a group": DistributedPath}

pytestmark = [
    pytest.mark.timeout(2 * STARTUP_LIMIT_S),
    pytest.mark.slow,
    pytest.mark.servers,
    pytest.mark.parametrize("backend", ["sglang", "lmdeploy"], indirect=True, scope="session"),
]


class SmallBuckets(LocalLearner):
    """A learner that hands out little at a time; its weights can be moved."""

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        self._own = learner

    def move(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for parameter in self._own.model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)

    def logprobs_after(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = self._own.model.eval()(input_ids=torch.tensor([ids])).logits[0, :-1]
        following = torch.tensor(ids[1:])[:, None]
        logprobs: torch.Tensor = logits.log_softmax(-1).gather(-1, following)[:, 0]
        return logprobs

    async def hold_weights(self) -> tuple[Bucket, ...]:
        weights = await asyncio.to_thread(self._own.served_weights)
        self._held = HeldWeights(weights, self._own.device, BUCKET_BYTES)
        assert len(self._held.buckets) > 5
        return self._held.buckets


@pytest.fixture(scope="module")
def learner() -> SmallBuckets:
    return SmallBuckets(learner_of(MODEL, packing=False))


@pytest.fixture(scope="module")
def note(request: pytest.FixtureRequest, backend: Backend) -> Measure:
    return report_of(request.config, f"{backend}, weights", interpreter(backend), backend)


@pytest.fixture(scope="module")
def served(launch: Callable[[], Server], backend: Backend) -> Server:
    """A healthy server of our own: its weights change."""
    for left in reversed(range(3)):
        server = launch()
        try:
            wait_until_healthy(
                server.endpoint, backend, limit_s=STARTUP_LIMIT_S, still_alive=server.still_alive
            )
        except ChildDied as died:
            if not left or START_RACE["lmdeploy"] not in str(died):
                raise
        else:
            break
    return server


@pytest.fixture
async def student(served: Server) -> AsyncIterator[StudentServer]:
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(trust_env=False, headers=headers) as http:
        yield StudentServer(served.backend, served.endpoint, http)


async def gap(served: Server, learner: SmallBuckets) -> float:
    """The largest difference between the server's logprobs and the learner's own."""
    draw = random.Random(3)
    ids = [draw.randrange(2, VOCAB_SIZE - 1) for _ in range(40)]
    async with served.client() as client:
        score = await client.score_from(ids, 0)
    return float((torch.tensor(score.teacher_logprobs) - learner.logprobs_after(ids)).abs().max())


@pytest.mark.parametrize("way", PATHS)
async def test_pushed_weights_are_those_it_computes_with(
    served: Server, student: StudentServer, learner: SmallBuckets, note: Measure, way: str
) -> None:
    path: WeightPath = PATHS[way]()
    for version in (3, 4):  # a second sync finds nothing of the first in its way
        learner.move(version)
        assert await gap(served, learner) > 0.1
        await path.prepare(learner, version)
        began = time.monotonic()
        assert await path.load([student], version) == {}
        note(f"{way}: seconds for a push", round(time.monotonic() - began, 2))
        largest = await gap(served, learner)
        note(f"{way}: largest difference after it (nats)", largest)
        assert largest <= TOLERANCE["float32"]
        if served.backend == "sglang":
            assert await student.weight_version() == str(version)


@pytest.mark.parametrize("way", PATHS)
async def test_weights_held_are_those_of_their_version_though_training_went_on(
    served: Server, student: StudentServer, learner: SmallBuckets, way: str
) -> None:
    path: WeightPath = PATHS[way]()
    await path.prepare(learner, 5)
    assert await path.load([student], 5) == {}
    learner.move(6)
    assert await path.load([student], 5) == {}  # as for one that came back
    assert await gap(served, learner) > 0.1
