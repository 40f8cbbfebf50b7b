"""Proof that an endpoint scores: a round trip of known sequences, checked and compared.

Answering a health check is not scoring. Before a run trusts a teacher, the same tokens are scored
from the start and from a later position, twice; all must agree. The quick part of a full probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opd_core.errors import ScoringError, ServingError
from opd_core.scoring.client import TeacherLogprobClient

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""Largest difference between two scorings of the same tokens, in nats; half-precision kernels are
not invariant to batch shape, so their tolerance only catches scores of other tokens or weights."""


@dataclass(frozen=True, slots=True)
class ScoringProof:
    """What the round trip showed."""

    tokens: int
    largest_difference: float
    mean_logprob: float
    latency_s: float


async def prove_scoring(
    client: TeacherLogprobClient, sequences: Sequence[Sequence[int]], tolerance: float
) -> ScoringProof:
    """Score each sequence (>= 3 tokens) on each replica, whole and from its middle.

    Raises :class:`ServingError`. A replica must answer itself: the others do not stand in for it.
    """
    if not sequences:
        raise ValueError("a proof of scoring needs at least one sequence of 3 or more tokens")
    largest, total, tokens, latency = 0.0, 0.0, 0, 0.0
    for number, ids in enumerate(sequences):
        middle = len(ids) // 2
        for replica in range(len(client.teacher.all_replicas)):
            try:
                whole = await client.score_from(ids, 0, replica, failover=False)
                part = await client.score_from(ids, middle, replica, failover=False)
            except ScoringError as error:
                raise ServingError(f"replica {replica} does not score: {error}") from None
            tail = whole.teacher_logprobs[middle:]
            gap = max(abs(a - b) for a, b in zip(tail, part.teacher_logprobs, strict=True))
            if gap > tolerance:
                raise ServingError(
                    f"teacher {client.teacher.name!r}, replica {replica}: sequence {number} scored "
                    f"from 0 and from {middle} differs by {gap:.3g} nats (tolerance {tolerance:g}):"
                    " its prefix handling or its logprobs mode is wrong"
                )
            largest = max(largest, gap)
            total += sum(whole.teacher_logprobs)
            tokens += len(whole.teacher_logprobs)
            latency = max(latency, whole.latency_s)
    return ScoringProof(tokens, largest, total / max(tokens, 1), latency)
