"""What a sampling engine takes and gives."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion to sample. ``key`` comes back with it; ``seed`` fixes its randomness whatever
    else is in the batch."""

    key: tuple[int, int]
    prompt_ids: tuple[int, ...]
    seed: int
    max_new_tokens: int
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Completion:
    """R sampled tokens with the logprob that the engine sampled each of them from (temperature 1
    scale, fp32 log-softmax), and why it ended: ``stop`` or ``length``."""

    key: tuple[int, int]
    response_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    finish_reason: str
    policy_version: int


class Sampler(Protocol):
    """An engine, or several behind one name."""

    def sample(self, requests: Sequence[SampleRequest]) -> AsyncIterator[list[Completion]]:
        """Completions as they finish, in any order, each request exactly once.

        Raises :class:`opd_core.errors.SamplingError` if the engine is lost.
        """
        ...


def rollout_seed(*parts: int | str) -> int:
    """A 63-bit seed from what identifies a rollout (run seed, train step, prompt row, try, index),
    so that batching, ranks and engines change nothing."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
