"""What the train loop wants of the learner and of the engine that samples, wherever they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from opd_core.training.batch import TrainBatch


class LearnerHandle(Protocol):
    """All ranks of the learner behind one name."""

    async def update(self, batch: TrainBatch) -> dict[str, float]: ...
    async def weights(self) -> Any:
        """The weights, for engines that take them from memory."""

    async def save_weights(self, path: Path) -> Path:
        """Write them in Hugging Face format, for engines that read them."""

    async def save(self, path: Path) -> Path: ...
    async def start_checkpoint(self, folder: Path) -> None: ...
    async def finish_checkpoint(self) -> None: ...
    async def restore(self, folder: Path) -> None: ...


class SamplerHandle(Protocol):
    """The part of a sampling engine that the loop itself uses."""

    @property
    def replaced(self) -> int:
        """Engines that died and were replaced, so far."""

    async def sync(self, learner: Any, policy_version: int) -> None:
        """Give the learner's weights to all engines. What is being sampled meanwhile is
        interrupted, and goes on with them."""


class Sleeper(Protocol):
    """A sampling engine that shares its device with training."""

    async def sleep(self) -> None:
        """Give the device's memory back."""

    async def wake(self) -> None:
        """Take it again; weights must then be synced."""
