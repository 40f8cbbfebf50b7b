"""An engine without a model, and Ray actors of this process that hold one and can die."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from ray.exceptions import ActorDiedError, RayTaskError

from opd_core.config import ExperimentConfig
from opd_core.errors import SamplingError
from opd_core.sampling.protocol import Completion, SampleRequest, Ticketed
from opd_core.training.actors import SamplingActor

CONFIG = ExperimentConfig.model_validate(
    {
        "name": "fake",
        "student": {"model": "/m"},
        "data": {"train": "/d.jsonl"},
        "task": {"group_size": 2, "judge": "m:f"},
        "sampling": {"max_new_tokens": 8},
        "opd": None,
        "training": {"steps": 1, "prompts_per_step": 1, "learning_rate": 1e-6},
    }
)


def tokens_of(request: SampleRequest, count: int | None = None) -> tuple[int, ...]:
    """What the engine samples: it depends on the seed and on what was drawn before, as it must."""
    length = request.max_new_tokens if count is None else count
    return tuple(request.seed + request.drawn + i for i in range(length))


class SteppingEngine:
    """One token of every request a step. ``submissions`` are the tickets of each ``submit``;
    ``error`` is raised by the next step; ``keeps_version`` ignores new weights; ``ended`` stops the
    thread that steps. With weights of version v no rollout gets more than ``limits[v]`` tokens."""

    device = torch.device("cpu")
    max_rows = 64

    def __init__(self, *, error: Exception | None = None, keeps_version: bool = False) -> None:
        self.policy_version = 0
        self.submissions: list[list[int]] = []
        self.error, self.keeps_version = error, keeps_version
        self.ended = False
        self.limits: dict[int, int] = {}
        self._rows: dict[int, tuple[SampleRequest, int]] = {}

    @property
    def idle(self) -> bool:
        return self.ended or not self._rows

    def all_have(self, tokens: int) -> bool:
        """Whether there are rollouts, and all have so many tokens."""
        rows = list(self._rows.values())
        return bool(rows) and all(request.drawn + count == tokens for request, count in rows)

    def submit(self, asked: Sequence[tuple[int, SampleRequest]]) -> None:
        self._rows |= {ticket: (request, 0) for ticket, request in asked}
        if asked:
            self.submissions.append([ticket for ticket, _ in asked])

    def step(self) -> list[Ticketed]:
        if self.error is not None:
            raise self.error
        limit = self.limits.get(self.policy_version, math.inf)
        self._rows = {
            ticket: (request, count + (request.drawn + count < limit))
            for ticket, (request, count) in self._rows.items()
        }
        done = [t for t, (request, count) in self._rows.items() if count == request.max_new_tokens]
        return [self._leave(ticket, "length") for ticket in done]

    def interrupt(self) -> list[Ticketed]:
        return [self._leave(ticket, "abort") for ticket in list(self._rows)]

    def load_weights(self, weights: Any, policy_version: int) -> None:
        if not self.idle:
            raise SamplingError("not idle")
        if not self.keeps_version:
            self.policy_version = policy_version

    def _leave(self, ticket: int, reason: Any) -> tuple[int, Completion]:
        request, count = self._rows.pop(ticket)
        versions = (self.policy_version,) * count
        return ticket, Completion(tokens_of(request, count), (-1.0,) * count, versions, reason)


class MortalActor:
    """The handle of a sampling actor of this process. ``dies_in`` names a method that kills it;
    while ``heard`` is not set, its completions are on their way."""

    def __init__(self, engine: Any = None, *, dies_in: str = "") -> None:
        self.engine = engine or SteppingEngine()
        self.asked: list[list[int]] = []  # tickets of each call of submit
        self.heard = asyncio.Event()
        self.heard.set()
        self._dies_in = dies_in
        self._actor = SamplingActor(CONFIG, lambda _: self.engine)
        self._dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.completions = SimpleNamespace(remote=self._stream)
        for name in ("ready", "submit", "interrupt", "load_weights"):
            setattr(self, name, SimpleNamespace(remote=partial(self._call, name)))

    @property
    def dead(self) -> bool:
        return self._dead.done()

    def die(self) -> None:
        """What SIGKILL and ``ray.kill`` do."""
        self.engine.ended = True
        if not self.dead:
            self._dead.set_result(None)

    def _call(self, name: str, *arguments: Any) -> Awaitable[Any]:
        if name == "submit":
            self.asked.append([ticket for ticket, _ in arguments[0]])
        if name == self._dies_in:
            self.die()
        call = asyncio.ensure_future(self._alive(partial(getattr(self._actor, name), *arguments)))
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        return call

    async def _stream(self) -> AsyncIterator[Awaitable[Any]]:
        stream = self._actor.completions()
        while True:
            item = asyncio.ensure_future(self._alive(stream.__anext__))
            item.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait([item])
            await self.heard.wait()
            yield item

    async def _alive(self, work: Callable[[], Awaitable[Any]]) -> Any:
        doing = asyncio.ensure_future(work())
        try:
            await asyncio.wait([doing, self._dead], return_when=asyncio.FIRST_COMPLETED)
            if self.dead:
                raise ActorDiedError
            return await doing
        except (SamplingError, RuntimeError) as error:
            words = f"Traceback (most recent call last):\n{type(error).__name__}: {error}"
            raised = RayTaskError("f", words, error, proctitle="actor", pid=1, ip="127.0.0.1")
            raise raised.as_instanceof_cause() from None
        finally:
            doing.cancel()
