"""The servers behind a teacher's name: which one is asked next, and which are left alone.

A group keeps to one replica, whose prefix cache holds its prompt; the next attempt goes to the
next one. A replica is *away* when nobody answers there, when it failed several times in a row, or
when it was found to give other numbers than before. It is then asked for nothing but one known
sequence at a time (a knock), and comes back as soon as a knock is answered as it should be.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opd_core.config import Backend, ReplicaConfig
from opd_core.errors import ScoringError, TeacherAnswerError, TeacherAway

logger = logging.getLogger(__name__)

KNOCK_EVERY_S = 1.0
AWAY_AFTER = 5
"""Failures in a row, of any requests, after which a replica is no longer asked."""


@dataclass(slots=True, eq=False)
class Replica:
    """One server. ``away`` says why it is not asked; empty while it is. ``doubt`` says why what it
    scored lately is not to be believed, until that is taken; ``changed`` counts how often there was
    cause for it. ``progress_at`` is when its last good answer
    came or, if none has come since, when the first of the requests ``in_flight`` was sent (seconds
    since the epoch)."""

    number: int
    backend: Backend
    endpoint: str
    away: str = ""
    failures: int = 0
    doubt: str = ""
    changed: int = 0
    in_flight: int = 0
    progress_at: float = 0.0

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Count one request while it is in flight."""
        if not self.in_flight:
            self.progress_at = time.time()
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def doubted(self, why: str) -> None:
        """It answers a known sequence wrongly, or with other numbers than before."""
        self.changed += not self.doubt
        self.doubt = why

    def take_doubt(self) -> str:
        """Why its scores are in doubt, or ""; asked once."""
        doubt, self.doubt = self.doubt, ""
        return doubt

    def answered(self) -> None:
        """It gave a good answer."""
        self.failures = 0
        self.progress_at = time.time()


class Replicas:
    """All servers of one teacher. ``knock`` raises :class:`ScoringError` unless the replica
    scores; ``on_change`` is called whenever one goes or comes back."""

    def __init__(
        self,
        teacher: str,
        configs: Iterable[ReplicaConfig],
        *,
        knock: Callable[[Replica], Awaitable[None]],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.all = tuple(
            Replica(number, config.backend, str(config.endpoint))
            for number, config in enumerate(configs)
        )
        self._teacher = teacher
        self._knock = knock
        self._sleep = sleep
        self._on_change = on_change
        self._came_back = asyncio.Event()
        self._away_since = 0.0
        self._knocking: dict[int, asyncio.Task[None]] = {}

    @property
    def all_away(self) -> bool:
        """Whether there is nobody to ask."""
        return all(replica.away for replica in self.all)

    def pick(self, turn: int, *, only: bool = False) -> Replica | None:
        """The replica whose turn it is, or the next one that is not away; None if all are. With
        ``only`` there is no next one."""
        count = len(self.all)
        in_turn = (self.all[(turn + step) % count] for step in range(1 if only else count))
        return next((replica for replica in in_turn if not replica.away), None)

    def failed(self, replica: Replica, why: str) -> None:
        """It failed once; too often in a row, and it is away."""
        replica.failures += 1
        if replica.failures >= AWAY_AFTER:
            self.lose(replica, why)

    def lose(self, replica: Replica, why: str) -> None:
        """Stop asking it, for ``why``, and knock until it is back."""
        if replica.away:
            return
        replica.away = why
        if self.all_away:
            self._away_since = time.monotonic()
            self._came_back.clear()
        logger.warning("teacher %r, replica %d is away: %s", self._teacher, replica.number, why)
        self._knocking[replica.number] = asyncio.create_task(self._knock_until_back(replica))
        self._on_change()

    async def wait_for_one(self, limit_s: float) -> None:
        """Return once somebody can be asked. Raises :class:`TeacherAway`, with the reasons, when
        all have been away for ``limit_s``."""
        while self.all_away:
            left_s = self._away_since + limit_s - time.monotonic()
            try:
                async with asyncio.timeout(max(left_s, 0)):
                    await self._came_back.wait()
            except TimeoutError:
                reasons = "; ".join(f"{replica.endpoint}: {replica.away}" for replica in self.all)
                raise TeacherAway(
                    f"teacher {self._teacher!r}: nobody could be asked for {limit_s:.0f} s "
                    f"({reasons})",
                    "away",
                ) from None

    async def aclose(self) -> None:
        """Stop knocking."""
        for task in self._knocking.values():
            task.cancel()
        await asyncio.gather(*self._knocking.values(), return_exceptions=True)

    async def _knock_until_back(self, replica: Replica) -> None:
        while True:
            await self._sleep(KNOCK_EVERY_S)
            try:
                await self._knock(replica)
            except ScoringError as error:
                replica.away = str(error)
                if isinstance(error, TeacherAnswerError):
                    replica.doubted(str(error))
                continue
            break
        replica.away, replica.failures = "", 0
        self._came_back.set()
        logger.warning("teacher %r, replica %d is back", self._teacher, replica.number)
        self._on_change()
