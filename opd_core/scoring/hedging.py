"""Asking twice when the first answer is late: the slow tail of a replica costs a second request,
not the whole step (Dean & Barroso 2013, "The Tail at Scale")."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from opd_core.errors import ScoringError

T = TypeVar("T")
KEPT, NEEDED = 256, 64


class Tail:
    """The latencies of the last good answers."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=KEPT)

    def record(self, latency_s: float) -> None:
        """Take in one."""
        self._last.append(latency_s)

    def p99_s(self) -> float | None:
        """The time within which 99 % of them came; None while there are too few to tell."""
        if len(self._last) < NEEDED:
            return None
        return sorted(self._last)[math.ceil(0.99 * len(self._last)) - 1]


async def first_good(
    first: Awaitable[T],
    second: Callable[[], Awaitable[T]],
    *,
    after_s: float,
    slot: Callable[[], AbstractContextManager[object] | None],
) -> T:
    """The first good answer: of ``first`` alone within ``after_s``, then of both.

    The second is asked only where ``slot`` has room for it; whichever is not needed any more is
    cancelled. Raises the first one's error if both fail.
    """
    tasks = [asyncio.ensure_future(first)]
    try:
        await asyncio.wait(tasks, timeout=after_s)
        room = None if tasks[0].done() else slot()
        if room is None:
            return await tasks[0]
        with room:
            tasks.append(asyncio.ensure_future(second()))
            for answer in asyncio.as_completed(tasks):
                try:
                    return await answer
                except ScoringError:
                    continue
            return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
