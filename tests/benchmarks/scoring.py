"""The scoring client against what its limit allows (a teacher of fixed latency), and against a
bare load loop (the embedded server with the tiny teacher)."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import orjson

from opd_core.config import OPDTeacherConfig
from opd_core.lifecycle.ports import reserve_ports
from opd_core.scoring.client import TeacherLogprobClient
from opd_core.scoring.facts import TeacherFacts
from opd_core.scoring.transport import PooledTransport
from opd_core.scoring.wire import request_body
from opd_core.serving.readiness import wait_until_healthy

TEACHER = Path("deployments/recipes/assets/tiny/teacher")
REQUESTS, CONCURRENCY, ROUNDS = 1024, 64, 3
LATENCIES_S, MANY, WIDE = (0.2, 1.0), 5000, 512
PROMPT, RESPONSE = tuple(range(2, 10)), tuple(4 + i % 12 for i in range(20))


async def bare(endpoint: str, *, pooled: bool) -> float:
    """Requests per second of a loop that posts and parses JSON, and checks nothing."""
    slots = asyncio.Semaphore(CONCURRENCY)
    body = request_body("embedded", [*PROMPT, *RESPONSE], len(PROMPT) - 1)
    limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    headers = {"content-type": "application/json"}
    transport = PooledTransport(CONCURRENCY) if pooled else None
    async with httpx.AsyncClient(
        limits=limits, trust_env=False, headers=headers, transport=transport
    ) as http:

        async def one() -> None:
            async with slots:
                orjson.loads((await http.post(f"{endpoint}/generate", content=body)).content)

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(REQUESTS)))
        return REQUESTS / (time.perf_counter() - began)


async def ours(endpoint: str, requests: int, concurrency: int) -> float:
    """Requests per second of the client with all its checks, adaptation off."""
    async with _client(endpoint, concurrency) as client:
        await asyncio.gather(*(client.score(PROMPT, RESPONSE) for _ in range(concurrency)))
        began = time.perf_counter()
        await asyncio.gather(*(client.score(PROMPT, RESPONSE) for _ in range(requests)))
        return requests / (time.perf_counter() - began)


def _client(endpoint: str, concurrency: int) -> TeacherLogprobClient:
    teacher = OPDTeacherConfig(
        name="teacher",
        endpoint=endpoint,
        backend="embedded",
        max_concurrency=concurrency,
        adaptive=False,
    )
    return TeacherLogprobClient(teacher, TeacherFacts(32))


async def wide(endpoint: str) -> tuple[float, list[float]]:
    """Best speed of many requests at once, and the memory held after each round."""
    speeds, resident_mb = [], []
    async with _client(endpoint, WIDE) as client:
        for _ in range(ROUNDS):
            began = time.perf_counter()
            await asyncio.gather(*(client.score(PROMPT, RESPONSE) for _ in range(MANY)))
            speeds.append(MANY / (time.perf_counter() - began))
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident_mb.append(pages * resource.getpagesize() / 2**20)
    return max(speeds), resident_mb


def run() -> Iterator[str]:
    """Best of three rounds in turns, and the ratios."""
    yield from _fixed_latency()
    yield from _embedded()


def _fixed_latency() -> Iterator[str]:
    for latency_s in LATENCIES_S:
        with fixed_latency_server(latency_s) as endpoint:
            speed = max(asyncio.run(ours(endpoint, REQUESTS, CONCURRENCY)) for _ in range(ROUNDS))
        allowed = CONCURRENCY / latency_s
        yield (
            f"fixed latency {latency_s} s, concurrency {CONCURRENCY}: {speed:,.0f} requests/s, "
            f"{speed / allowed:.3f} of the {allowed:,.0f} that the limit allows"
        )
    with fixed_latency_server(LATENCIES_S[0]) as endpoint:
        speed, resident_mb = asyncio.run(wide(endpoint))
        yield (
            f"{MANY} requests at concurrency {WIDE}: {speed:,.0f} requests/s; memory after each "
            f"{MANY}: {', '.join(f'{size:.0f}' for size in resident_mb)} MB"
        )


def _embedded() -> Iterator[str]:
    with reserve_ports(1) as reserved:
        (port,) = reserved.ports
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "opd_core.serving.embedded", "--model-path", str(TEACHER)]
    command += ["--port", str(port), "--log-level", "warning"]
    best = {"plain httpx": 0.0, "bare loop": 0.0, "ours": 0.0}
    with server(command):
        wait_until_healthy(endpoint, "embedded", limit_s=120, still_alive=lambda: None)
        for _ in range(ROUNDS):
            speeds = (
                asyncio.run(bare(endpoint, pooled=False)),
                asyncio.run(bare(endpoint, pooled=True)),
                asyncio.run(ours(endpoint, REQUESTS, CONCURRENCY)),
            )
            best = {n: max(best[n], speed) for n, speed in zip(best, speeds, strict=True)}
    for name, speed in best.items():
        yield f"embedded, {name}: {speed:,.0f} requests/s at concurrency {CONCURRENCY}"
    yield f"ours / bare loop: {best['ours'] / best['bare loop']:.2f}"


@contextmanager
def fixed_latency_server(latency_s: float, *, serial: bool = False) -> Iterator[str]:
    """Its endpoint."""
    with reserve_ports(1) as reserved:
        (port,) = reserved.ports
    command = [sys.executable, "-m", "tests.benchmarks.fixed_latency", str(port), str(latency_s)]
    command += ["serial"] if serial else []
    with server(command) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield f"http://127.0.0.1:{port}"


@contextmanager
def server(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process for as long as the block lasts."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=30)
