"""One teacher: one limit, one retry layer, and only checked numbers out.

Attempts are spread over the teacher's replicas (:mod:`opd_core.scoring.replicas`). Where all of
them are away no attempt is counted: the rollout waits, its tokens kept, until one is back or the
teacher's time is over.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Self

import httpx

from opd_core.config import CONTEXT_MARGIN, OPDTeacherConfig
from opd_core.errors import (
    ConfigError,
    ScoringError,
    TeacherAnswerError,
    TeacherAway,
    TeacherRefused,
    TeacherTransient,
)
from opd_core.scoring.facts import Canary, TeacherFacts
from opd_core.scoring.hedging import first_good
from opd_core.scoring.limits import FlowLimit, Share, Slot
from opd_core.scoring.prefix import PrefixOrder
from opd_core.scoring.replicas import Replica, Replicas
from opd_core.scoring.transport import PooledTransport
from opd_core.scoring.wire import Answer, error_of_status, parse_answer, request_body

BACKOFF_FIRST_S = 0.5
BACKOFF_LIMIT_S = 30.0
CONNECT_TIMEOUT_S = 10.0
CANARY_TIMEOUT_S = 30.0
LONG_ANSWER_BYTES = 2**20
"""Longer answers (some 30k tokens) are read on a thread. Below, a thread stalls the event loop as
long as reading it here: both hold the interpreter's lock."""
ALONE_AFTER = 2
"""A request whose connection broke so often goes alone: it may be the one that ends servers."""
SHARED_FROM = 32
"""Prompt tokens from which it is worth that a group's first request goes ahead."""
LATENCIES_KEPT, LATENCIES_NEEDED = 256, 64
OVERLOADED = frozenset({"timeout", "http_429", "http_500", "http_502", "http_503", "http_504"})
POISON = "poison"
"""Cause of a request that was alone with the server every time that the connection broke."""


@dataclass(frozen=True, slots=True)
class Score:
    """Teacher logprobs of the R response tokens and what they cost.

    ``latency_s`` is that of the last attempt; ``cached_tokens`` those that the server had in its
    prefix cache (None where it does not tell).
    """

    teacher_logprobs: tuple[float, ...]
    attempts: int
    latency_s: float
    queue_s: float
    cached_tokens: int | None = None


@dataclass(slots=True)
class _Request:
    """One sequence on its way to a score, over all its attempts."""

    token_ids: Sequence[int]
    start: int
    turn: int
    deadline: float
    only: bool
    on_away: Callable[[], None]
    attempts: int = 0
    broken: int = 0
    queue_s: float = 0.0

    @property
    def alone(self) -> bool:
        return self.broken >= ALONE_AFTER


