"""One teacher: one limit, one retry layer, and only checked numbers out.

Attempts are spread over the teacher's replicas: a group keeps to one replica, whose prefix cache
holds its prompt, and the next attempt goes to the next one. An endpoint where nobody answers
costs no attempt: the rollout waits, its tokens kept, until the teacher is back or
``away_limit_s`` is over.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Self

import httpx
import orjson

from opd_core.config import CONTEXT_MARGIN, OPDTeacherConfig, ReplicaConfig
from opd_core.errors import (
    ConfigError,
    ScoringError,
    TeacherAway,
    TeacherRefused,
    TeacherTransient,
)
from opd_core.scoring.transport import PooledTransport
from opd_core.scoring.wire import build_request, error_of_status, parse_answer

BACKOFF_FIRST_S = 0.5
BACKOFF_LIMIT_S = 30.0
AWAY_POLL_S = 1.0
CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Score:
    """Teacher logprobs of the R response tokens and what they cost."""

    teacher_logprobs: tuple[float, ...]
    attempts: int
    latency_s: float
    queue_s: float


@dataclass(frozen=True, slots=True)
class TeacherFacts:
    """What must be known of the teacher's model before an id is sent to its server.

    ``context_length`` 0 means unknown (an external server that does not tell).
    """

    vocab_size: int
    context_length: int = 0


class TeacherLogprobClient:
    """Scores sampled tokens with one teacher. Use as an async context manager.

    Raises :class:`ConfigError` for a key that no HTTP header can carry. ``transport`` and ``sleep``
    are seams for tests.
    """

    def __init__(
        self,
        teacher: OPDTeacherConfig,
        facts: TeacherFacts,
        *,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.teacher = teacher
        self.facts = facts
        self._replicas = teacher.all_replicas
        self._slots = asyncio.Semaphore(teacher.max_concurrency)
        self._sleep = sleep
        self._jitter = random.Random(0)  # only spreads retries; results do not depend on it
        headers = {"content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {_checked_key(teacher.name, api_key)}"
        transport = transport or PooledTransport(teacher.max_concurrency)
        # The attempt as a whole is bounded by request_timeout_s: httpx's own limits are per read.
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        self._http = httpx.AsyncClient(
            headers=headers, timeout=timeout, trust_env=False, transport=transport
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def score(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int], *, group_id: int = 0
    ) -> Score:
        """Logprobs of the R ``response_ids`` after the P ``prompt_ids``, P >= 1.

        Raises :class:`TeacherRefused` or :class:`TeacherAnswerError` at once,
        :class:`TeacherTransient` when all attempts are used up, :class:`TeacherAway` when nobody
        answered for ``away_limit_s``.
        """
        if not response_ids:
            return Score((), attempts=0, latency_s=0.0, queue_s=0.0)
        return await self.score_from([*prompt_ids, *response_ids], len(prompt_ids) - 1, group_id)

    async def score_from(
        self, token_ids: Sequence[int], start: int, group_id: int = 0, *, failover: bool = True
    ) -> Score:
        """Logprobs of ``token_ids[start + 1:]``; errors as in :meth:`score`.

        Without ``failover`` only the replica number ``group_id`` is asked.
        """
        self._check_sendable(token_ids, start)
        first = group_id % len(self._replicas)
        replicas = (*self._replicas[first:], *self._replicas[:first])
        if not failover:
            replicas = replicas[:1]
        asked = time.monotonic()
        async with self._slots:
            queue_s = time.monotonic() - asked
            logprobs, attempts, latency_s = await self._with_retries(token_ids, start, replicas)
        return Score(logprobs, attempts, latency_s, queue_s)

    async def _with_retries(
        self, token_ids: Sequence[int], start: int, replicas: Sequence[ReplicaConfig]
    ) -> tuple[tuple[float, ...], int, float]:
        attempts, turn, refusals, away_since = 0, 0, 0, 0.0
        deadline = time.monotonic() + self._total_deadline_s()
        while True:
            replica = replicas[turn % len(replicas)]
            sent = time.monotonic()
            limit_s = min(self.teacher.request_timeout_s, deadline - sent)
            try:
                logprobs = await self._attempt(replica, token_ids, start, limit_s)
                return logprobs, attempts + 1, time.monotonic() - sent
            except TeacherAway as error:
                away_since = away_since if refusals else sent
                turn, refusals = turn + 1, refusals + 1
                if refusals % len(replicas) == 0:  # all have been tried, and nobody answers
                    away_s = time.monotonic() - away_since
                    if away_s >= self.teacher.away_limit_s:
                        raise self._told(error, f"nobody answered for {away_s:.0f} s") from None
                    await self._sleep(AWAY_POLL_S)
                deadline += time.monotonic() - sent  # being away counts as no attempt, nor as time
            except TeacherTransient as error:
                attempts, turn, refusals = attempts + 1, turn + 1, 0
                pause = self._pause_s(attempts, error)
                left = deadline - time.monotonic()
                if attempts > self.teacher.max_retry_per_sample or pause >= left:
                    raise self._told(error, f"given up after {attempts} attempts") from None
                await self._sleep(pause)
            except ScoringError as error:
                raise self._told(error, "not worth a retry") from None

    async def _attempt(
        self, replica: ReplicaConfig, token_ids: Sequence[int], start: int, limit_s: float
    ) -> tuple[float, ...]:
        body = orjson.dumps(build_request(replica.backend, token_ids, start))
        try:
            async with asyncio.timeout(limit_s):
                response = await self._http.post(f"{replica.endpoint}/generate", content=body)
        except TimeoutError:
            raise TeacherTransient(f"no whole answer within {limit_s:.4g} s", "timeout") from None
        except httpx.ConnectError as error:
            raise TeacherAway(f"cannot connect: {error}", "away") from None
        except httpx.RequestError as error:  # cut, garbled or not HTTP at all
            said = str(error) or type(error).__name__
            raise TeacherTransient(f"connection broke: {said}", "connection") from None
        if response.status_code != 200:
            retry_after = response.headers.get("retry-after")
            raise error_of_status(response.status_code, response.content, retry_after)
        return parse_answer(
            replica.backend, response.content, token_ids, start, self.facts.vocab_size
        )

    def _check_sendable(self, token_ids: Sequence[int], start: int) -> None:
        """One bad id can end a whole SGLang server, so nothing unchecked is ever sent."""
        vocab_size = self.facts.vocab_size
        if not 0 <= start < len(token_ids) - 1:
            said = f"nothing to score after position {start} of {len(token_ids)} tokens"
            raise self._told(TeacherRefused(said, "start"))
        bad = next((i for i in token_ids if not 0 <= i < vocab_size), None)
        if bad is not None:
            said = f"id {bad} is outside the teacher's vocabulary of {vocab_size}"
            raise self._told(TeacherRefused(said, "bad_id"))
        margin = max(CONTEXT_MARGIN[replica.backend] for replica in self._replicas)
        limit = self.facts.context_length - margin
        if self.facts.context_length and len(token_ids) > limit:
            said = f"{len(token_ids)} tokens are over the teacher's limit of {limit}"
            raise self._told(TeacherRefused(said, "too_long"))

    def _total_deadline_s(self) -> float:
        attempts = 1 + self.teacher.max_retry_per_sample
        pauses = sum(_backoff_s(n) * 1.5 for n in range(1, attempts))
        return attempts * self.teacher.request_timeout_s + pauses

    def _pause_s(self, attempt: int, error: TeacherTransient) -> float:
        if error.retry_after_s is not None:
            return error.retry_after_s
        return _backoff_s(attempt) * self._jitter.uniform(0.5, 1.5)

    def _told(self, error: ScoringError, *more: str) -> ScoringError:
        """The error with the teacher's name in front."""
        said = "; ".join([str(error), *more])
        error.args = (f"teacher {self.teacher.name!r}: {said}", *error.args[1:])
        return error


def _backoff_s(attempt: int) -> float:
    return min(BACKOFF_LIMIT_S, BACKOFF_FIRST_S * 2.0 ** min(attempt - 1, 16))


def _checked_key(teacher: str, api_key: str) -> str:
    """A bad header value would come back inside an error message, key and all."""
    if api_key.isascii() and api_key.isprintable():
        return api_key
    raise ConfigError(
        f"teacher {teacher!r}: its api_key holds a line break or another character that no HTTP "
        "header can carry; look for a stray newline where the key is kept"
    )
