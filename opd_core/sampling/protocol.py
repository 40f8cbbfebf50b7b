"""What a sampling engine takes and gives."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, Protocol

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One continuation to sample.

    ``key`` is the rollout's group id and index: a group keeps to one engine. ``token_ids`` are the
    prompt and all of the response so far; ``drawn`` is how many of those tokens this rollout's
    random stream has given, so that a rollout which is continued draws on. ``seed`` fixes its
    randomness whatever else is in the batch (in-process engine; servers draw their own).
    ``stop_ids`` end it beside the student's end tokens.
    """

    key: tuple[int, int]
    token_ids: tuple[int, ...]
    seed: int
    max_new_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    drawn: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """R sampled tokens, the logprob that the engine sampled each of them from (temperature 1 scale,
    fp32 log-softmax), the policy version of the weights that did, and why it ended: ``stop`` (an
    end token or one of ``stop_ids``, which is its last token), ``length``, or ``abort`` (the engine
    was interrupted; R may be 0)."""

    response_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    finish_reason: FinishReason


Ticketed = tuple[int, Completion]
"""A completion with the number under which an in-process engine was asked for it."""


class Sampler(Protocol):
    """An engine, or several behind one name."""

    async def ready(self) -> int:
        """Wait while weights are being synced; the policy version that samples now."""
        ...

    async def sample(self, request: SampleRequest) -> Completion:
        """One completion; waits while weights are being synced. Many are asked for at once.

        An engine that dies costs time and nothing else: its requests go to another one. Raises
        :class:`opd_core.errors.SamplingError` if none is left.
        """
        ...


def rollout_seed(*parts: int | str) -> int:
    """A 63-bit seed from what identifies a rollout (run seed, train step, prompt row, try, index),
    so that batching, ranks and engines change nothing."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