class TeacherLogprobClient:
    """Scores sampled tokens with one teacher. Use as an async context manager.

    ``current_facts`` is read before every knock: a server that was started again may answer
    elsewhere. Raises :class:`ConfigError` for a key that no HTTP header can carry. ``transport``
    and ``sleep`` are seams for tests.
    """

    def __init__(
        self,
        teacher: OPDTeacherConfig,
        facts: TeacherFacts,
        *,
        api_key: str | None = None,
        current_facts: Callable[[], TeacherFacts] | None = None,
        on_change: Callable[[], None] = lambda: None,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.teacher = teacher
        self.facts = facts
        self._current_facts = current_facts or (lambda: facts)
        self.replicas = Replicas(
            teacher.name,
            teacher.all_replicas,
            knock=self._knock,
            sleep=sleep,
            on_change=on_change,
        )
        self._move()
        share = Share(teacher.max_concurrency, teacher.max_tokens_in_flight)
        target_s = teacher.target_latency_s or teacher.request_timeout_s / 4
        self.limit = FlowLimit(share, adaptive=teacher.adaptive, target_latency_s=target_s)
        self._prefixes = PrefixOrder()
        self._latencies: deque[float] = deque(maxlen=LATENCIES_KEPT)
        self._sleep = sleep
        self._jitter = random.Random(0)  # only spreads retries; results do not depend on it
        headers = {"content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {_checked_key(teacher.name, api_key)}"
        # Canaries and hedges come on top of what the limit admits.
        transport = transport or PooledTransport(teacher.max_concurrency + len(self.replicas.all))
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
        await self.replicas.aclose()
        await self._http.aclose()

    async def score(
        self,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        *,
        group_id: int = 0,
        on_away: Callable[[], None] = lambda: None,
    ) -> Score:
        """Logprobs of the R ``response_ids`` after the P ``prompt_ids``, P >= 1.

        ``on_away`` is called whenever the request has to wait because nobody can be asked. Raises
        :class:`TeacherRefused` or :class:`TeacherAnswerError` at once, :class:`TeacherTransient`
        when all attempts are used up, :class:`TeacherAway` when the teacher stays away.
        """
        if not response_ids:
            return Score((), attempts=0, latency_s=0.0, queue_s=0.0)
        ids, start = [*prompt_ids, *response_ids], len(prompt_ids) - 1
        replica = self.replicas.pick(group_id)
        if len(prompt_ids) < SHARED_FROM or replica is None or replica.backend != "sglang":
            return await self.score_from(ids, start, group_id, on_away=on_away)
        await self._prefixes.wait(group_id)
        with self._prefixes.ahead(group_id) as let_others_go:

            def away() -> None:
                let_others_go()
                on_away()

            return await self.score_from(ids, start, group_id, on_away=away)

    async def score_from(
        self,
        token_ids: Sequence[int],
        start: int,
        group_id: int = 0,
        *,
        failover: bool = True,
        on_away: Callable[[], None] = lambda: None,
    ) -> Score:
        """Logprobs of ``token_ids[start + 1:]``; errors as in :meth:`score`.

        Without ``failover`` only the replica number ``group_id`` is asked.
        """
        self._check_sendable(token_ids, start)
        deadline = time.monotonic() + self._total_deadline_s()
        request = _Request(token_ids, start, group_id, deadline, not failover, on_away)
        while True:
            waits_from, pause = time.monotonic(), 0.0
            async with self.limit.slot(len(token_ids), alone=request.alone) as slot:
                request.queue_s += slot.queue_s
                replica = self.replicas.pick(request.turn, only=request.only)
                if replica is not None:
                    request.deadline += slot.queue_s
                    result = await self._try(request, replica, slot)
                    if isinstance(result, Score):
                        return result
                    pause = result
            if replica is None:
                if request.only:
                    away = self.replicas.all[request.turn % len(self.replicas.all)].away
                    raise self._told(TeacherAway(away, "away"))
                on_away()
                await self.replicas.wait_for_one(self.away_limit_s)
                request.deadline += time.monotonic() - waits_from  # being away is no one's time
            elif pause:
                await self._sleep(pause)

    @property
    def away_limit_s(self) -> float:
        """How long the teacher is waited for: a launched one may have to start again."""
        launches = [r.launch.startup_limit_s for r in self.teacher.all_replicas if r.launch]
        return self.teacher.away_limit_s + max(launches, default=0.0)

    def suspend(self, why: str) -> None:
        """Ask nobody any more until the canaries are right again."""
        for replica in self.replicas.all:
            self.replicas.lose(replica, why)

    async def check_canaries(self) -> str:
        """Score the known sequences again on every replica that is not away.

        Returns why numbers of this teacher are not to be believed any more, or "". A replica that
        fails is away afterwards; one that only cannot be reached casts no doubt on its numbers.
        """
        present = [replica for replica in self.replicas.all if not replica.away]
        doubts = await asyncio.gather(*(self._check_replica(replica) for replica in present))
        return "; ".join(filter(None, doubts))

    async def _check_replica(self, replica: Replica) -> str:
        try:
            await self.repeat_canaries(replica)
        except TeacherAnswerError as error:
            replica.changed += 1
            self.replicas.lose(replica, str(error))
            return f"{replica.endpoint}: {error}"
        except ScoringError as error:
            self.replicas.lose(replica, str(error))
        return ""

    async def _try(self, request: _Request, replica: Replica, slot: Slot) -> Score | float:
        """One attempt: the score, or the seconds to wait before the next one."""
        sent = time.monotonic()
        limit_s = min(self.teacher.request_timeout_s, request.deadline - sent)
        try:
            answer = await self._hedged(request, replica, limit_s)
        except TeacherAway as error:
            self.replicas.lose(replica, str(error))
            request.deadline += time.monotonic() - sent  # nobody was asked
            return 0.0
        except TeacherTransient as error:
            request.attempts += 1
            request.turn += not request.only
            request.broken += error.cause == "connection"
            if error.cause in OVERLOADED:
                slot.overloaded()
            if error.cause != "http_429":  # busy is not broken
                self.replicas.failed(replica, str(error))
            return self._pause_or_give_up(request, error)
        except ScoringError as error:
            if isinstance(error, TeacherAnswerError):
                self.replicas.failed(replica, str(error))
            raise self._told(error, "not worth a retry") from None
        latency_s = time.monotonic() - sent
        slot.answered(latency_s)
        self._latencies.append(latency_s)
        return Score(
            answer.logprobs,
            request.attempts + 1,
            latency_s,
            request.queue_s,
            answer.cached_tokens,
        )

    def _pause_or_give_up(self, request: _Request, error: TeacherTransient) -> float:
        pause = _backoff_s(request.attempts) * self._jitter.uniform(0.5, 1.5)
        if error.retry_after_s is not None:
            pause = error.retry_after_s
        left = request.deadline - time.monotonic()
        if request.attempts > self.teacher.max_retry_per_sample or pause >= left:
            if request.broken > ALONE_AFTER:
                error = TeacherTransient(str(error), POISON)
            raise self._told(error, f"given up after {request.attempts} attempts")
        return pause

    async def _hedged(self, request: _Request, replica: Replica, limit_s: float) -> Answer:
        """One attempt, or two where the first one takes unusually long."""

        def ask(whom: Replica) -> Awaitable[Answer]:
            return self._attempt(whom, request.token_ids, request.start, limit_s)

        other = self.replicas.pick(replica.number + 1)
        enough = len(self._latencies) >= LATENCIES_NEEDED
        if not (self.teacher.hedge and enough and other not in (None, replica)) or request.alone:
            return await ask(replica)
        assert other is not None
        late_s = sorted(self._latencies)[math.ceil(0.99 * len(self._latencies)) - 1]
        spare = lambda: self.limit.try_slot(len(request.token_ids))  # noqa: E731
        return await first_good(ask(replica), lambda: ask(other), after_s=late_s, slot=spare)

    async def _attempt(
        self, replica: Replica, token_ids: Sequence[int], start: int, limit_s: float
    ) -> Answer:
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
        asked = (replica.backend, response.content, token_ids, start, self.facts.vocab_size)
        if len(response.content) > LONG_ANSWER_BYTES:
            answer = await asyncio.to_thread(parse_answer, *asked)
        else:
            answer = parse_answer(*asked)
        replica.answered()
        return answer

    async def _knock(self, replica: Replica) -> None:
        """Whether the replica scores, and as it did when it was first proven."""
        try:
            self.facts = self._current_facts()
        except (OSError, ValueError) as error:
            raise TeacherTransient(f"where it answers cannot be read: {error}", "facts") from None
        self._move()
        await self.repeat_canaries(replica)

    def _move(self) -> None:
        for replica, endpoint in zip(self.replicas.all, self.facts.endpoints, strict=False):
            replica.endpoint = endpoint

    async def repeat_canaries(self, replica: Replica) -> None:
        """Score the known sequences on one replica, away or not.

        Raises :class:`ScoringError`; :class:`TeacherAnswerError` for other numbers than before.
        """
        canaries = self.facts.canaries or (Canary((0, 1, 2), ()),)
        limit_s = min(self.teacher.request_timeout_s, CANARY_TIMEOUT_S)
        for canary in canaries:
            answer = await self._attempt(replica, canary.token_ids, 0, limit_s)
            before = canary.logprobs[replica.number] if canary.logprobs else answer.logprobs
            pairs = zip(before, answer.logprobs, strict=True)
            gap = max(abs(was - now) for was, now in pairs)
            if gap > self.facts.tolerance:
                raise TeacherAnswerError(
                    f"a known sequence of {len(canary.token_ids)} tokens now scores up to "
                    f"{gap:.3g} nats differently (tolerance {self.facts.tolerance:.3g}): "
                    "the server's weights, or what computes with them, have changed",
                    "changed",
                )

    def _check_sendable(self, token_ids: Sequence[int], start: int) -> None:
        """One bad id can end a whole SGLang server, so nothing unchecked is ever sent."""
        vocab_size = self.facts.vocab_size
        if not 0 <= start < len(token_ids) - 1:
            said = f"nothing to score after position {start} of {len(token_ids)} tokens"
            raise self._told(TeacherRefused(said, "start"))
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            bad = next(i for i in token_ids if not 0 <= i < vocab_size)
            said = f"id {bad} is outside the teacher's vocabulary of {vocab_size}"
            raise self._told(TeacherRefused(said, "bad_id"))
        margin = max(CONTEXT_MARGIN[replica.backend] for replica in self.replicas.all)
        limit = self.facts.context_length - margin
        if self.facts.context_length and len(token_ids) > limit:
            said = f"{len(token_ids)} tokens are over the teacher's limit of {limit}"
            raise self._told(TeacherRefused(said, "too_long"))

    def _total_deadline_s(self) -> float:
        attempts = 1 + self.teacher.max_retry_per_sample
        pauses = sum(_backoff_s(n) * 1.5 for n in range(1, attempts))
        return attempts * self.teacher.request_timeout_s + pauses

    def _told(self, error: ScoringError, *more: str) -> ScoringError:
        """The error with the teacher's name in front."""
        said = "; ".join([str(error), *more])
        error.args = (f"teacher {self.teacher.name!r}: {said}", *error.args[1:])
        return error


@functools.cache
def _generate_url(endpoint: str) -> httpx.URL:
    """Parsing it for every request would cost as much as checking a short answer."""
    return httpx.URL(f"{endpoint}/generate")


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
