"""Who goes first where siblings share a prompt.

A server computes a prompt once for those that come after the first answer, and again for each of
those that come beside it: of 8 siblings sent at once, SGLang computed the prompt 8 times.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

REMEMBERED = 1024


class PrefixOrder:
    """Lets the first request of a group go ahead; the others wait until it is answered, or fails
    once."""

    def __init__(self) -> None:
        self._ahead: dict[int, asyncio.Event] = {}
        self._begun: deque[int] = deque(maxlen=REMEMBERED)

    async def wait(self, group_id: int) -> None:
        """Return once nobody of the group is ahead."""
        if (ahead := self._ahead.get(group_id)) is not None:
            await ahead.wait()

    @contextmanager
    def ahead(self, group_id: int) -> Iterator[Callable[[], None]]:
        """Go ahead of the group, if nobody does; yields what lets the others go early."""
        if group_id in self._ahead or group_id in self._begun:
            yield lambda: None
            return
        self._ahead[group_id] = asyncio.Event()
        self._begun.append(group_id)

        def let_go() -> None:
            if (ahead := self._ahead.pop(group_id, None)) is not None:
                ahead.set()

        try:
            yield let_go
        finally:
            let_go()
