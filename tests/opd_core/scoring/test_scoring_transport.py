"""Connections over many small pools: none is lost, none waits while there is room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from opd_core.scoring.transport import CONNECTIONS_PER_POOL, PooledTransport

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Answers `/ok`, cuts `/cut`, and lets `/wait` wait until it is released."""

    def __init__(self) -> None:
        self.open = 0
        self.most = 0
        self.waiting = 0
        self.arrived = asyncio.Condition()
        self.release = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if b"/cut" in head:
                    return
                if b"/wait" in head:
                    async with self.arrived:
                        self.waiting += 1
                        self.arrived.notify_all()
                    await self.release.wait()
                writer.write(ANSWER)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def client_of(
    server: Server, connections: int
) -> AsyncIterator[tuple[httpx.AsyncClient, PooledTransport]]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    transport = PooledTransport(connections)
    async with httpx.AsyncClient(
        transport=transport, base_url=f"http://127.0.0.1:{port}", trust_env=False
    ) as http:
        yield http, transport
    listening.close()
    await listening.wait_closed()


async def test_as_many_requests_run_at_once_as_connections_are_allowed() -> None:
    server, count = Server(), 3 * CONNECTIONS_PER_POOL
    async with client_of(server, count) as (http, _):
        requests = [asyncio.create_task(http.get("/wait")) for _ in range(count)]
        async with server.arrived, asyncio.timeout(30):
            await server.arrived.wait_for(lambda: server.waiting == count)
        server.release.set()
        answers = await asyncio.gather(*requests)
        assert [a.content for a in answers] == [b"ok"] * count
        assert server.most == count


async def test_connections_are_used_again() -> None:
    server = Server()
    async with client_of(server, 16) as (http, _):
        for _ in range(40):
            assert (await http.get("/ok")).content == b"ok"
        assert server.most <= 2  # one in each of the two pools


async def test_a_request_that_fails_or_is_cancelled_gives_its_place_back() -> None:
    server = Server()
    async with client_of(server, 2 * CONNECTIONS_PER_POOL) as (http, transport):
        with pytest.raises(httpx.TransportError):
            await http.get("/cut")
        waiting = asyncio.create_task(http.get("/wait"))
        async with server.arrived, asyncio.timeout(30):
            await server.arrived.wait_for(lambda: server.waiting == 1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert (await http.get("/ok")).content == b"ok"
        assert transport._under_way == [0, 0]
        server.release.set()
