"""One teacher: one limit, one retry layer, and only checked numbers out.

Attempts are spread over the teacher's replicas (:mod:`opd_core.scoring.replicas`). Where all of
them are away no attempt is counted: the rollout waits, its tokens kept, until one is back or the
teacher's time is over.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Self

import httpx

from opd_core.config import CONTEXT_MARGIN, OPDTeacherConfig
from opd_core.errors import (
    ScoringError,
    TeacherAnswerError,
    TeacherAway,
    TeacherRefused,
    TeacherTransient,
)
from opd_core.scoring.asking import Asker
from opd_core.scoring.facts import SOME_SEQUENCE, TeacherFacts
from opd_core.scoring.hedging import Tail, first_good
from opd_core.scoring.limits import FlowLimit, Share, Slot
from opd_core.scoring.prefix import PrefixOrder
from opd_core.scoring.replicas import Replica, Replicas
from opd_core.scoring.transport import PooledTransport
from opd_core.scoring.wire import Answer

BACKOFF_FIRST_S = 0.5
BACKOFF_LIMIT_S = 30.0
ALONE_AFTER = 2
"""A request whose connection broke so often goes alone: it may be the one that ends servers."""
SHARED_FROM = 32
"""Prompt tokens from which it is worth that a group's first request goes ahead."""
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check of the canaries found: why this teacher's scores since the last one are not to
    be believed (or ""), and whether every replica was asked and repeated its numbers."""

    doubt: str
    proven: bool


@dataclass(slots=True)
class _Request:
    """One sequence on its way to a score, over all its attempts."""

    token_ids: Sequence[int]
    start: int
    turn: int
    deadline: float
    only: bool
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
        self._tail = Tail()
        self._sleep = sleep
        self._jitter = random.Random(0)  # only spreads retries; results do not depend on it
        # Canaries and hedges come on top of what the limit admits.
        transport = transport or PooledTransport(teacher.max_concurrency + len(self.replicas.all))
        self._asker = Asker(teacher.name, api_key, transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self.replicas.aclose()
        await self._asker.aclose()

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
            return await self.score_from(
                ids, start, group_id, on_away=on_away, after_first_try=let_others_go
            )

    async def score_from(
        self,
        token_ids: Sequence[int],
        start: int,
        group_id: int = 0,
        *,
        failover: bool = True,
        on_away: Callable[[], None] = lambda: None,
        after_first_try: Callable[[], None] = lambda: None,
    ) -> Score:
        """Logprobs of ``token_ids[start + 1:]``; errors and ``on_away`` as in :meth:`score`.

        Without ``failover`` only the replica number ``group_id`` is asked.
        """
        self._check_sendable(token_ids, start)
        deadline = time.monotonic() + self._total_deadline_s()
        request = _Request(token_ids, start, group_id, deadline, not failover)
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
            after_first_try()
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
        """How long the teacher is waited for. Launched servers get the time in which the flow
        notices and starts them again, one after the other; it ends the run if it cannot."""
        launches = [r.launch.startup_limit_s for r in self.teacher.all_replicas if r.launch]
        restarts_s = sum(self.teacher.hang_limit_s + limit_s for limit_s in launches)
        return self.teacher.away_limit_s + 2 * restarts_s

    def suspend(self, why: str) -> None:
        """Ask nobody any more until the canaries are right again."""
        for replica in self.replicas.all:
            self.replicas.lose(replica, why)

    async def check_canaries(self) -> Verdict:
        """Score the known sequences again on every replica that is not away.

        A replica that gives other numbers is away afterwards, and what it scored since the last
        check is in doubt; so it is if a knock finds that. One that has died or cannot be reached
        is not: a crash is no lie.
        """
        present = [replica for replica in self.replicas.all if not replica.away]
        repeated = await asyncio.gather(*(self._check_replica(replica) for replica in present))
        doubts = [(replica.endpoint, replica.take_doubt()) for replica in self.replicas.all]
        return Verdict(
            "; ".join(f"{endpoint}: {doubt}" for endpoint, doubt in doubts if doubt),
            proven=len(present) == len(self.replicas.all) and all(repeated),
        )

    async def _check_replica(self, replica: Replica) -> bool:
        try:
            await self.repeat_canaries(replica)
        except TeacherAnswerError as error:
            replica.doubted(str(error))
            self.replicas.lose(replica, str(error))
        except TeacherAway as error:
            self.replicas.lose(replica, str(error))
        except ScoringError as error:  # busy or slow: that alone is no reason to ask it no more
            self.replicas.failed(replica, str(error))
        else:
            return True
        return False

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

        async def ask(whom: Replica) -> tuple[Replica, Answer]:
            sent = time.monotonic()
            answer = await self._attempt(whom, request.token_ids, request.start, limit_s)
            self._tail.record(time.monotonic() - sent)
            return whom, answer

        may_hedge = self.teacher.hedge and not request.alone and not request.only
        late_s = self._tail.p99_s() if may_hedge else None
        other = self.replicas.pick(replica.number + 1)
        if late_s is None or other is None or other is replica:
            return (await ask(replica))[1]
        winner, answer = await first_good(
            ask(replica),
            lambda: ask(other),
            after_s=late_s,
            slot=lambda: self.limit.try_slot(len(request.token_ids)),
        )
        if winner is not replica:
            self.replicas.failed(replica, f"no answer within {late_s:.3g} s, another had one")
        return answer

    async def _attempt(
        self, replica: Replica, token_ids: Sequence[int], start: int, limit_s: float
    ) -> Answer:
        return await self._asker.ask(
            replica, token_ids, start, vocab_size=self.facts.vocab_size, limit_s=limit_s
        )

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
        limit_s = min(self.teacher.request_timeout_s, self.teacher.hang_limit_s)
        for canary in self.facts.canaries or (SOME_SEQUENCE,):
            answer = await self._attempt(replica, canary.token_ids, 0, limit_s)
            canary.check(replica.number, answer.logprobs, self.facts.tolerance)

    def _check_sendable(self, token_ids: Sequence[int], start: int) -> None:
        margin = max(CONTEXT_MARGIN[replica.backend] for replica in self.replicas.all)
        try:
            self.facts.check_sendable(token_ids, start, margin)
        except TeacherRefused as error:
            raise self._told(error) from None

    def _total_deadline_s(self) -> float:
        attempts = 1 + self.teacher.max_retry_per_sample
        pauses = sum(_backoff_s(n) * 1.5 for n in range(1, attempts))
        return attempts * self.teacher.request_timeout_s + pauses

    def _told(self, error: ScoringError, *more: str) -> ScoringError:
        """The error with the teacher's name in front."""
        said = "; ".join([str(error), *more])
        error.args = (f"teacher {self.teacher.name!r}: {said}", *error.args[1:])
        return error


def _backoff_s(attempt: int) -> float:
    return min(BACKOFF_LIMIT_S, BACKOFF_FIRST_S * 2.0 ** min(attempt - 1, 16))
