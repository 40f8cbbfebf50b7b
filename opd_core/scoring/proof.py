"""Proof that an endpoint scores: known sequences, scored in several ways, checked and compared.

Answering a health check is not scoring. Before a run trusts a teacher, the same tokens are scored
again, from later positions and in company; all must agree, on each replica and between them. The
quick part of a full probe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from opd_core.errors import ScoringError, ServingError
from opd_core.scoring.client import Score, TeacherLogprobClient
from opd_core.scoring.facts import Canary

T = TypeVar("T")
Logprobs = tuple[float, ...]

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.25}
"""Largest believable difference between two scorings of the same tokens, in nats. Half-precision
kernels are not invariant to batch shape (an honest 135M model in bfloat16 moved one of 300 logprobs
by 0.15 nats in a batch), so theirs only catches other tokens or other weights."""
SMALLEST_TOLERANCE = 1e-3
UNIFORM_TOLERANCE, UNIFORM_IDS = 1e-4, 8
BATCHES = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Gap:
    """The largest difference, in nats, between two scorings of one sequence."""

    nats: float
    sequence: int
    how: str


@dataclass(frozen=True, slots=True)
class Observation:
    """How one replica scored the sequences: ``first[s]`` holds the N - 1 logprobs of sequence s as
    they came first, the gaps say how far later scorings were from them: scored again, from later
    starts, and together with others."""

    first: tuple[Logprobs, ...]
    again: Gap
    later: Gap
    together: Gap
    latency_s: float

    @property
    def worst(self) -> Gap:
        """The largest of the gaps."""
        return _worst((self.again, self.later, self.together))


@dataclass(frozen=True, slots=True)
class ScoringProof:
    """What the round trip showed.

    ``spread`` is the largest difference, in nats, that one replica showed for the same token;
    ``tolerance`` how far a canary may later be from its first scoring.
    """

    tokens: int
    mean_logprob: float
    latency_s: float
    spread: float
    tolerance: float
    canaries: tuple[Canary, ...]


async def prove_scoring(
    client: TeacherLogprobClient, sequences: Sequence[Sequence[int]], dtype: str
) -> ScoringProof:
    """Score each sequence (>= 3 tokens) in several ways on all replicas at the same time.

    Raises :class:`ServingError` when a replica does not score, contradicts itself or another one
    by more than is believable of ``dtype`` (:data:`TOLERANCE`), or gives every token the same
    logprob.
    """
    if not sequences:
        raise ValueError("a proof of scoring needs at least one sequence of 3 or more tokens")
    teacher, limit = client.teacher.name, TOLERANCE[dtype]
    replicas = range(len(client.teacher.all_replicas))
    seen = await _all(observe_replica(client, sequences, number) for number in replicas)
    for number, observed in enumerate(seen):
        who = f"teacher {teacher!r}, replica {number}"
        _check_alone(who, observed, sequences, limit)
        _check_pair(who, observed, seen[0], limit)
    spread = max(observed.worst.nats for observed in seen)
    logprobs = [x for observed in seen for first in observed.first for x in first]
    return ScoringProof(
        tokens=len(logprobs),
        mean_logprob=sum(logprobs) / len(logprobs),
        latency_s=max(observed.latency_s for observed in seen),
        spread=spread,
        tolerance=limit if dtype == "float32" else max(3 * spread, SMALLEST_TOLERANCE),
        canaries=tuple(
            Canary(tuple(ids), tuple(observed.first[number] for observed in seen))
            for number, ids in enumerate(sequences)
        ),
    )


async def observe_replica(
    client: TeacherLogprobClient, sequences: Sequence[Sequence[int]], replica: int = 0
) -> Observation:
    """Score each sequence twice and from two later starts, alone; then among 2, 4 and 8 requests.

    The replica must answer itself. Raises :class:`ServingError` where it does not score.
    """
    score = partial(_score, client, replica)
    first, again, later, latency_s = [], [], [], 0.0
    for number, ids in enumerate(sequences):
        whole = await score(number, ids)
        logprobs = whole.teacher_logprobs
        first.append(logprobs)
        latency_s = max(latency_s, whole.latency_s)
        repeated = await score(number, ids)
        again.append(Gap(_largest(logprobs, repeated.teacher_logprobs), number, "scored twice"))
        for start in sorted({len(ids) // 2, len(ids) - 2}):
            part = await score(number, ids, start)
            nats = _largest(logprobs[start:], part.teacher_logprobs)
            later.append(Gap(nats, number, f"scored from 0 and from {start}"))
    together = []
    for turn, size in enumerate(BATCHES):
        company = _company(sequences, turn, size)
        scores = await _all(score(number, ids) for number, ids in company)
        for (number, ids), among in zip(company, scores, strict=True):
            nats = _largest(first[number][: len(ids) - 1], among.teacher_logprobs)
            together.append(Gap(nats, number, f"scored alone and among {size}"))
    return Observation(tuple(first), _worst(again), _worst(later), _worst(together), latency_s)


def is_uniform(token_ids: Sequence[int], logprobs: Sequence[float]) -> bool:
    """Whether many different tokens got one and the same logprob: no weights do that.

    The value is -ln(V) of the server's own, perhaps padded, vocabulary, which nobody may know here.
    """
    enough = len(set(token_ids)) >= UNIFORM_IDS
    return enough and max(logprobs) - min(logprobs) <= UNIFORM_TOLERANCE


async def _score(
    client: TeacherLogprobClient, replica: int, number: int, ids: Sequence[int], start: int = 0
) -> Score:
    try:
        return await client.score_from(ids, start, replica, failover=False)
    except ScoringError as error:
        raise ServingError(f"replica {replica} does not score sequence {number}: {error}") from None


def _company(
    sequences: Sequence[Sequence[int]], turn: int, size: int
) -> list[tuple[int, Sequence[int]]]:
    """``size`` requests, in another order each turn. What is more than the sequences are their
    beginnings, ever shorter: a causal model scores a beginning as it scores the whole."""
    chosen = []
    for place in range(size):
        number = (turn + place) % len(sequences)
        ids = sequences[number]
        cut = place // len(sequences) * len(ids) // max(BATCHES)
        chosen.append((number, ids[: max(3, len(ids) - cut)]))
    return chosen


def _check_alone(
    who: str, observed: Observation, sequences: Sequence[Sequence[int]], limit: float
) -> None:
    for number, (ids, logprobs) in enumerate(zip(sequences, observed.first, strict=True)):
        if is_uniform(ids[1:], logprobs):
            raise ServingError(
                f"{who}: all {len(logprobs)} logprobs of sequence {number} are {logprobs[0]:.4f} "
                "although its tokens differ: the server lost its weights, start it again"
            )
    gap = observed.worst
    if gap.nats > limit:
        raise ServingError(
            f"{who}: sequence {gap.sequence} {gap.how} differs by {gap.nats:.3g} nats (tolerance "
            f"{limit:g}): its prefix handling, its batching or its logprobs mode is wrong"
        )


def _check_pair(who: str, observed: Observation, other: Observation, limit: float) -> None:
    for number, (here, there) in enumerate(zip(observed.first, other.first, strict=True)):
        nats = _largest(here, there)
        if nats > limit:
            raise ServingError(
                f"{who}: sequence {number} differs by {nats:.3g} nats from replica 0 (tolerance "
                f"{limit:g}): the replicas of a teacher serve one frozen model; correct the "
                "endpoints, or make two teachers of them"
            )


def _largest(one: Logprobs, other: Logprobs) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def _worst(gaps: Iterable[Gap]) -> Gap:
    return max(gaps, key=lambda gap: gap.nats)


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; the first failure ends the rest and is raised itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
