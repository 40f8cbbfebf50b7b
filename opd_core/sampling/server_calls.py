"""What else than to sample a student's server can be asked: its health, its weights, its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import orjson

from opd_core.config import Backend
from opd_core.errors import SamplingError, TeacherTransient
from opd_core.sampling.server_wire import ServerLost
from opd_core.scoring.wire import error_of_status

LOAD_LIMIT_S = 1800.0
"""For one call that moves weights or memory."""
ANSWER_LIMIT_S = 25.0
"""For one call that moves none; SGLang's own health check gives up after 20 s."""
IDLE_LIMIT_S = 60.0
"""So long a server may take to end what it was told to abort."""
MemoryTag = Literal["weights", "kv_cache"]


class ServerAway(ServerLost):
    """Nobody answers there: no request can be the cause."""


class StudentServer:
    """One server, where it answers now. Calls raise :class:`ServerLost` (no answer, or a failure
    of its own) or :class:`~opd_core.errors.SamplingError` (it refused, with its words)."""

    def __init__(self, backend: Backend, endpoint: str, http: httpx.AsyncClient) -> None:
        self.backend = backend
        self.endpoint = endpoint
        self._http = http

    async def post(self, path: str, content: bytes) -> bytes:
        """The body that it answers to JSON bytes, however long that takes."""
        return await self._ask("POST", path, None, content=content)

    async def call(
        self, path: str, body: Mapping[str, Any], *, limit_s: float = LOAD_LIMIT_S
    ) -> Any:
        """What it answers to a POST of ``body``, as JSON if it is that."""
        return _json(await self._ask("POST", path, limit_s, json=dict(body)))

    async def check_health(self, limit_s: float = ANSWER_LIMIT_S) -> None:
        """Return if it is well (SGLang: if it generates)."""
        path = "/health" if self.backend == "lmdeploy" else "/health_generate"
        await self._ask("GET", path, limit_s)

    async def weight_version(self) -> str:
        """The version of its weights that it tells (SGLang); what it loaded by itself has none of
        ours."""
        said = _json(await self._ask("GET", "/model_info", ANSWER_LIMIT_S))
        return str(said.get("weight_version")) if isinstance(said, dict) else ""

    async def update_from_disk(self, folder: Path, policy_version: int) -> None:
        """Let it load the weights in ``folder`` as ``policy_version`` (SGLang; nothing may be in
        flight)."""
        version = str(policy_version)
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": True}
        await self.call("/update_weights_from_disk", body)
        told = await self.weight_version()
        if told != version:
            raise ServerLost(f"{self.endpoint}: given the weights {version}, it tells {told!r}")

    async def abort_all(self) -> None:
        """End all requests that have reached its scheduler; each is answered with what it has."""
        await self._ask("POST", "/abort_request", ANSWER_LIMIT_S, json={"abort_all": True})

    async def settle(self) -> None:
        """Return when nothing runs on its scheduler, its cache emptied (SGLang, which dies of it if
        its memory is released earlier; LMDeploy has no such call). What nobody waits for any more
        may run on for a moment after :meth:`abort_all`. Raises :class:`ServerLost` if it does not
        end within ``IDLE_LIMIT_S``."""
        if self.backend == "lmdeploy":
            return
        path = f"/flush_cache?timeout={IDLE_LIMIT_S:.0f}"
        try:
            await self.call(path, {}, limit_s=IDLE_LIMIT_S + ANSWER_LIMIT_S)
        except ServerLost:
            raise
        except SamplingError as error:
            raise ServerLost(f"it does not come to rest: {error}") from None

    async def release_memory(self, tags: Sequence[MemoryTag] = ("weights", "kv_cache")) -> None:
        """Give its device's memory back; what was in it is lost. LMDeploy gives all of it."""
        if self.backend == "lmdeploy":
            await self.call("/sleep?level=2", {})
        else:
            await self.call("/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[MemoryTag] = ("weights", "kv_cache")) -> None:
        """Take the memory again; weights must then be given anew."""
        if self.backend == "lmdeploy":
            await self.call("/wakeup?" + "&".join(f"tags={tag}" for tag in tags), {})
        else:
            await self.call("/resume_memory_occupation", {"tags": list(tags)})

    async def _ask(self, method: str, path: str, limit_s: float | None, **body: Any) -> bytes:
        timeout = httpx.Timeout(limit_s, connect=ANSWER_LIMIT_S)
        try:
            answer = await self._http.request(method, self.endpoint + path, timeout=timeout, **body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ServerAway(f"{self.endpoint}: cannot connect: {error}") from None
        except httpx.RequestError as error:
            said = str(error) or type(error).__name__
            raise ServerLost(f"{self.endpoint}: {path} broke off: {said}") from None
        if answer.status_code == 200:
            return answer.content
        refusal = error_of_status(answer.status_code, answer.content, None)
        lost = isinstance(refusal, TeacherTransient)
        raise (ServerLost if lost else SamplingError)(f"{self.endpoint}{path}: {refusal}")


def _json(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
