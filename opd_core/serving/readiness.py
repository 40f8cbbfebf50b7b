"""From "the process runs" to "it scores": health poll, then a scoring round trip."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from opd_core.config import Backend, OPDTeacherConfig
from opd_core.errors import ScoringError, ServingError, TeacherAnswerError
from opd_core.scoring.client import TeacherLogprobClient
from opd_core.scoring.facts import TeacherFacts
from opd_core.scoring.proof import ScoringProof, prove_scoring

HEALTH_PATH: dict[Backend, str] = {
    "sglang": "/health_generate",
    "embedded": "/health_generate",
    "lmdeploy": "/health",
}
INFO_PATHS: dict[Backend, tuple[str, ...]] = {
    "sglang": ("/model_info", "/get_model_info", "/v1/models"),
    "embedded": ("/model_info", "/get_model_info", "/v1/models"),
    "lmdeploy": ("/v1/models",),
}
POLL_S = 0.5
PROBE_TIMEOUT_S = 25.0
"""SGLang answers 503 after 20 s when its scheduler does not move; one probe at a time waits for
it."""


def wait_until_healthy(
    endpoint: str,
    backend: Backend,
    *,
    limit_s: float,
    still_alive: Callable[[], None],
    api_key: str | None = None,
    waiting: Callable[[float, str], None] = lambda seconds, state: None,
) -> float:
    """Poll the server's health, one probe at a time, until it is ready; seconds that it took.

    ``still_alive`` is called before every probe and raises as soon as the process is dead;
    ``waiting`` gets the seconds so far and the last answer. Raises :class:`ServingError` after
    ``limit_s``.
    """
    started = time.monotonic()
    state = "no answer yet"
    # Servers leave their health open; a gateway before one may not.
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(trust_env=False, headers=headers) as http:
        while True:
            still_alive()
            left_s = max(limit_s - (time.monotonic() - started), POLL_S)
            try:
                response = http.get(
                    endpoint + HEALTH_PATH[backend], timeout=min(PROBE_TIMEOUT_S, left_s)
                )
                state = f"HTTP {response.status_code}"
                if response.status_code == 200:
                    return time.monotonic() - started
            except httpx.TransportError as error:
                state = str(error) or type(error).__name__
            seconds = time.monotonic() - started
            if seconds > limit_s:
                raise ServingError(
                    f"the {backend} server at {endpoint} is not ready after {limit_s:.0f} s "
                    f"(last answer: {state}); look at its log, or raise startup_limit_s"
                )
            waiting(seconds, state)
            time.sleep(POLL_S)


def read_model_info(endpoint: str, backend: Backend, api_key: str | None) -> dict[str, Any]:
    """What the server says of its model; {} if it says nothing usable."""

    async def run() -> dict[str, Any]:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        async with httpx.AsyncClient(trust_env=False, timeout=10.0, headers=headers) as http:
            return await ask_model_info(http, endpoint, backend)

    return asyncio.run(run())


async def ask_model_info(
    http: httpx.AsyncClient, endpoint: str, backend: Backend
) -> dict[str, Any]:
    """The same over a client that sends the key. SGLang tells its context length only in
    ``/v1/models``, so that is asked too where the model's own page lacks it."""
    info: dict[str, Any] = {}
    for path in INFO_PATHS[backend]:
        try:
            response = await http.get(endpoint + path)
            said = _one_model(response.json()) if response.status_code == 200 else {}
        except (httpx.TransportError, ValueError):
            continue
        info = said | info
        if context_length(info):
            break
    return info


def context_length(info: Mapping[str, Any]) -> int:
    """The context length that the server told, in tokens; 0 if it did not."""
    said = info.get("context_length") or info.get("max_model_len")
    return said if isinstance(said, int) else 0


def _one_model(answer: Any) -> dict[str, Any]:
    """``/v1/models`` gives a list of models, ``/model_info`` the model itself."""
    if isinstance(answer, dict) and isinstance(answer.get("data"), list):
        answer = next(iter(answer["data"]), None)
    return answer if isinstance(answer, dict) else {}


def prove_teacher(
    teacher: OPDTeacherConfig,
    facts: TeacherFacts,
    api_key: str | None,
    sequences: Sequence[Sequence[int]],
    dtype: str,
) -> ScoringProof:
    """The scoring round trip, on all replicas of a teacher. Raises :class:`ServingError`."""

    async def run() -> ScoringProof:
        steady = teacher.model_copy(update={"adaptive": False})
        async with TeacherLogprobClient(steady, facts, api_key=api_key) as client:
            return await prove_scoring(client, sequences, dtype)

    return asyncio.run(run())


def prove_again(
    teacher: OPDTeacherConfig, facts: TeacherFacts, api_key: str | None, number: int
) -> str:
    """Whether replica ``number``, started again, is the teacher that it was: its canaries score as
    before. Returns why it could not be asked, or "". Raises :class:`ServingError` for other
    numbers."""

    async def run() -> None:
        async with TeacherLogprobClient(teacher, facts, api_key=api_key) as client:
            await client.repeat_canaries(client.replicas.all[number])

    try:
        asyncio.run(run())
    except TeacherAnswerError as error:
        raise ServingError(
            f"teacher {teacher.name!r}, replica {number}, was started again and is not what it "
            f"was: {error}"
        ) from None
    except ScoringError as error:
        return str(error)
    return ""
