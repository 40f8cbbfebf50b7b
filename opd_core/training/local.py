"""The loop's organs in this very process: for tests and for one-process experiments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from torch import Tensor

from opd_core.sampling.protocol import Completion, SampleRequest
from opd_core.sampling.transformers_engine import TransformersEngine
from opd_core.training.batch import TrainBatch
from opd_core.training.learner import Learner


class LocalSampler:
    """An engine of this process; it decodes in a thread, so that scoring goes on meanwhile."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine

    async def sample(self, requests: Sequence[SampleRequest]) -> AsyncIterator[list[Completion]]:
        """Completions as they finish."""
        finished = iter(self._engine.sample(requests))
        while (completions := await asyncio.to_thread(next, finished, None)) is not None:
            yield completions

    async def load_weights(self, weights: dict[str, Tensor], policy_version: int) -> None:
        """Take over the student's weights."""
        self._engine.load_weights(weights, policy_version)


class LocalLearner:
    """A learner of this process, one rank."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """Train on the whole batch."""
        return await asyncio.to_thread(self._learner.update, batch)

    async def weights(self) -> dict[str, Tensor]:
        """The current weights."""
        return self._learner.weights()

    async def save(self, path: Path) -> Path:
        """Write the student in Hugging Face format."""
        return self._learner.save(path)

    async def start_checkpoint(self, folder: Path) -> None:
        """Begin to write all that training holds."""
        self._learner.start_checkpoint(folder)

    async def finish_checkpoint(self) -> None:
        """Wait until it is written."""
        await asyncio.to_thread(self._learner.finish_checkpoint)

    async def restore(self, folder: Path) -> None:
        """Take over a checkpoint."""
        self._learner.restore(folder)
