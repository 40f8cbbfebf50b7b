"""An engine in a thread of its own, asked and heard from one event loop.

The thread and the loop never touch the engine at the same time: whatever the loop wants, the thread
ends its decoding step first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from opd_core.errors import SamplingError
from opd_core.sampling.protocol import Completion, SampleRequest, Ticketed
from opd_core.training.learner import is_out_of_memory

GATHER_S = 0.02
"""Completions that finish within so long are handed out together: over Ray each hand-out costs the
driver about a millisecond."""

ABORTED = Completion((), (), (), "abort")
"""Of a request that no engine has begun."""

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """The part of :class:`~opd_core.sampling.transformers_engine.TransformersEngine` used here."""

    device: torch.device
    max_rows: int

    @property
    def idle(self) -> bool: ...
    def submit(self, asked: Sequence[tuple[int, SampleRequest]], /) -> None: ...
    def step(self) -> Sequence[Ticketed]: ...
    def interrupt(self) -> Sequence[Ticketed]: ...
    def load_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None: ...


class EngineThread:
    """Hands finished completions to ``deliver`` and what goes wrong to ``fail``, on the loop: a
    :class:`SamplingError` is final, anything else may go well in another process."""

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[Sequence[Ticketed]], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._engine = engine
        self._deliver, self._fail = deliver, fail
        self._asked: list[tuple[int, SampleRequest]] = []
        self._interrupted_before = 0
        self._between_steps = asyncio.Lock()
        self._wanted = False  # the only word between the loop and the running thread
        self._driving: asyncio.Task[None] | None = None

    def submit(self, asked: Sequence[tuple[int, SampleRequest]]) -> None:
        """Take requests with their tickets; calls may overtake an interruption that is meant for
        them."""
        late = [(ticket, ABORTED) for ticket, _ in asked if ticket < self._interrupted_before]
        if late:
            self._deliver(late)
        self._asked += [pair for pair in asked if pair[0] >= self._interrupted_before]
        self._wanted = True
        if self._driving is None or self._driving.done():
            self._driving = asyncio.create_task(self._drive())

    async def interrupt(self, before: int) -> None:
        """Hand out all requests with tickets below ``before`` as they are; there are no others."""
        self._interrupted_before = before
        self._wanted = True
        async with self._between_steps:
            asked, self._asked = self._asked, []
            ended = [*self._engine.interrupt(), *((ticket, ABORTED) for ticket, _ in asked)]
        self._deliver(ended)

    async def load_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Take over the student's weights. Raises :class:`SamplingError` while it samples."""
        async with self._between_steps:
            await asyncio.to_thread(self._engine.load_weights, weights, policy_version)

    async def _drive(self) -> None:
        try:
            while self._asked or not self._engine.idle:
                async with self._between_steps:
                    self._wanted = False
                    asked, self._asked = self._asked, []
                    self._engine.submit(asked)
                    finished = await asyncio.to_thread(self._steps)
                self._deliver(finished)
        except Exception as error:  # told where the completions are waited for
            logger.exception("sampling failed")
            self._fail(_told(error, self._engine))

    def _steps(self) -> list[Ticketed]:
        """Decode until somebody wants something or completions are to be handed out."""
        finished: list[Ticketed] = []
        until = time.monotonic() + GATHER_S
        while not (self._wanted or self._engine.idle):
            finished += self._engine.step()
            if finished and time.monotonic() > until:
                break
        return finished


def _told(error: Exception, engine: Engine) -> Exception:
    if isinstance(error, SamplingError):
        return error
    if isinstance(error, RuntimeError) and is_out_of_memory(error):
        return SamplingError(
            f"out of memory on {engine.device} while sampling "
            f"({str(error).splitlines()[0][:200]}): lower sampling.max_rows (now "
            f"{engine.max_rows}) or sampling.max_new_tokens"
        )
    return RuntimeError(f"sampling on {engine.device} failed: {type(error).__name__}: {error}")
