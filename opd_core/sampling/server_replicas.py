"""The servers of one student: which of them is asked, and what becomes of those that are lost.

A server is *lost* when it is dead, hangs, answers rubbish or samples from other weights than it was
given last. Its open requests are ended at once, to be asked again elsewhere, and it is revived:
knocked at until it is well and has the current weights. Only then is it asked again. One failure
that may pass (5xx, 429, a connection that broke off) makes no loss: the request is sent once more.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from opd_core.errors import OPDError, SamplersLost, SamplingError
from opd_core.sampling.server_calls import ServerAway, StudentServer
from opd_core.sampling.server_wire import ServerLost
from opd_core.scoring.limits import FlowLimit, Share

KNOCK_EVERY_S = 1.0
AGAIN_AFTER_S = 0.5
"""A failed request is sent once more after so long: time for a server that dies to be seen dead."""
ALONE_AFTER = 2
"""A request that a server was lost with so often goes alone: it may be the cause."""
UNANSWERED = 3
"""So often a request may get no answer within its limit."""

logger = logging.getLogger(__name__)


class Replica:
    """One server: ``lost`` says why it is not asked, empty while it is. ``limit`` bounds its
    requests in flight, ``open`` are those; ``progress_at`` is when it last answered or, if nothing
    was in flight, was asked (``time.monotonic``). ``sleep`` is a seam for tests."""

    def __init__(
        self,
        number: int,
        server: StudentServer,
        max_rows: int,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._sleep = sleep
        self.number = number
        self.server = server
        self.limit = FlowLimit(Share(max_rows, sys.maxsize))
        self.open: set[asyncio.Task[bytes]] = set()
        self.lost = ""
        self.progress_at = 0.0

    async def ask(self, body: bytes) -> bytes:
        """The answer to a sampling request. Raises :class:`ServerLost` if it failed twice,
        :class:`ServerAway` where the replica was lost for another reason meanwhile, or
        :class:`SamplingError` for a refusal."""
        if not self.open:
            self.progress_at = time.monotonic()
        failed: list[ServerLost] = []
        request = asyncio.create_task(self._post(body, failed))
        self.open.add(request)
        try:
            answer = await request
        except asyncio.CancelledError:
            asker = asyncio.current_task()
            if asker is not None and asker.cancelling():
                raise
            raise (failed[0] if failed else ServerAway(self.lost)) from None
        finally:
            self.open.discard(request)
        self.progress_at = time.monotonic()
        return answer

    async def _post(self, body: bytes, failed: list[ServerLost]) -> bytes:
        """The first failure goes into ``failed`` and is what is raised after the second: to find
        nobody there any more says less."""
        try:
            return await self.server.post("/generate", body)
        except ServerAway:
            raise
        except ServerLost as error:
            failed.append(error)
        await self._sleep(AGAIN_AFTER_S)
        try:
            return await self.server.post("/generate", body)
        except ServerLost:
            raise failed[0] from None


class Trials:
    """What befell one request until now: whose fault it may be shows when it repeats itself."""

    def __init__(self, key: tuple[int, int]) -> None:
        self._key = key
        self._losses = 0
        self._unanswered = 0

    @property
    def alone(self) -> bool:
        """Whether it must be the only one on its server."""
        return self._losses >= ALONE_AFTER

    def count_loss(self, error: ServerLost) -> None:
        """A server was lost: with this request, unless it was only away. Raises
        :class:`SamplingError` if that befell it while it was alone."""
        self._losses += not isinstance(error, ServerAway)
        if self._losses > ALONE_AFTER:
            raise SamplingError(
                f"rollout {self._key}: servers were lost with it {self._losses} times, the last "
                f"time while it was alone ({error}): look at the server's log"
            ) from None

    def count_no_answer(self, limit_s: float) -> None:
        """A server that is well did not answer it. Raises :class:`SamplingError` if none does."""
        self._unanswered += 1
        if self._unanswered == UNANSWERED:
            raise SamplingError(
                f"rollout {self._key}: servers that are well did not answer it within "
                f"{limit_s:.0f} s, {self._unanswered} times: look at the server's log"
            ) from None


class Replicas:
    """All of them. ``revive`` returns when a lost one is well and has been given the current
    weights, and calls :meth:`back`; it raises :class:`OPDError` as long as that fails. ``sleep`` is
    a seam for tests."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        revive: Callable[[Replica], Awaitable[None]],
        away_limit_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.all = tuple(replicas)
        self.revived = 0
        self._revive = revive
        self._away_limit_s = away_limit_s
        self._sleep = sleep
        self._some_present = asyncio.Event()
        self._some_present.set()
        self._none_since = 0.0
        self._reviving: dict[int, asyncio.Task[None]] = {}

    @property
    def present(self) -> list[Replica]:
        """Those that are not lost."""
        return [replica for replica in self.all if not replica.lost]

    def pick(self, group_id: int) -> Replica | None:
        """The one that a group keeps to as long as none is lost; None if all are."""
        present = self.present
        return present[group_id % len(present)] if present else None

    def lose(self, replica: Replica, why: str) -> None:
        """Stop asking it, for ``why``, end its open requests, and begin to revive it."""
        if replica.lost:
            return
        replica.lost = why
        logger.warning("sampling server %d is lost: %s", replica.number, why)
        if not self.present:
            self._none_since = time.monotonic()
            self._some_present.clear()
        for request in replica.open:
            request.cancel()
        self._reviving[replica.number] = asyncio.create_task(self._until_revived(replica))

    def back(self, replica: Replica) -> None:
        """It can be asked again."""
        replica.lost = ""
        self.revived += 1
        self._some_present.set()
        where = replica.server.endpoint
        logger.warning("sampling server %d is back at %s", replica.number, where)

    async def wait_for_one(self) -> None:
        """Return once one can be asked. Raises :class:`SamplersLost`, with the reasons, when all
        have been lost for ``away_limit_s``."""
        while not self.present:
            left_s = self._none_since + self._away_limit_s - time.monotonic()
            if left_s <= 0:
                reasons = "; ".join(f"server {r.number}: {r.lost}" for r in self.all)
                raise SamplersLost(
                    f"no sampling server could be asked for {self._away_limit_s:.0f} s "
                    f"({reasons}): look at the servers' logs"
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._some_present.wait()

    def woken(self) -> None:
        """Nobody could come back while the servers slept: ``away_limit_s`` begins anew."""
        self._none_since = time.monotonic()

    async def aclose(self) -> None:
        """Stop reviving."""
        tasks = self._reviving.values()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_revived(self, replica: Replica) -> None:
        """Whatever goes wrong, go on knocking; ``lost`` says why it was lost and what came last."""
        first = replica.lost
        while replica.lost:
            await self._sleep(KNOCK_EVERY_S)
            try:
                await self._revive(replica)
            except Exception as error:
                said = str(error) if isinstance(error, OPDError) else repr(error)
                why = first if said == first else f"{first}; now {said}"
                if why != replica.lost and not isinstance(error, OPDError):
                    logger.exception("sampling server %d cannot be revived", replica.number)
                replica.lost = why
