"""The servers of one student: which of them is asked, and what becomes of those that are lost.

A server is *lost* when it is dead, hangs, answers rubbish or samples from other weights than it was
given last. Its open requests are ended at once, to be asked again elsewhere, and it is revived:
knocked at until it is well and has the current weights. Only then is it asked again.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

from opd_core.errors import OPDError, SamplersLost
from opd_core.sampling.server_calls import StudentServer
from opd_core.sampling.server_wire import ServerLost
from opd_core.scoring.limits import FlowLimit, Share

KNOCK_EVERY_S = 1.0

logger = logging.getLogger(__name__)


class Replica:
    """One server: ``lost`` says why it is not asked, empty while it is. ``limit`` bounds its
    requests in flight, ``open`` are those; ``progress_at`` is when it last answered or, if nothing
    was in flight, was asked (``time.monotonic``)."""

    def __init__(self, number: int, server: StudentServer, max_rows: int) -> None:
        self.number = number
        self.server = server
        self.limit = FlowLimit(Share(max_rows, sys.maxsize))
        self.open: set[asyncio.Task[bytes]] = set()
        self.lost = ""
        self.progress_at = 0.0

    async def ask(self, body: bytes) -> bytes:
        """The answer to a sampling request. Raises :class:`ServerLost`, also where the replica was
        lost meanwhile, or :class:`SamplingError` for a refusal."""
        if not self.open:
            self.progress_at = time.monotonic()
        request = asyncio.create_task(self.server.post("/generate", body))
        self.open.add(request)
        try:
            answer = await request
        except asyncio.CancelledError:
            asker = asyncio.current_task()
            if asker is not None and asker.cancelling():
                raise
            raise ServerLost(self.lost) from None
        finally:
            self.open.discard(request)
        self.progress_at = time.monotonic()
        return answer


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
            try:
                async with asyncio.timeout(max(left_s, 0)):
                    await self._some_present.wait()
            except TimeoutError:
                reasons = "; ".join(f"server {r.number}: {r.lost}" for r in self.all)
                raise SamplersLost(
                    f"no sampling server could be asked for {self._away_limit_s:.0f} s "
                    f"({reasons}): look at the servers' logs"
                ) from None

    async def aclose(self) -> None:
        """Stop reviving."""
        tasks = self._reviving.values()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_revived(self, replica: Replica) -> None:
        while replica.lost:
            await self._sleep(KNOCK_EVERY_S)
            try:
                await self._revive(replica)
            except OPDError as error:
                replica.lost = str(error)
