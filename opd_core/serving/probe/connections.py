"""What a server does with a connection that idles, and with a request that comes slowly.

Below HTTP clients, which hide both: plain sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from opd_core.serving.probe.checks import Check

IDLE_LIMIT_S = 6.0
SLOW_S = 1.5
ANSWER_LIMIT_S = 30.0
CONNECT_LIMIT_S = 10.0


async def check_connections(
    endpoint: str,
    health_path: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    idle_limit_s: float = IDLE_LIMIT_S,
    slow_s: float = SLOW_S,
) -> tuple[Check, Check]:
    """Both at the same time. ``body`` is a scoring request, ``headers`` go with it."""
    return await asyncio.gather(
        _check_idle(endpoint, health_path, idle_limit_s),
        _check_slow(endpoint, headers, body, slow_s),
    )


async def _check_idle(endpoint: str, path: str, limit_s: float) -> Check:
    name, closed_s = "idle connection", None
    try:
        async with _connection(endpoint) as (reader, writer):
            writer.write(_head(endpoint, "GET", path, {}))
            await writer.drain()
            closed_s = await _closed_after(reader, limit_s)
    except (OSError, TimeoutError) as error:
        return Check(name, "unknown", f"could not be tried: {error or type(error).__name__}")
    if closed_s is None:
        return Check(name, "pass", f"still open after {limit_s:g} s")
    return Check(name, "pass", f"closed by the server after {closed_s:.1f} s")


async def _closed_after(reader: asyncio.StreamReader, limit_s: float) -> float | None:
    """Seconds from the last byte of the answer to the end of the connection."""
    async with asyncio.timeout(ANSWER_LIMIT_S):
        await reader.readuntil(b"\r\n\r\n")
    while True:
        idle_since = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                if not await reader.read(65536):
                    return time.monotonic() - idle_since
        except TimeoutError:
            return None


async def _check_slow(
    endpoint: str, headers: Mapping[str, str], body: bytes, slow_s: float
) -> Check:
    name, half = "slow request", len(body) // 2
    try:
        async with _connection(endpoint) as (reader, writer):
            length = {"content-type": "application/json", "content-length": str(len(body))}
            writer.write(_head(endpoint, "POST", "/generate", {**headers, **length}) + body[:half])
            await writer.drain()
            await asyncio.sleep(slow_s)
            writer.write(body[half:])
            await writer.drain()
            async with asyncio.timeout(ANSWER_LIMIT_S):
                line = (await reader.readline()).decode("latin-1").strip()
    except (OSError, TimeoutError) as error:
        line = str(error) or type(error).__name__
    if " 200" in line:
        return Check(name, "pass", f"a pause of {slow_s:g} s inside a request is borne")
    found = f"a pause of {slow_s:g} s inside a request ends in: {line or 'no answer'}"
    return Check(name, "warn", found, "long prompts over a slow network may be cut off")


@asynccontextmanager
async def _connection(
    endpoint: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    parts = urlsplit(endpoint)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    async with asyncio.timeout(CONNECT_LIMIT_S):
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure or None)
    try:
        yield reader, writer
    finally:
        writer.close()


def _head(endpoint: str, method: str, path: str, headers: Mapping[str, str]) -> bytes:
    parts = urlsplit(endpoint)
    lines = [f"{method} {parts.path}{path} HTTP/1.1", f"host: {parts.netloc}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()
