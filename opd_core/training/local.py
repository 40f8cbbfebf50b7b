"""The loop's organs in this very process: for tests and for one-process experiments."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from opd_core.config import Backend
from opd_core.errors import SamplingError
from opd_core.lifecycle.ports import reserve_ports
from opd_core.sampling.protocol import Ticketed
from opd_core.training.batch import TrainBatch
from opd_core.training.engine_thread import Engine, EngineThread
from opd_core.training.learner import Learner
from opd_core.training.ticket_sampler import TicketSampler
from opd_core.training.weight_buckets import Bucket, HeldWeights, MeetingPoint


class LocalSampler(TicketSampler):
    """An engine of this process; it decodes in a thread, so that scoring goes on meanwhile."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._thread = EngineThread(engine, self._take, self._fail)

    def _send(self, tickets: Sequence[int]) -> None:
        self._thread.submit([(ticket, self._asked[ticket].request) for ticket in tickets])

    async def _interrupt(self, before: int) -> None:
        await self._thread.interrupt(before)

    async def _load(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        await self._thread.load_weights(weights, policy_version)

    def _take(self, completions: Sequence[Ticketed]) -> None:
        if stale := self._stale(completions):
            self._fail(SamplingError(stale))
        self._answer(completions)


class LocalLearner:
    """A learner of this process, one rank."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._held: HeldWeights

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """Train on the whole batch."""
        return await asyncio.to_thread(self._learner.update, batch)

    async def weights(self) -> dict[str, Tensor]:
        """The current weights."""
        return self._learner.weights()

    async def save(self, path: Path) -> Path:
        """Write the student in Hugging Face format."""
        return self._learner.save(path)

    async def save_weights(self, path: Path) -> Path:
        """Write the weights as servers read them."""
        return await asyncio.to_thread(self._learner.save_weights, path)

    async def hold_weights(self) -> tuple[Bucket, ...]:
        """Keep the weights as they are now, for servers that take them from here."""
        weights = await asyncio.to_thread(self._learner.served_weights)
        self._held = HeldWeights(weights, self._learner.device)
        return self._held.buckets

    async def lend_bucket(self, number: int, backend: Backend) -> Mapping[str, str]:
        """What opens a bucket, by the device that it is on."""
        return await asyncio.to_thread(self._held.lend, number, backend)

    async def give_back_bucket(self) -> None:
        """Free what was lent last."""
        self._held.give_back()

    async def meeting_point(self) -> MeetingPoint:
        """Where a process group would be opened, on loopback."""
        with reserve_ports(1) as reserved:
            (port,) = reserved.ports
        return self._held.meeting_point(f"127.0.0.1:{port}")

    async def join_group(self, meeting: MeetingPoint, world_size: int) -> None:
        """Open it, and wait for the servers. Raises :class:`SamplingError`."""
        await asyncio.to_thread(self._held.join, meeting, world_size)

    async def broadcast_bucket(self, number: int) -> None:
        """Send a bucket to them. Raises :class:`SamplingError`."""
        await asyncio.to_thread(self._held.broadcast, number)

    async def leave_group(self) -> None:
        """Close it."""
        self._held.leave()

    async def start_checkpoint(self, folder: Path) -> None:
        """Begin to write all that training holds."""
        self._learner.start_checkpoint(folder)

    async def finish_checkpoint(self) -> None:
        """Wait until it is written."""
        await asyncio.to_thread(self._learner.finish_checkpoint)

    async def restore(self, folder: Path) -> None:
        """Take over a checkpoint."""
        self._learner.restore(folder)
