"""Teachers in memory and on a loopback socket, honest unless a test says otherwise."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import httpx
import pytest

from opd_core.config import OPDTeacherConfig
from opd_core.scoring.client import TeacherLogprobClient
from opd_core.scoring.facts import TeacherFacts

VOCAB_SIZE = 100


def _logprob(ids: Sequence[int], position: int) -> float:
    """Depends on the token, on the one before it and on the place: any shift changes the number."""
    return -0.25 - (31 * ids[position] + 17 * ids[position - 1] + position) % 97 / 8


def _answer(backend: str, ids: Sequence[int], start: int) -> dict[str, Any]:
    """What an honest server of this kind writes, with the fields around it."""
    scored = range(start + 1, len(ids))
    if backend == "lmdeploy":
        rows: list[list[Any]] = [[_logprob(ids, i), ids[i]] for i in scored]
    else:
        echo = [0 if backend == "sglang" and i == VOCAB_SIZE - 1 else i for i in ids]
        rows = [[None, echo[start], None], *([_logprob(ids, i), echo[i], None] for i in scored)]
    finish = {"type": "length"} if backend == "lmdeploy" else {"type": "length", "length": 0}
    meta = {"finish_reason": finish, "prompt_tokens": len(ids), "input_token_logprobs": rows}
    return {"text": "", "output_ids": [], "meta_info": meta}


class FakeTeacher(httpx.AsyncBaseTransport):
    """A server behind httpx. ``script`` is played first, one step a request: a status, a response,
    an exception to raise, or a function of the request's body; then all answers are honest.

    ``down`` and ``broken`` are hosts that refuse connections, or answer 500.
    """

    def __init__(self) -> None:
        self.backend = "sglang"
        self.script: deque[Any] = deque()
        self.down: set[str] = set()
        self.broken: set[str] = set()
        self.requests: list[httpx.Request] = []
        self.in_flight = self.most_in_flight = 0
        self.work: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0)

    @property
    def hosts(self) -> list[str]:
        """Where each request went."""
        return [request.url.host for request in self.requests]

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.content) for request in self.requests]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        self.requests.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await self.work()
            return await self._respond(request)
        finally:
            self.in_flight -= 1

    async def _respond(self, request: httpx.Request) -> httpx.Response:
        if request.url.host in self.down:
            raise httpx.ConnectError("connection refused")
        if request.url.host in self.broken:
            return httpx.Response(500, json={"error": {"message": "the engine died"}})
        body = json.loads(request.content)
        step = self.script.popleft() if self.script else 200
        if callable(step):
            step = step(body)
            step = await step if isinstance(step, Awaitable) else step
        if isinstance(step, Exception):
            raise step
        if isinstance(step, httpx.Response):
            return step
        if step != 200:
            return httpx.Response(step, json={"message": f"status {step}"})
        answer = _answer(self.backend, body["input_ids"], body["logprob_start_len"])
        return httpx.Response(200, json=answer)


class Naps(list[float]):
    """A sleep that only notes how long it would have been."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)
        await asyncio.sleep(0)


class LoopbackTeacher:
    """An honest server on a real socket: bound at once, so that connections are refused until
    :meth:`listen`. ``work`` runs before each answer."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.work: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0)
        self.cut_next = 0
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, sock=self._socket, backlog=256)

    async def close(self) -> None:
        if self._server is None:
            self._socket.close()
            return
        self._server.close()
        for writer, task in self._connections.items():
            writer.close()
            task.cancel()
        await asyncio.gather(*self._connections.values())
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[writer] = task
        try:
            while await self._serve_one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client has gone, or the test has ended
        finally:
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        request = json.loads(await reader.readexactly(length))
        await self.work()
        answer = json.dumps(
            _answer("sglang", request["input_ids"], request["logprob_start_len"])
        ).encode()
        whole = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer)
        cut = self.cut_next > 0
        self.cut_next -= cut
        writer.write(whole[: len(whole) // 2] if cut else whole)
        await writer.drain()
        return not cut


@pytest.fixture(scope="session")
def vocab_size() -> int:
    return VOCAB_SIZE


@pytest.fixture(scope="session")
def honest_answer() -> Callable[[str, Sequence[int], int], dict[str, Any]]:
    """``honest_answer(backend, ids, start)``: the JSON that such a server writes."""
    return _answer


@pytest.fixture(scope="session")
def true_logprobs() -> Callable[[Sequence[int], int], tuple[float, ...]]:
    """``true_logprobs(ids, start)``: of ``ids[start + 1:]``, without any wire in between."""
    return lambda ids, start: tuple(_logprob(ids, i) for i in range(start + 1, len(ids)))


@pytest.fixture
def fake() -> FakeTeacher:
    return FakeTeacher()


@pytest.fixture
def naps() -> Naps:
    return Naps()


@pytest.fixture(scope="session")
def teacher_config() -> Callable[..., OPDTeacherConfig]:
    """``teacher_config(**fields)`` of OPDTeacherConfig."""
    return lambda **fields: OPDTeacherConfig(
        **({"name": "big"} | ({} if "replicas" in fields else {"endpoint": "http://one"}) | fields)
    )


@pytest.fixture
async def connect(
    fake: FakeTeacher, naps: Naps, teacher_config: Callable[..., OPDTeacherConfig]
) -> AsyncIterator[Callable[..., TeacherLogprobClient]]:
    """``connect(context_length=…, api_key=…, **teacher fields)``: a client before ``fake``."""
    clients = []

    def make(
        *,
        context_length: int = 0,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = fake,
        sleep: Callable[[float], Awaitable[None]] = naps,
        current_facts: Callable[[], TeacherFacts] | None = None,
        facts: TeacherFacts | None = None,
        **fields: Any,
    ) -> TeacherLogprobClient:
        clients.append(
            TeacherLogprobClient(
                teacher_config(**fields),
                facts or TeacherFacts(VOCAB_SIZE, context_length),
                api_key=api_key,
                current_facts=current_facts,
                transport=transport,
                sleep=sleep,
            )
        )
        return clients[-1]

    yield make
    for client in clients:
        await client.aclose()


@pytest.fixture
async def loopback() -> AsyncIterator[LoopbackTeacher]:
    """A teacher on a socket that does not listen yet."""
    teacher = LoopbackTeacher()
    yield teacher
    await teacher.close()
