"""Sampling actors on Ray behind one name; one that dies is replaced.

An actor that dies gives its requests to the living at once, or keeps them for its replacement where
none lives: a request's seed, tokens and weights say all there is, so it does not matter who samples
it, and nobody is idle while a model is loaded. Its deaths are told by the stream of its completions
and by any call to it, whichever is first.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from opd_core.errors import SamplingError
from opd_core.sampling.protocol import SampleRequest
from opd_core.training.handles import own_error, plain
from opd_core.training.ticket_sampler import TicketSampler

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Engine:
    """A living actor, its place among all, and who listens to it."""

    place: int
    actor: Any
    listener: asyncio.Task[None] = field(init=False)


class RaySampler(TicketSampler):
    """Sampling actors, all loaded with the student, behind one name; made in an event loop.

    ``spawn`` starts another actor in the place of a dead one. An actor has ``limit_s`` to be
    ready, to stop sampling and to load weights; then it is taken to be dead. At most
    ``max_restarts`` are started.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        spawn: Callable[[int], Any],
        *,
        max_restarts: int,
        limit_s: float,
        kill: Callable[[Any], None] = ray.kill,
    ) -> None:
        super().__init__()
        self._spawn, self._kill = spawn, kill
        self._max_restarts, self._limit_s = max_restarts, limit_s
        self._places = len(actors)
        self._weights: Any = None  # the reference synced last, for replacements
        self._living: dict[int, _Engine] = {}
        self._starting: dict[int, asyncio.Task[None]] = {}
        for place, actor in enumerate(actors):
            self._join(place, actor)

    def close(self) -> None:
        """Listen to nobody any more, and start nobody: Ray itself is to be left."""
        self._fail(SamplingError("the sampler is closed"))
        for task in [*(e.listener for e in self._living.values()), *self._starting.values()]:
            task.cancel()

    def _send(self, tickets: Sequence[int]) -> None:
        if not self._living:
            self._unsent += tickets
            return
        shares: dict[int, list[tuple[int, SampleRequest]]] = defaultdict(list)
        for ticket in tickets:
            asked = self._asked[ticket]
            asked.holder = self._engine_of(asked.request.key[0])
            shares[asked.holder.place].append((ticket, asked.request))
        for place, share in shares.items():
            self._living[place].actor.submit.remote(share)

    def _engine_of(self, group: int) -> _Engine:
        """A group keeps to one place; where nobody lives there, to another."""
        if (place := group % self._places) in self._living:
            return self._living[place]
        return self._living[sorted(self._living)[group % len(self._living)]]

    async def _interrupt(self, before: int) -> None:
        async def interrupt(engine: _Engine) -> None:
            try:
                async with asyncio.timeout(self._limit_s):
                    await engine.actor.interrupt.remote(before)
            except RayError as error:
                self._broken(engine, error)
            except TimeoutError:
                self._hung(engine)

        await asyncio.gather(*map(interrupt, self._living.values()))

    async def _load(self, weights: Any, policy_version: int) -> None:
        async def load(engine: _Engine) -> None:
            try:
                await self._load_on(engine.actor)
            except RayError as error:
                self._broken(engine, error)
            except SamplingError as error:
                self._lost(engine, str(error))
            except TimeoutError:
                self._hung(engine)

        self._weights = weights
        await asyncio.gather(*map(load, self._living.values()))

    async def _load_on(self, actor: Any) -> None:
        """Load the weights synced last and have their version confirmed. Raises TimeoutError."""
        async with asyncio.timeout(self._limit_s):
            answer = await actor.load_weights.remote(self._weights, self.policy_version)
        if answer != self.policy_version:
            raise SamplingError(f"loaded policy version {self.policy_version}, answered {answer}")

    async def _listen(self, engine: _Engine) -> None:
        try:
            async for reference in engine.actor.completions.remote():
                completions = await reference
                if stale := self._stale(completions):
                    self._lost(engine, stale)
                    return
                self._answer(completions)
            self._lost(engine, "it ended its stream of completions")
        except RayError as error:
            self._broken(engine, error)
        except Exception as error:
            logger.exception("completions cannot be taken")
            self._fail(SamplingError(f"completions cannot be taken: {error!r}"))

    def _broken(self, engine: _Engine, error: RayError) -> None:
        """An error of this project that the actor raised would come again in its replacement; any
        other may be of its process, its device or its node."""
        if (own := own_error(error)) is not None:
            self._fail(SamplingError(str(own)))
        else:
            self._lost(engine, plain(error))

    def _hung(self, engine: _Engine) -> None:
        self._lost(engine, f"it does not answer within {self._limit_s:g} s")

    def _lost(self, engine: _Engine, cause: str) -> None:
        """Go on without an actor: replace it and give its requests away."""
        if self._failure is not None or self._living.get(engine.place) is not engine:
            return
        del self._living[engine.place]
        engine.listener.cancel()
        self._kill(engine.actor)  # a stale one lives, and one that cannot be reached may
        self._unsent = [t for t, a in self._asked.items() if a.holder is engine] + self._unsent
        self._replace(engine.place, cause)
        self._hand_out()

    def _replace(self, place: int, cause: str) -> None:
        """Start another actor, if that is still allowed."""
        cause = " ".join(cause.split())
        if self.replaced < self._max_restarts:
            self.replaced += 1
            logger.warning(
                "sampling actor %d is lost (%s): replacing it (%d of sampling.max_restarts %d)",
                place,
                cause,
                self.replaced,
                self._max_restarts,
            )
            self._starting[place] = asyncio.create_task(self._start(place))
        elif left := len(self._living) + len(self._starting):
            logger.warning("sampling actor %d is lost (%s): %d others go on", place, cause, left)
        else:
            self._fail(
                SamplingError(
                    f"no sampling actor is left after {self.replaced} replacements "
                    f"(sampling.max_restarts {self._max_restarts}); the last one: {cause}"
                )
            )

    async def _start(self, place: int) -> None:
        """Start an actor in a dead one's place, with the weights synced last."""
        actor = None
        try:
            async with asyncio.timeout(self._limit_s):
                actor = self._spawn(place)
                await actor.ready.remote()
            async with self._syncing:  # then the weights are settled, and nobody is interrupted
                if self._weights is not None:
                    await self._load_on(actor)
                self._join(place, actor)
        except TimeoutError:
            cause = f"its replacement was not ready after {self._limit_s:g} s"
        except Exception as error:
            cause = plain(error)
        else:
            del self._starting[place]
            logger.warning("sampling actor %d is replaced", place)
            self._hand_out()
            return
        if actor is not None:
            self._kill(actor)
        del self._starting[place]
        self._replace(place, cause)

    def _join(self, place: int, actor: Any) -> None:
        engine = _Engine(place, actor)
        self._living[place] = engine
        engine.listener = asyncio.create_task(self._listen(engine))
