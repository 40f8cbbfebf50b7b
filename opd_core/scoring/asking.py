"""One attempt: one POST to one server, and a checked answer or the error that it stands for."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

import httpx

from opd_core.errors import ConfigError, TeacherAway, TeacherTransient
from opd_core.scoring.replicas import Replica
from opd_core.scoring.wire import Answer, error_of_status, parse_answer, request_body

CONNECT_TIMEOUT_S = 10.0
LONG_ANSWER_BYTES = 2**20
"""Longer answers (some 30k tokens) are read on a thread. Below, a thread stalls the event loop as
long as reading it here: both hold the interpreter's lock."""


class Asker:
    """The connections to one teacher's servers.

    Raises :class:`ConfigError` for a key that no HTTP header can carry.
    """

    def __init__(
        self, teacher: str, api_key: str | None, transport: httpx.AsyncBaseTransport
    ) -> None:
        headers = {"content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {checked_key(teacher, api_key)}"
        # The attempt as a whole is bounded by its limit: httpx's own limits are per read.
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._http = httpx.AsyncClient(
            headers=headers, timeout=timeout, trust_env=False, transport=transport
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def ask(
        self,
        replica: Replica,
        token_ids: Sequence[int],
        start: int,
        *,
        vocab_size: int,
        limit_s: float,
    ) -> Answer:
        """The logprobs of ``token_ids[start + 1:]``, from send to last byte within ``limit_s``.

        Raises the :class:`~opd_core.errors.ScoringError` that says what went wrong.
        """
        body = request_body(replica.backend, token_ids, start)
        try:
            with replica.asked():
                async with asyncio.timeout(limit_s):
                    response = await self._http.post(_generate_url(replica.endpoint), content=body)
        except TimeoutError:
            raise TeacherTransient(f"no whole answer within {limit_s:.4g} s", "timeout") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise TeacherAway(f"cannot connect: {error}", "away") from None
        except httpx.RequestError as error:  # cut, garbled or not HTTP at all
            said = str(error) or type(error).__name__
            raise TeacherTransient(f"connection broke: {said}", "connection") from None
        if response.status_code != 200:
            retry_after = response.headers.get("retry-after")
            raise error_of_status(response.status_code, response.content, retry_after)
        asked = (replica.backend, response.content, token_ids, start, vocab_size)
        if len(response.content) > LONG_ANSWER_BYTES:
            answer = await asyncio.to_thread(parse_answer, *asked)
        else:
            answer = parse_answer(*asked)
        replica.answered()
        return answer


@functools.cache
def _generate_url(endpoint: str) -> httpx.URL:
    """Parsing it for every request would cost as much as checking a short answer."""
    return httpx.URL(f"{endpoint}/generate")


def checked_key(teacher: str, api_key: str) -> str:
    """The key; raises :class:`ConfigError` for one that no HTTP header can carry (it would come
    back inside an error message, key and all)."""
    if api_key.isascii() and api_key.isprintable():
        return api_key
    raise ConfigError(
        f"teacher {teacher!r}: its api_key holds a line break or another character that no HTTP "
        "header can carry; look for a stray newline where the key is kept"
    )
