"""The layer before the application that lets things go wrong as a script says.

It stands inside the check of the API key. Until the model is loaded it does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opd_core.errors import ConfigError
from opd_core.serving.embedded.app import OPEN_PATHS
from opd_core.serving.embedded.batching import BatchingScorer, ScorerUnavailable
from opd_core.serving.embedded.chaos_answers import OwnModel, spoil
from opd_core.serving.embedded.chaos_script import (
    RequestFault,
    ScriptRun,
    Slow,
    Status,
    parse_script,
    read_script,
)
from opd_core.serving.embedded.requests import RequestRefused, ScoreRequest
from opd_core.serving.embedded.wire import MalformedRequest, parse_generate

logger = logging.getLogger(__name__)

CHAOS_PATH = "/chaos"
EXIT_STATUS = 9
FLUSH_S = 0.1


def add_chaos(app: Starlette, path: Path, scorer: BatchingScorer) -> None:
    """Let the script in ``path`` work on ``app``, whose scorer runs a ``TeacherModel``.

    Raises :class:`ConfigError` if the script is wrong.
    """
    run = ScriptRun(read_script(path), path)
    logger.warning("answers go wrong on purpose, as %s says", path)
    # Innermost: add_middleware would put it before the check of the API key.
    app.user_middleware.append(Middleware(_Chaos, path=path, run=run, scorer=scorer))


class _Chaos:
    """Counts requests, and answers some of them as the script says."""

    def __init__(self, app: ASGIApp, *, path: Path, run: ScriptRun, scorer: BatchingScorer) -> None:
        self._app = app
        self._path = path
        self._run = run
        self._scorer = scorer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send) if scope["type"] == "http" else None
        if request is not None and request.url.path == CHAOS_PATH:
            await (await self._control(request))(scope, receive, send)
            return
        model = self._model()
        if request is None or model is None:
            await self._app(scope, receive, send)
            return
        self._run.begin()
        if request.url.path in OPEN_PATHS:
            await self._health(request, send)
        elif (request.method, request.url.path) == ("POST", "/generate"):
            await self._generate(request, send, model)
        else:
            await self._app(scope, receive, send)

    def _model(self) -> OwnModel | None:
        """The model, None while it loads and once the server stops."""
        try:
            return cast(OwnModel, self._scorer.model)
        except ScorerUnavailable:
            return None

    async def _control(self, request: Request) -> Response:
        """GET /chaos: the script and its counts. PUT /chaos: another script, counts from 0."""
        if request.method == "PUT":
            try:
                script = parse_script(await request.body(), self._path)
            except ConfigError as error:
                return _json({"error": {"message": str(error)}}, status=400)
            self._run = ScriptRun(script, self._path)
            if self._model() is not None:
                self._run.begin()
        elif request.method != "GET":
            return Response(status_code=405, headers={"allow": "GET, PUT"})
        return _json(self._run.facts())

    async def _health(self, request: Request, send: Send) -> None:
        fault = self._run.on_health_check()
        if fault is None:
            await self._app(request.scope, request.receive, send)
        elif fault.answer == "hang":
            await _until_gone(request)
        else:
            status = 200 if fault.answer == "ok" else 503
            await Response(status_code=status)(request.scope, request.receive, send)

    async def _generate(self, request: Request, send: Send, model: OwnModel) -> None:
        try:
            asked = _asked(await request.body())
        except ClientDisconnect:
            return
        run = self._run
        fault = run.on_request([row.token_ids.tolist() for row in asked])
        if fault is not None and not isinstance(fault, Slow):
            await self._go_wrong(fault, request, send, asked, model)
            return
        await asyncio.sleep(0 if fault is None else fault.delay_s)
        answer = await self._true_answer(request)
        await answer(request.scope, request.receive, send)
        if answer.status_code == 200:
            for row in asked:
                run.record(row.token_ids.tolist(), row.start)

    async def _go_wrong(
        self,
        fault: RequestFault,
        request: Request,
        send: Send,
        asked: Sequence[ScoreRequest],
        model: OwnModel,
    ) -> None:
        if fault.fault == "die":
            os._exit(EXIT_STATUS)
        if fault.fault == "hang":
            await _until_gone(request)
            return
        if isinstance(fault, Status):
            await _refusal(fault)(request.scope, request.receive, send)
            return
        answer = await self._true_answer(request)
        if fault.fault in ("cut", "die_mid_answer"):
            await _send_half(answer, send)
            if fault.fault == "die_mid_answer":
                await asyncio.sleep(FLUSH_S)
                os._exit(EXIT_STATUS)
            return
        if answer.status_code == 200:
            answer = _json(await asyncio.to_thread(spoil, fault, bytes(answer.body), asked, model))
        await answer(request.scope, request.receive, send)

    async def _true_answer(self, request: Request) -> Response:
        """The application's own answer, complete and not yet sent."""
        body = {"type": "http.request", "body": await request.body(), "more_body": False}
        unread = iter([body])
        messages: list[Message] = []

        async def receive() -> Message:
            return next(unread, None) or await request.receive()

        async def keep(message: Message) -> None:
            messages.append(message)

        await self._app(request.scope, receive, keep)
        start, *parts = messages
        answer = Response(b"".join(part.get("body", b"") for part in parts), start["status"])
        answer.raw_headers = start["headers"]
        return answer


def _asked(body: bytes) -> list[ScoreRequest]:
    """The sequences of a request, none where the application will refuse it."""
    try:
        return [row.request for row in parse_generate(body).rows]
    except (MalformedRequest, RequestRefused):
        return []


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _send_half(answer: Response, send: Send) -> None:
    """Headers that promise all, half the body, and no end: the server then closes."""
    half = bytes(answer.body)[: len(answer.body) // 2]
    head = {"type": "http.response.start", "status": answer.status_code}
    await send(head | {"headers": answer.raw_headers})
    await send({"type": "http.response.body", "body": half, "more_body": True})


def _refusal(fault: Status) -> Response:
    answer = _json({"error": {"message": "chaos: refused by the script"}}, fault.status)
    if fault.retry_after is not None:
        answer.headers["retry-after"] = str(fault.retry_after)
    return answer


def _json(value: object, status: int = 200) -> Response:
    content = value if isinstance(value, bytes) else orjson.dumps(value)
    return Response(content, status, media_type="application/json")
