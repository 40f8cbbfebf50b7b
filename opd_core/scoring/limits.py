"""How much may be asked of a teacher at once, and how several agent loops share it.

Owns the bound on requests and tokens in flight; knows no HTTP, no teacher and no Ray.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

from opd_core.errors import ConfigError

CUT = 0.7
"""The window after an overload, as a part of the window before it."""


@dataclass(frozen=True)
class Share:
    """Requests, and the tokens of those requests together."""

    requests: int
    tokens: int


NOTHING = Share(0, 0)


class Slot:
    """A place for one request in flight. It is given back where its ``with`` block ends.

    ``queue_s`` is how long the request waited for it.
    """

    __slots__ = ("_limit", "alone", "epoch", "queue_s", "tokens")

    def __init__(self, limit: FlowLimit, tokens: int, alone: bool) -> None:
        self._limit = limit
        self.tokens = tokens
        self.alone = alone
        self.epoch = 0
        self.queue_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._limit._give_back(self)

    def answered(self, latency_s: float) -> None:
        """Tell the limit that this request was answered well, and how fast."""
        self._limit._learn(self, good=latency_s <= self._limit.target_latency_s)

    def overloaded(self) -> None:
        """Tell the limit that the server had too much: 429, 5xx or no answer in time."""
        self._limit._learn(self, good=False)


class FlowLimit:
    """Bounds the requests and the tokens in flight, strictly first come, first served.

    With ``adaptive`` the number of requests follows the server between 1 and ``share.requests``.
    Each window of good answers adds 1; an overload, or an answer slower than ``target_latency_s``,
    leaves 0.7 of it, once per round trip: what was sent before a cut says nothing more.
    Additive increase with multiplicative decrease is the linear rule by which several clients that
    see only the server's overload come to equal shares of it (Chiu & Jain 1989, "Analysis of the
    increase and decrease algorithms for congestion avoidance in computer networks").

    For one event loop. ``clock`` is a seam for tests.
    """

    def __init__(
        self,
        share: Share,
        *,
        adaptive: bool = False,
        target_latency_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.share = share
        self.adaptive = adaptive
        self.target_latency_s = target_latency_s
        self._clock = clock
        self._in_flight = 0
        self._tokens_in_flight = 0
        self._paused = False
        self._taken = False  # by a request that is alone
        self._fraction = 1.0  # of the share: it outlives a change of the share
        self._epoch = 0  # number of cuts so far
        self._waiting: OrderedDict[Slot, asyncio.Future[None]] = OrderedDict()

    @property
    def in_flight(self) -> int:
        """Requests in flight."""
        return self._in_flight

    @property
    def tokens_in_flight(self) -> int:
        """Their tokens; one that is larger than the share counts as the share."""
        return self._tokens_in_flight

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    @property
    def window(self) -> float:
        """Requests that may be in flight now."""
        return min(self.share.requests, max(1.0, self._fraction * self.share.requests))

    @asynccontextmanager
    async def slot(self, tokens: int, *, alone: bool = False) -> AsyncIterator[Slot]:
        """Wait for a place for a request of ``tokens``.

        One that is larger than the whole share of tokens goes when nothing else is in flight; one
        that must be ``alone`` also keeps all others out until it is done.
        """
        slot = Slot(self, tokens, alone)
        if self._waiting or not self._fits(slot):
            asked = self._clock()
            await self._queue(slot)
            slot.queue_s = self._clock() - asked
        else:
            self._admit(slot)
        with slot:
            yield slot

    def try_slot(self, tokens: int) -> Slot | None:
        """A place that is free at once and that nobody waits for, to be used with ``with``."""
        slot = Slot(self, tokens, alone=False)
        if self._waiting or not self._fits(slot):
            return None
        self._admit(slot)
        return slot

    def resize(self, share: Share) -> None:
        """Admit by another share from now on. What is in flight stays, even if it is more."""
        self.share = share
        self._paused = False
        self._wake()

    def pause(self) -> Share:
        """Admit nobody until :meth:`resize`; returns what is in flight."""
        self._paused = True
        return Share(self._in_flight, self._tokens_in_flight)

    def _fits(self, slot: Slot) -> bool:
        if self._paused or self._taken or self._in_flight + 1 > self.window:
            return False
        if self._in_flight == 0:
            return True
        return not slot.alone and slot.tokens <= self.share.tokens - self._tokens_in_flight

    def _admit(self, slot: Slot) -> None:
        slot.tokens = min(slot.tokens, self.share.tokens)
        slot.epoch = self._epoch
        self._in_flight += 1
        self._tokens_in_flight += slot.tokens
        self._taken = slot.alone

    def _give_back(self, slot: Slot) -> None:
        self._in_flight -= 1
        self._tokens_in_flight -= slot.tokens
        self._taken = False  # whoever was alone was the only one
        self._wake()

    async def _queue(self, slot: Slot) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting[slot] = turn
        try:
            await turn
        except BaseException:
            if self._waiting.pop(slot, None) is None:  # cancelled just after its turn came
                self._give_back(slot)
            else:
                self._wake()  # it may have been the one that did not fit
            raise

    def _wake(self) -> None:
        """Admit from the front of the queue; nobody passes the first that does not fit."""
        while self._waiting:
            slot = next(iter(self._waiting))
            if not self._fits(slot):
                return
            self._admit(slot)
            self._waiting.pop(slot).set_result(None)

    def _learn(self, slot: Slot, *, good: bool) -> None:
        if not self.adaptive or slot.epoch != self._epoch:
            return
        whole = max(1, self.share.requests)
        if good:
            self._fraction = min(1.0, self._fraction + 1 / (max(1.0, self.window) * whole))
            self._wake()
        else:
            self._fraction = max(CUT * self._fraction, 1 / whole)
            self._epoch += 1


@dataclass
class _Lease:
    demand: int
    requests: int
    heard: float


class LeaseBook:
    """Splits one teacher's ``total`` among ``members`` agent loops by their demand.

    Everyone has 1 request, kept free for those who have not come yet; the others are split in
    proportion to the demands. Tokens follow the requests. The leases together are never more than
    ``total``: a member grows only by what others gave back when they renewed. Two rounds of
    renewals after the demands were told, all have their part: in the first all that have too much
    give it back, in the second the others take it.

    A member that was not heard of for ``expires_s`` loses its lease, so that must be longer than a
    batch. Raises :class:`ConfigError` if ``total`` has not 1 request for everyone and 1 token for
    every request.
    """

    def __init__(self, total: Share, members: int, *, expires_s: float = 3600.0) -> None:
        if not 1 <= members <= total.requests <= total.tokens:
            raise ConfigError(
                f"{total.requests} requests and {total.tokens} tokens in flight cannot be shared "
                f"by {members} agent loops: each needs a request, and each request a token; raise "
                "max_concurrency or max_tokens_in_flight, or start fewer agent loops"
            )
        self.total = total
        self.members = members
        self.expires_s = expires_s
        self._leases: dict[str, _Lease] = {}

    def renew(self, member: str, demand: int, now: float, in_flight: Share = NOTHING) -> Share:
        """The member's share from ``now`` (seconds) on; joins it if it is new.

        ``demand`` is in any unit that is the same for all members: tokens to be scored, say.
        ``in_flight`` is what the member still uses of its last share: that much stays its own.
        Raises :class:`ConfigError` for a member too many.
        """
        self._expire(now)
        if member not in self._leases:
            self._join(member, now)
        lease = self._leases[member]
        lease.demand, lease.heard = demand, now
        used = max(in_flight.requests, self._requests_of(in_flight.tokens))
        others = sum(other.requests for name, other in self._leases.items() if name != member)
        free = self.total.requests - others - (self.members - len(self._leases))
        lease.requests = max(min(self._part(member), free), min(used, lease.requests))
        return self._share(lease)

    def release(self, member: str) -> None:
        """Take back the lease of a member that leaves; one that has none is no error."""
        self._leases.pop(member, None)

    def shares(self) -> dict[str, Share]:
        """What each member holds."""
        return {member: self._share(lease) for member, lease in self._leases.items()}

    def _join(self, member: str, now: float) -> None:
        if len(self._leases) == self.members:
            raise ConfigError(
                f"{member!r} is one agent loop too many: the leases are for {self.members}, and "
                f"{', '.join(sorted(self._leases))} have them; start the leases for more members"
            )
        self._leases[member] = _Lease(demand=0, requests=1, heard=now)

    def _expire(self, now: float) -> None:
        self._leases = {
            member: lease
            for member, lease in self._leases.items()
            if now - lease.heard < self.expires_s
        }

    def _part(self, member: str) -> int:
        """1 and the member's part of the rest. Rounding the running sum loses no request."""
        rest = self.total.requests - self.members
        all_demand = sum(lease.demand for lease in self._leases.values())
        if all_demand == 0:
            return 1
        before = sum(lease.demand for name, lease in self._leases.items() if name < member)
        upto = before + self._leases[member].demand
        return 1 + rest * upto // all_demand - rest * before // all_demand

    def _requests_of(self, tokens: int) -> int:
        """The fewest requests whose share holds ``tokens``."""
        return -(-tokens * self.total.requests // self.total.tokens)

    def _share(self, lease: _Lease) -> Share:
        return Share(lease.requests, self.total.tokens * lease.requests // self.total.requests)
