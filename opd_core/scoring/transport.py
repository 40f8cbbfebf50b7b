"""HTTP connections for many requests at once, at a bounded cost for each.

httpcore compares all idle connections of a pool with each other at every request: with 64 of
them in one pool a request cost 8 ms of CPU. Many small pools behind one transport cost a tenth
of that.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from typing import cast

import httpx

CONNECTIONS_PER_POOL = 8
KEEP_ALIVE_S = 3.0
"""Uvicorn, which the servers use, closes an idle connection after 5 s; a request that is sent at
that very moment would be lost."""


class PooledTransport(httpx.AsyncBaseTransport):
    """At most ``connections`` at once, over pools of :data:`CONNECTIONS_PER_POOL`. A request
    goes to the pool with the fewest under way, so that none waits while another pool has
    room."""

    def __init__(self, connections: int) -> None:
        limits = httpx.Limits(
            max_connections=CONNECTIONS_PER_POOL,
            max_keepalive_connections=CONNECTIONS_PER_POOL,
            keepalive_expiry=KEEP_ALIVE_S,
        )
        self._pools = [
            httpx.AsyncHTTPTransport(limits=limits, trust_env=False)
            for _ in range(math.ceil(connections / CONNECTIONS_PER_POOL))
        ]
        self._under_way = [0] * len(self._pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; its pool counts it until the answer's body is closed."""
        index = self._under_way.index(min(self._under_way))
        self._under_way[index] += 1

        def done() -> None:
            self._under_way[index] -= 1

        try:
            response = await self._pools[index].handle_async_request(request)
        except BaseException:
            done()
            raise
        response.stream = _Watched(cast(httpx.AsyncByteStream, response.stream), done)
        return response

    async def aclose(self) -> None:
        """Close all connections."""
        for pool in self._pools:
            await pool.aclose()


class _Watched(httpx.AsyncByteStream):
    """A body that says once when it is closed."""

    def __init__(self, body: httpx.AsyncByteStream, done: Callable[[], None]) -> None:
        self._body = body
        self._done: Callable[[], None] | None = done

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._body:
            yield chunk

    async def aclose(self) -> None:
        try:
            await self._body.aclose()
        finally:
            if self._done is not None:
                self._done()
                self._done = None
