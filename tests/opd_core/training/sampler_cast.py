"""Casts of mortal actors behind a sampler, and what is asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from opd_core.errors import SamplingError
from opd_core.sampling.protocol import Completion, SampleRequest
from opd_core.training.ray_sampler import RaySampler
from tests.opd_core.training.stepping_engine import MortalActor

ENDLESS = 10**9


class Weights:
    """A learner whose weights are a word; ``given`` counts."""

    given = 0

    async def weights(self) -> str:
        self.given += 1
        return "weights"


CASTS: list[Cast] = []


def end_all() -> None:
    """Stop every engine of every cast."""
    for actor in [actor for cast in CASTS for actor in cast.all]:
        actor.die()
    CASTS.clear()


class Cast:
    """The actors of a test, those that replace dead ones among them."""

    def __init__(
        self, *actors: MortalActor, spawned: Callable[[], MortalActor] = MortalActor
    ) -> None:
        self.all = list(actors)
        CASTS.append(self)
        self._spawned = spawned

    def sampler(self, max_restarts: int = 3, limit_s: float = 60.0) -> RaySampler:
        return RaySampler(
            self.all[:],
            self._spawn,
            max_restarts=max_restarts,
            limit_s=limit_s,
            kill=lambda actor: actor.die(),
        )

    def _spawn(self, place: int) -> MortalActor:
        self.all.append(self._spawned())
        return self.all[-1]

    @property
    def living(self) -> list[MortalActor]:
        return [actor for actor in self.all if not actor.dead]


def request(group: int, index: int = 0, tokens: int = 4, **changes: Any) -> SampleRequest:
    return SampleRequest((group, index), (3,), 1000 * group + 100 * index, tokens, **changes)


REQUESTS = [request(group, index) for group in range(5) for index in range(2)]


async def ask(
    sampler: RaySampler, requests: Sequence[SampleRequest]
) -> list[asyncio.Task[Completion]]:
    """Ask for all in one turn of the event loop; they are sent then."""
    tasks = [asyncio.create_task(sampler.sample(r)) for r in requests]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


async def all_of(tasks: Sequence[asyncio.Task[Completion]]) -> list[Completion]:
    async with asyncio.timeout(20):
        return list(await asyncio.gather(*tasks))


async def errors_of(tasks: Sequence[asyncio.Task[Completion]]) -> set[str]:
    async with asyncio.timeout(20):
        told = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, SamplingError) for error in told)
    return {str(error) for error in told}


async def whole(sampler: RaySampler, asked: SampleRequest) -> tuple[list[int], list[int]]:
    """A rollout as the agent loop samples it, and the policy version of each of its tokens."""
    ids: list[int] = []
    versions: list[int] = []
    while True:
        rest = SampleRequest(
            asked.key,
            (*asked.token_ids, *ids),
            asked.seed,
            asked.max_new_tokens - len(ids),
            drawn=len(ids),
        )
        got = await sampler.sample(rest)
        ids += got.response_ids
        versions += got.policy_versions
        if got.finish_reason != "abort":
            return ids, versions
