"""What is asked of the teacher model and what it answers, and the checks before it is asked.

A score is ``log p(token_i | token_0 .. token_{i-1})`` at temperature 1: the logit of the token
minus the log-sum-exp of all logits, in float32 whatever the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from opd_core.config import CONTEXT_MARGIN
from opd_core.errors import OPDError

# Bounds what one answer may hold per token, and so what a batch may need in memory.
MAX_ALTERNATIVES = 1024


class RequestRefused(OPDError):
    """The request can never be scored by this server; sending it again is useless."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a client may need to know of the loaded model; lengths in tokens."""

    model_path: str
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    context_length: int
    dtype: str
    device: str

    @property
    def max_input_length(self) -> int:
        """Longest sequence that is accepted, in tokens: as on SGLang, so that a run may change
        between the two."""
        return self.context_length - CONTEXT_MARGIN["embedded"]


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRequest:
    """One sequence of N tokens and what is asked of tokens ``start + 1 .. N - 1``.

    token_ids: [N] int64. start: 0 .. N; N - 1 and N ask for nothing. top_k: how many of the
    likeliest tokens to report per position. token_ids_logprob: [E] int64, ids reported at every
    position.
    """

    token_ids: NDArray[np.int64]
    start: int
    top_k: int = 0
    token_ids_logprob: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def rows(self) -> int:
        """R, how many tokens are scored."""
        return max(0, len(self.token_ids) - 1 - self.start)


@dataclass(frozen=True, slots=True, eq=False)
class ScoreResult:
    """Log-probabilities in nats of tokens ``start + 1 .. N - 1`` (R of them).

    logprobs: [R] float32. top_logprobs and top_ids: [R, top_k], likeliest first.
    token_ids_logprobs: [R, E] in the order of the request's E ids.
    """

    logprobs: NDArray[np.float32]
    top_logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int64]
    token_ids_logprobs: NDArray[np.float32]


class Model(Protocol):
    """What the server needs of a model; tests put their own here."""

    @property
    def facts(self) -> ModelFacts: ...

    def score(self, batch: Sequence[ScoreRequest]) -> list[ScoreResult]:
        """Score a batch in one forward, results in the order of the requests."""
        ...

    def texts(self, token_ids: Sequence[int]) -> list[str] | None:
        """The text of each id alone, or None where the model came without a tokenizer."""
        ...


def check_request(request: ScoreRequest, facts: ModelFacts, *, row: int) -> None:
    """Raise :class:`RequestRefused`, naming ``row``, if the model of ``facts`` cannot score it.

    On a GPU an id outside the embedding aborts the whole device context, so this must come
    before the queue.
    """
    count, start = len(request.token_ids), request.start
    if count == 0:
        raise RequestRefused(f"input_ids cannot be empty. Here row {row} has no ids.")
    if count > facts.max_input_length:
        raise RequestRefused(
            f"row {row}: Input length ({count} tokens) exceeds the maximum allowed length "
            f"({facts.max_input_length} tokens). Send a shorter sequence."
        )
    if start < 0:
        raise RequestRefused(
            f"logprob_start_len={start} in row {row} is negative: send 0 or more, -1 for no rows."
        )
    if start > count:
        raise RequestRefused(
            f"row {row}: logprob_start_len={start} is higher than the number of input tokens "
            f"{count}. Send a value from 0 to {count}, or -1 for no rows."
        )
    limit = min(MAX_ALTERNATIVES, facts.vocab_size)
    if not 0 <= request.top_k <= limit:
        raise RequestRefused(
            f"row {row}: top_logprobs_num={request.top_k} is not between 0 and {limit}. "
            "Ask for fewer."
        )
    if len(request.token_ids_logprob) > MAX_ALTERNATIVES:
        raise RequestRefused(
            f"row {row}: token_ids_logprob has {len(request.token_ids_logprob)} ids, at most "
            f"{MAX_ALTERNATIVES} are allowed. Ask for fewer."
        )
    asked = (("input_ids", request.token_ids), ("token_ids_logprob", request.token_ids_logprob))
    for name, ids in asked:
        outside = ids[(ids < 0) | (ids >= facts.vocab_size)]
        if len(outside):
            raise RequestRefused(
                f"row {row}: {name} has the id {outside[0]}, ids of this model are 0 to "
                f"{facts.vocab_size - 1}. Check that the tokenizer belongs to the model."
            )
