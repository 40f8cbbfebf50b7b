"""Who goes first where siblings share a prompt.

A server computes a prompt once for those that come after the first answer, and again for each of
those that come beside it: of 8 siblings sent at once, SGLang computed the prompt 8 times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PrefixOrder:
    """Lets one request of a group go ahead; the others wait until it is answered, or fails."""

    def __init__(self) -> None:
        self._ahead: dict[int, asyncio.Event] = {}

    async def wait(self, group_id: int) -> None:
        """Return once nobody of the group is ahead."""
        if (ahead := self._ahead.get(group_id)) is not None:
            await ahead.wait()

    @contextmanager
    def ahead(self, group_id: int) -> Iterator[Callable[[], None]]:
        """Go ahead of the group, if nobody does; yields what lets the others go early."""
        event = asyncio.Event()
        leads = self._ahead.setdefault(group_id, event) is event

        def let_go() -> None:
            event.set()
            if leads:
                self._ahead.pop(group_id, None)

        try:
            yield let_go
        finally:
            let_go()
