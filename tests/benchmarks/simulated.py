"""Stand-ins for the student's engines that take time and no CPU."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opd_core.sampling.protocol import Completion, FinishReason, SampleRequest
from opd_core.training.batch import TrainBatch

SHORTEST, LONGEST = 12, 36
"""Tokens of an answer; every length between is as likely."""


class SimulatedSampler:
    """Decodes ``rows`` answers at once, a token of each in ``token_s``; a sync interrupts them."""

    replaced = 0

    def __init__(self, rows: int, token_s: float) -> None:
        self._free = asyncio.Semaphore(rows)
        self._token_s = token_s
        self._version = 0
        self._interruption = asyncio.Event()

    async def ready(self) -> int:
        """The version at once."""
        return self._version

    async def sample(self, request: SampleRequest) -> Completion:
        """An answer whose length follows from the seed."""
        version, interruption = self._version, self._interruption
        wanted = _length(request) - request.drawn
        async with self._free:
            began = time.perf_counter()
            try:
                async with asyncio.timeout(wanted * self._token_s):
                    await interruption.wait()
                tokens = int((time.perf_counter() - began) / self._token_s)
                return _completion(min(tokens, wanted - 1), version, "abort")
            except TimeoutError:
                return _completion(wanted, version, "stop")

    async def sync(self, learner: Any, policy_version: int) -> None:
        """Interrupt all, and go on as the new version."""
        self._interruption.set()
        self._interruption, self._version = asyncio.Event(), policy_version


class SimulatedEngine:
    """An engine for sampling actors: ``rows`` answers at once, a step in ``step_s``."""

    device = torch.device("cpu")

    def __init__(self, rows: int, step_s: float) -> None:
        self.max_rows, self._step_s = rows, step_s
        self._waiting: deque[tuple[int, SampleRequest]] = deque()
        self._running: dict[int, tuple[int, int]] = {}
        self._steps = 0

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not (self._waiting or self._running)

    def submit(self, asked: Sequence[tuple[int, SampleRequest]]) -> None:
        """Queue."""
        self._waiting.extend(asked)

    def step(self) -> list[tuple[int, Completion]]:
        """A token of each row; the answers that it ends."""
        while self._waiting and len(self._running) < self.max_rows:
            ticket, request = self._waiting.popleft()
            self._running[ticket] = _length(request), self._steps + _length(request)
        time.sleep(self._step_s)
        self._steps += 1
        ended = [ticket for ticket, (_, end) in self._running.items() if end == self._steps]
        return [(ticket, _completion(self._running.pop(ticket)[0], 0, "stop")) for ticket in ended]

    def interrupt(self) -> list[tuple[int, Completion]]:
        """Nobody does."""
        return []

    def load_weights(self, weights: Mapping[str, Any], policy_version: int) -> None:
        """Nobody does."""


class SimulatedLearner:
    """Trains nothing for ``training_s``."""

    def __init__(self, training_s: float) -> None:
        self._training_s = training_s

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """Take the time."""
        await asyncio.sleep(self._training_s)
        tokens = sum(mini_batch.valid_tokens for mini_batch in batch.mini_batches)
        return {"optimizer_steps": 1.0, "response_tokens": float(tokens)}

    async def save(self, path: Path) -> Path:
        """Nothing is there to save."""
        return path

    async def restore(self, folder: Path) -> None:
        """Nor to restore, nor (below) to write."""

    async def weights(self) -> None: ...
    async def save_weights(self, path: Path) -> Path:
        return path

    async def start_checkpoint(self, folder: Path) -> None: ...
    async def finish_checkpoint(self) -> None: ...


def _length(request: SampleRequest) -> int:
    return SHORTEST + request.seed % (LONGEST - SHORTEST + 1)


def _completion(tokens: int, version: int, finish_reason: FinishReason) -> Completion:
    return Completion((5,) * tokens, (-0.5,) * tokens, (version,) * tokens, finish_reason)
