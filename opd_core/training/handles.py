"""The training actors behind the protocol that the train loop knows.

Ray sees batches: one call a train step for the ranks. Weights travel through the object store by
reference; the driver never holds them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from opd_core.config import Backend
from opd_core.errors import ActorLost, OPDError, TrainingError
from opd_core.training.batch import TrainBatch
from opd_core.training.weight_buckets import Bucket, MeetingPoint

logger = logging.getLogger(__name__)

DEATH_TOLD_WITHIN_S = 10.0


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

    async def save_weights(self, path: Path) -> Path:
        """Let rank 0 write the weights as servers read them."""
        await self._each("save_weights", str(path), doing="writing the weights")
        return path

    async def hold_weights(self) -> tuple[Bucket, ...]:
        """Let rank 0 keep the weights as they are now, for servers that take them from there."""
        held: tuple[Bucket, ...] = (
            await self._each("hold_weights", doing="gathering the weights")
        )[0]
        return held

    async def lend_bucket(self, number: int, backend: Backend) -> Mapping[str, str]:
        """What opens a bucket, by the device that it is on."""
        parts = await self._each("lend_bucket", number, backend, doing="lending the weights")
        return {device: handle for lent in parts for device, handle in lent.items()}

    async def give_back_bucket(self) -> None:
        """Free what was lent last."""
        await self._each("give_back_bucket", doing="freeing lent weights")

    async def meeting_point(self) -> MeetingPoint:
        """Where rank 0 would open a process group."""
        meeting: MeetingPoint = await self._first("meeting_point", doing="meeting the servers")
        return meeting

    async def join_group(self, meeting: MeetingPoint, world_size: int) -> None:
        """Let rank 0 open it and wait for the servers. Raises :class:`SamplingError`."""
        await self._first("join_group", meeting, world_size, doing="meeting the servers")

    async def broadcast_bucket(self, number: int) -> None:
        """Let rank 0 send a bucket to them. Raises :class:`SamplingError`."""
        await self._first("broadcast_bucket", number, doing="sending the weights")

    async def leave_group(self) -> None:
        """Let rank 0 close it."""
        await self._first("leave_group", doing="leaving the servers")

    async def start_checkpoint(self, folder: Path) -> None:
        """Let every rank begin to write its part."""
        await self._each("start_checkpoint", str(folder), doing="starting a checkpoint")

    async def finish_checkpoint(self) -> None:
        """Wait until all parts are written."""
        await self._each("finish_checkpoint", doing="writing a checkpoint")

    async def restore(self, folder: Path) -> None:
        """Let every rank take its part of a checkpoint."""
        await self._each("restore", str(folder), doing="loading a checkpoint")

    async def _each(self, method: str, *arguments: Any, doing: str) -> list[Any]:
        calls = [getattr(actor, method).remote(*arguments) for actor in self._actors]
        return await all_of(calls, doing)

    async def _first(self, method: str, *arguments: Any, doing: str) -> Any:
        return (await all_of([getattr(self._actors[0], method).remote(*arguments)], doing))[0]


async def all_of(references: Sequence[Any], doing: str) -> list[Any]:
    """What all calls return. Raises :class:`ActorLost`, this project's own error where an actor
    raised one, :class:`TrainingError` for anything else; all say what was being done."""
    calls = [asyncio.ensure_future(reference) for reference in references]
    try:
        return list(await asyncio.gather(*calls))
    except RayError as error:
        if (dead := await _death(calls)) is not None:
            raise ActorLost(f"{doing}: an actor died: {plain(dead)}") from None
        raise own_error(error) or TrainingError(f"{doing}: {plain(error)}") from None


async def _death(calls: Sequence[asyncio.Future[Any]]) -> RayActorError | None:
    """The death of an actor among failed calls. It is waited for: the other ranks miss a dead one
    at once, and Ray takes a while to tell. Not where an actor said what is wrong."""
    await asyncio.wait(calls, timeout=0)
    failed = [call.exception() for call in calls if call.done()]
    if not any(isinstance(error, RayError) and own_error(error) for error in failed):
        await asyncio.wait(calls, timeout=DEATH_TOLD_WITHIN_S)
    failed = [call.exception() for call in calls if call.done()]
    return next((error for error in failed if isinstance(error, RayActorError)), None)


def own_error(error: RayError) -> OPDError | None:
    """The error of this project that an actor raised, if it was one."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, OPDError) else None


def plain(error: Exception) -> str:
    """The last lines of an error: of Ray's, the actor's own words."""
    return "\n".join(str(error).strip().splitlines()[-12:])
