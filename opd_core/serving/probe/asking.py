"""Raw requests to a teacher server, and its answers as they came.

A run asks through :class:`~opd_core.scoring.client.TeacherLogprobClient`, which refuses every
answer that is wrong; a probe wants to see what is wrong with it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from opd_core.config import Backend
from opd_core.scoring.wire import error_of_status, request_body

NO_ANSWER = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. ``status`` is 0 where none came; ``body`` then says why."""

    status: int
    body: bytes
    retry_after: str | None = None
    seconds: float = 0.0

    @property
    def meta(self) -> dict[str, Any]:
        """``meta_info`` of the answer; {} where it has none."""
        try:
            answer = json.loads(self.body)  # unlike orjson it reads NaN, which is to be told
        except (ValueError, RecursionError):
            return {}
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        return meta if isinstance(meta, dict) else {}

    @property
    def problem(self) -> str:
        """Why this is no answer to a scoring request; empty if it may be one."""
        if self.status == NO_ANSWER:
            return self.body.decode("utf-8", "replace")
        if self.status != 200:
            return str(error_of_status(self.status, self.body, None))
        finish = self.meta.get("finish_reason")
        reason = finish.get("type") if isinstance(finish, dict) else finish
        return f"HTTP 200 with finish_reason {finish}" if reason in ("abort", "error") else ""


class Asker:
    """Asks one server. ``vocab_size`` bounds the ids: one beyond the model's ends an SGLang."""

    def __init__(
        self, http: httpx.AsyncClient, endpoint: str, backend: Backend, vocab_size: int
    ) -> None:
        self.http = http
        self.endpoint = endpoint
        self.backend = backend
        self.vocab_size = vocab_size

    def body(self, ids: Sequence[int], start: int, top: int = 0) -> bytes:
        """The JSON that asks for the logprobs of ``ids[start + 1:]`` and for the ``top`` likeliest
        tokens of each position. Raises ValueError for what can end a server."""
        if not ids or min(ids) < 0 or max(*ids, top - 1) >= self.vocab_size:
            raise ValueError("an empty row, an id or a top beyond the vocabulary can end a server")
        fields = orjson.loads(request_body(self.backend, ids, start))
        return orjson.dumps(fields | {"top_logprobs_num": top})

    async def score(
        self, ids: Sequence[int], start: int, *, top: int = 0, key: str | None = None
    ) -> Reply:
        """Score ``ids[start + 1:]``; with ``key`` in place of the client's own."""
        headers = {"content-type": "application/json"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        content = self.body(ids, start, top)
        return await ask(self.http, "POST", f"{self.endpoint}/generate", content, headers)


async def ask(
    http: httpx.AsyncClient,
    method: str,
    url: str,
    content: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> Reply:
    """One request without any retry; what prevents an answer becomes a reply of status 0."""
    sent = time.monotonic()
    try:
        response = await http.request(method, url, content=content, headers=headers)
    except (httpx.RequestError, httpx.InvalidURL) as error:
        said = str(error) or type(error).__name__
        return Reply(NO_ANSWER, said.encode(), seconds=time.monotonic() - sent)
    retry_after = response.headers.get("retry-after")
    return Reply(response.status_code, response.content, retry_after, time.monotonic() - sent)
