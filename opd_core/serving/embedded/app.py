"""The HTTP application before a scorer: routes, the API key, errors as SGLang's statuses."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from opd_core.serving.embedded.batching import (
    BatchingScorer,
    QueueFull,
    ScorerUnavailable,
    ScoringFailed,
)
from opd_core.serving.embedded.health import HealthProbe
from opd_core.serving.embedded.requests import RequestRefused
from opd_core.serving.embedded.wire import (
    WEIGHT_VERSION,
    MalformedRequest,
    build_answer,
    parse_generate,
)

T = TypeVar("T")

OPEN_PATHS = frozenset({"/health", "/health_generate"})
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; the access log's usual number


def create_app(
    scorer: BatchingScorer,
    *,
    served_model_name: str = "teacher",
    api_key: str | None = None,
    health_timeout_s: float = 20.0,
    health_recent_s: float = 5.0,
) -> Starlette:
    """The HTTP application before ``scorer``, which the caller starts and closes.

    health_timeout_s: longest wait of a health request for its probe. health_recent_s: how long a
    finished batch counts as proof of life.
    """
    health = HealthProbe(scorer, timeout_s=health_timeout_s, recent_s=health_recent_s)
    ends = _Endpoints(scorer, served_model_name=served_model_name, health=health)
    return Starlette(
        routes=[
            Route("/generate", ends.generate, methods=["POST"]),
            Route("/health", ends.health),
            Route("/health_generate", ends.health),
            Route("/model_info", ends.model_info),
            Route("/get_model_info", ends.model_info),
            Route("/server_info", ends.server_info),
            Route("/get_server_info", ends.server_info),
            Route("/v1/models", ends.models),
        ],
        middleware=[Middleware(_BearerAuth, api_key=api_key)] if api_key else [],
        exception_handlers={
            RequestRefused: _refused,
            MalformedRequest: _as_status(400, "Bad Request"),
            QueueFull: _as_status(503),
            ScorerUnavailable: _as_status(503),
            ScoringFailed: _as_status(500),
            ClientDisconnect: _as_status(CLIENT_CLOSED_REQUEST),
        },
    )


class _Endpoints:
    """The handlers of the routes; owns the threads that read and write JSON."""

    def __init__(
        self, scorer: BatchingScorer, *, served_model_name: str, health: HealthProbe
    ) -> None:
        self._scorer = scorer
        self._name = served_model_name
        self._health = health
        self._started_at = int(time.time())
        # Megabytes of JSON must not stop the event loop, and the loop's own pool would be joined
        # at exit however long that takes.
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="teacher-json")

    async def generate(self, request: Request) -> Response:
        """POST /generate: score the sequences of the body."""
        began = time.monotonic()
        body = await request.body()
        model = self._scorer.model
        ask = await self._off_loop(partial(parse_generate, body))
        if ask.return_text and model.texts([]) is None:
            raise RequestRefused(
                "return_text_in_logprobs needs a tokenizer and none could be loaded: "
                "send false and decode the ids yourself."
            )
        requests = [row.request for row in ask.rows]
        futures = await self._off_loop(partial(self._scorer.submit, requests))
        scored = asyncio.gather(*map(asyncio.wrap_future, futures))
        results = await _unless_disconnected(request, scored)
        latency_s = time.monotonic() - began
        texts = model.texts if ask.return_text else None
        build = partial(build_answer, ask, results, texts=texts, latency_s=latency_s)
        return _json_response(await self._off_loop(build))

    async def health(self, request: Request) -> Response:
        """GET /health and /health_generate: 200 if the server scores, else 503; no body."""
        return Response(status_code=200 if await self._health.alive() else 503)

    async def model_info(self, request: Request) -> Response:
        """GET /model_info: what is served."""
        return _json(self._info())

    async def server_info(self, request: Request) -> Response:
        """GET /server_info: what is served and how much of it has been done."""
        return _json(self._info() | asdict(self._scorer.stats()))

    async def models(self, request: Request) -> Response:
        """GET /v1/models in OpenAI's list shape."""
        facts = self._scorer.model.facts
        card = {
            "id": self._name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "opd",
            "root": facts.model_path,
            "parent": None,
            "max_model_len": facts.context_length,
        }
        return _json({"object": "list", "data": [card]})

    def _info(self) -> dict[str, object]:
        facts = self._scorer.model.facts
        return asdict(facts) | {
            "tokenizer_path": facts.model_path,
            "served_model_name": self._name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": WEIGHT_VERSION,
            "max_req_input_len": facts.max_input_length,
            "server": "opd-embedded",
        }

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


async def _unless_disconnected(request: Request, work: asyncio.Future[T]) -> T:
    """Await ``work``, but cancel it and raise ``ClientDisconnect`` once the client has gone."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.ensure_future(disconnected())
    either: set[asyncio.Future[Any]] = {work, watcher}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        watcher.cancel()
        work.cancel()


class _BearerAuth:
    """Refuses every path but the health checks unless the request carries the API key."""

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            came = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(came, self._expected):
                await _json({"error": "Unauthorized"}, status=401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _json(value: object, status: int = 200) -> Response:
    return _json_response(orjson.dumps(value), status)


def _json_response(body: bytes, status: int = 200) -> Response:
    return Response(body, status_code=status, media_type="application/json")


def _refused(request: Request, error: Exception) -> Response:
    return _json({"error": {"message": str(error)}}, status=400)


def _as_status(
    status: int, kind: str | None = None
) -> Callable[[Request, Exception], Awaitable[Response]]:
    """A handler that answers an exception in SGLang's ``{"object": "error", ...}`` shape."""

    async def handle(request: Request, error: Exception) -> Response:
        fields = {"object": "error", "message": str(error), "type": kind or str(status)}
        return _json(fields | {"code": status}, status=status)

    return handle
