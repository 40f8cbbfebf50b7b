"""The scoring client against a bare load loop, on the embedded server with the tiny teacher."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import orjson

from opd_core.config import OPDTeacherConfig
from opd_core.lifecycle.ports import reserve_ports
from opd_core.scoring.client import TeacherFacts, TeacherLogprobClient
from opd_core.scoring.wire import build_request
from opd_core.serving.readiness import wait_until_healthy

TEACHER = Path("deployments/recipes/assets/tiny/teacher")
REQUESTS, CONCURRENCY, ROUNDS = 1000, 64, 3
PROMPT, RESPONSE = tuple(range(2, 10)), tuple(4 + i % 12 for i in range(20))


async def bare(endpoint: str) -> float:
    """Posts and parses JSON, checks nothing."""
    slots = asyncio.Semaphore(CONCURRENCY)
    body = orjson.dumps(build_request("embedded", [*PROMPT, *RESPONSE], len(PROMPT) - 1))
    limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(limits=limits, trust_env=False, headers=headers) as http:

        async def one() -> None:
            async with slots:
                orjson.loads((await http.post(f"{endpoint}/generate", content=body)).content)

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(REQUESTS)))
        return REQUESTS / (time.perf_counter() - began)


async def ours(endpoint: str) -> float:
    """The client with all its checks."""
    teacher = OPDTeacherConfig(
        name="teacher", endpoint=endpoint, backend="embedded", max_concurrency=CONCURRENCY
    )
    async with TeacherLogprobClient(teacher, TeacherFacts(32)) as client:
        began = time.perf_counter()
        await asyncio.gather(*(client.score(PROMPT, RESPONSE) for _ in range(REQUESTS)))
        return REQUESTS / (time.perf_counter() - began)


def run() -> Iterator[str]:
    """Requests per second of both, best of three rounds in turns, and the ratio."""
    with reserve_ports(1) as reserved:
        (port,) = reserved.ports
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "opd_core.serving.embedded", "--model-path", str(TEACHER)]
    command += ["--port", str(port), "--log-level", "warning"]
    server = subprocess.Popen(command)
    try:
        wait_until_healthy(endpoint, "embedded", limit_s=120, still_alive=lambda: None)
        best = {"bare": 0.0, "ours": 0.0}
        for _ in range(ROUNDS):
            best["bare"] = max(best["bare"], asyncio.run(bare(endpoint)))
            best["ours"] = max(best["ours"], asyncio.run(ours(endpoint)))
    finally:
        server.terminate()
        server.wait(timeout=30)
    for name, speed in best.items():
        yield f"{name:5} {speed:,.0f} requests/s at concurrency {CONCURRENCY}"
    yield f"ours / bare: {best['ours'] / best['bare']:.2f}"
