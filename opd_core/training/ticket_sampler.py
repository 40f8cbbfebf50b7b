"""What samplers of in-process engines have in common: tickets for requests, and the gate.

Everything here runs on one event loop. A request has a ticket from the moment it is asked until its
engine has answered, even if nobody waits for it any more.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from opd_core.errors import SamplingError
from opd_core.sampling.protocol import Completion, SampleRequest, Ticketed
from opd_core.training.engine_thread import ABORTED


class GivesWeights(Protocol):
    """The part of a learner that samplers use."""

    async def weights(self) -> Any: ...


@dataclass(slots=True)
class Asked:
    """A request, who waits for it, and the engine that has it."""

    request: SampleRequest
    answer: asyncio.Future[Completion]
    holder: Any = None


class TicketSampler(ABC):
    """A :class:`~opd_core.sampling.protocol.Sampler` that takes weights; kinds differ in how they
    reach their engines. ``policy_version`` is of the weights synced last, ``replaced`` counts the
    engines that were started for dead ones."""

    def __init__(self) -> None:
        self.policy_version = 0
        self.replaced = 0
        self._asked: dict[int, Asked] = {}
        self._unsent: list[int] = []
        self._next_ticket = 0
        self._flush_due = False
        self._failure: Exception | None = None
        self._syncing = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._all_answered = asyncio.Event()
        self._all_answered.set()

    async def ready(self) -> int:
        """Wait while weights are being synced; the policy version that samples now."""
        while not self._open.is_set():
            await self._open.wait()
        self._raise_failure()
        return self.policy_version

    async def sample(self, request: SampleRequest) -> Completion:
        """One completion; what is asked in one turn of the event loop is sent together.

        Raises :class:`SamplingError` if no engine is left or one failed.
        """
        await self.ready()
        loop = asyncio.get_running_loop()
        asked = Asked(request, loop.create_future())
        self._asked[self._next_ticket] = asked
        self._unsent.append(self._next_ticket)
        self._next_ticket += 1
        self._all_answered.clear()
        if not self._flush_due:
            self._flush_due = True
            loop.call_soon(self._flush)
        return await asked.answer

    async def sync(self, learner: GivesWeights, policy_version: int) -> None:
        """Give the engines the learner's weights; what they have in flight comes back as it is.

        Raises :class:`SamplingError` if that fails; nothing is sampled then.
        """
        async with self._syncing:
            weights = await learner.weights()
            self._open.clear()
            self._hand_out()
            try:
                await self._interrupt(self._next_ticket)
                await self._all_answered.wait()
                self.policy_version = policy_version
                await self._load(weights, policy_version)
            except Exception as error:
                self._fail(SamplingError(f"syncing weights of version {policy_version}: {error}"))
            self._raise_failure()
            self._open.set()

    @abstractmethod
    def _send(self, tickets: Sequence[int]) -> None:
        """Give these requests to engines, or put them back into ``_unsent``."""

    @abstractmethod
    async def _interrupt(self, before: int) -> None:
        """Have all requests with tickets below ``before`` answered at once."""

    @abstractmethod
    async def _load(self, weights: Any, policy_version: int) -> None:
        """Load weights on all engines, of which none samples."""

    def _flush(self) -> None:
        self._flush_due = False
        self._hand_out()

    def _hand_out(self) -> None:
        """Send what no engine has, in the order of asking; while weights are synced it comes back
        to whoever asked."""
        tickets, self._unsent = self._unsent, []
        wanted = [t for t in tickets if self._open.is_set() and not self._asked[t].answer.done()]
        self._answer([(ticket, ABORTED) for ticket in set(tickets).difference(wanted)])
        if wanted:
            self._send(wanted)

    def _answer(self, completions: Sequence[Ticketed]) -> None:
        if self._failure is not None:
            return
        for ticket, completion in completions:
            answer = self._asked.pop(ticket).answer
            if not answer.done():  # whoever asked may have been cancelled
                answer.set_result(completion)
        if not self._asked:
            self._all_answered.set()

    def _stale(self, completions: Sequence[Ticketed]) -> str:
        """What is wrong where other weights sampled than those synced last, else nothing."""
        versions = {version for _, c in completions for version in c.policy_versions}
        if versions <= {self.policy_version}:
            return ""
        return f"policy version {self.policy_version} was synced last, tokens are of {versions}"

    def _fail(self, error: Exception) -> None:
        """Nobody samples any more: tell all who wait, and all who come."""
        self._failure = self._failure or error
        for asked in self._asked.values():
            if not asked.answer.done():
                asked.answer.set_exception(SamplingError(*self._failure.args))
        self._asked.clear()
        self._unsent.clear()
        self._all_answered.set()
        self._open.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise SamplingError(*self._failure.args)
