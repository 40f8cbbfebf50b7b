"""An agent loop for ``test_leases``: a Ray actor with its own limit, which asks a counting
server."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from opd_core.scoring.limits import FlowLimit, Share
from opd_core.training.leases import LeasedLimit

WHOLE = Share(8, 800)


class CountedLoop:
    """``batch`` sends requests as fast as its lease lets it."""

    def __init__(self, name: str, leases: Any, port: int) -> None:
        self._leased = LeasedLimit(leases, name, FlowLimit(WHOLE))
        self._port = port

    async def batch(self, requests: int) -> int:
        """Ask for so many scores, all at once; returns the requests of the share."""
        share = await self._leased.begin_batch(requests)
        await asyncio.gather(*(self._ask() for _ in range(requests)))
        return share.requests

    async def _ask(self) -> None:
        async with self._leased.limit.slot(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            assert await reader.read() == b"scored"
            writer.close()
            await writer.wait_closed()


def start_loop(name: str, leases: Any, port: int) -> Any:
    """The handle of one agent loop in its own process."""
    return ray.remote(CountedLoop).options(num_cpus=0).remote(name, leases, port)
