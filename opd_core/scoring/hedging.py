"""Asking twice when the first answer is late: the slow tail of a replica costs a second request,
not the whole step (Dean & Barroso 2013, "The Tail at Scale")."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from opd_core.errors import ScoringError

T = TypeVar("T")


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
