"""Ray actors behind the protocols that the train loop knows.

Ray sees batches: one call a train step for the ranks, one stream a train step for the samplers.
Weights travel through the object store by reference; the driver never holds them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from opd_core.errors import ActorLost, OPDError, SamplingError, TrainingError
from opd_core.sampling.protocol import Completion, SampleRequest
from opd_core.training.batch import TrainBatch

logger = logging.getLogger(__name__)

DEATH_TOLD_WITHIN_S = 10.0


class RaySampler:
    """Sampling actors behind the :class:`~opd_core.sampling.protocol.Sampler` protocol."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors

    async def sample(self, requests: Sequence[SampleRequest]) -> AsyncIterator[list[Completion]]:
        """Completions of all actors as they finish; a group stays on one actor.

        Raises :class:`ActorLost` as soon as one actor dies, :class:`SamplingError` if one fails.
        """
        queue: asyncio.Queue[list[Completion] | Exception | None] = asyncio.Queue()

        async def pump(actor: Any, share: list[SampleRequest]) -> None:
            try:
                async for reference in actor.sample.remote(share):
                    await queue.put(await reference)
                await queue.put(None)
            except Exception as error:  # raised where the completions are read
                await queue.put(error)

        count = len(self._actors)
        shares = [[r for r in requests if r.key[0] % count == i] for i in range(count)]
        pumps = [
            asyncio.create_task(pump(actor, share))
            for actor, share in zip(self._actors, shares, strict=True)
            if share
        ]
        try:
            running = len(pumps)
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, RayError):
                    raise _sampling_error(item) from None
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()

    async def load_weights(self, weights: Any, policy_version: int) -> None:
        """Give all actors the weights behind an object reference."""
        loads = [actor.load_weights.remote(weights, policy_version) for actor in self._actors]
        await all_of(loads, "syncing weights to the sampling actors")


class RayLearner:
    """Training actors behind one name."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors

    async def join(self) -> None:
        """Let the ranks meet and share the student."""
        count = len(self._actors)
        doing = "joining the training ranks"
        (address,) = await all_of([self._actors[0].address.remote()], doing)
        joins = [a.join.remote(address, rank, count) for rank, a in enumerate(self._actors)]
        if why := (await all_of(joins, doing))[0]:
            logger.warning("sequences are padded, not packed: %s", why)

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """One train step on all ranks; their metrics are the same, so rank 0's are returned."""
        shared = ray.put(batch)
        updates = [actor.update.remote(shared) for actor in self._actors]
        metrics: dict[str, float] = (await all_of(updates, "training"))[0]
        return metrics

    async def weights(self) -> Any:
        """A reference to rank 0's weights in the object store, once all ranks have given theirs."""
        pairs = [actor.weights.options(num_returns=2).remote() for actor in self._actors]
        await all_of([given for _, given in pairs], "gathering the weights")
        return pairs[0][0]

    async def save(self, path: Path) -> Path:
        """Let the ranks bring the student together and rank 0 write it."""
        await self._each("save", str(path), doing="saving the student")
        return path

    async def start_checkpoint(self, folder: Path) -> None:
        """Let every rank begin to write its part."""
        await self._each("start_checkpoint", str(folder), doing="starting a checkpoint")

    async def finish_checkpoint(self) -> None:
        """Wait until all parts are written."""
        await self._each("finish_checkpoint", doing="writing a checkpoint")

    async def restore(self, folder: Path) -> None:
        """Let every rank take its part of a checkpoint."""
        await self._each("restore", str(folder), doing="loading a checkpoint")

    async def _each(self, method: str, *arguments: str, doing: str) -> None:
        await all_of([getattr(actor, method).remote(*arguments) for actor in self._actors], doing)


async def all_of(references: Sequence[Any], doing: str) -> list[Any]:
    """What all calls return. Raises :class:`ActorLost`, this project's own error where an actor
    raised one, :class:`TrainingError` for anything else; all say what was being done."""
    calls = [asyncio.ensure_future(reference) for reference in references]
    try:
        return list(await asyncio.gather(*calls))
    except RayError as error:
        if (dead := await _death(calls)) is not None:
            raise ActorLost(f"{doing}: an actor died: {_plain(dead)}") from None
        raise _own_error(error) or TrainingError(f"{doing}: {_plain(error)}") from None


async def _death(calls: Sequence[asyncio.Future[Any]]) -> RayActorError | None:
    """The death of an actor among failed calls. It is waited for: the other ranks miss a dead one
    at once, and Ray takes a while to tell. Not where an actor said what is wrong."""
    await asyncio.wait(calls, timeout=0)
    failed = [call.exception() for call in calls if call.done()]
    if not any(isinstance(error, RayError) and _own_error(error) for error in failed):
        await asyncio.wait(calls, timeout=DEATH_TOLD_WITHIN_S)
    failed = [call.exception() for call in calls if call.done()]
    return next((error for error in failed if isinstance(error, RayActorError)), None)


def _sampling_error(error: RayError) -> OPDError:
    if isinstance(error, RayActorError):
        return ActorLost(f"a sampling actor died: {_plain(error)}")
    return _own_error(error) or SamplingError(f"a sampling actor failed: {_plain(error)}")


def _own_error(error: RayError) -> OPDError | None:
    """The error of this project that an actor raised, if it was one."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, OPDError) else None


def _plain(error: RayError) -> str:
    """The last lines of a Ray error: the actor's own words."""
    return "\n".join(str(error).strip().splitlines()[-12:])
