"""Where the reverse KL of a train step lies: sums over all tokens, and a few rollouts whole.

The driver writes one file for each train step, the report reads them. k here is
``rollout_logprobs - teacher_logprobs``: ``old_logprobs`` stay on the training ranks, and differ
from
``rollout_logprobs`` by the engine gap only (and by staleness, where a run allows any).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from opd_core.errors import DataError
from opd_core.rollout_json import from_json, from_plain, to_json, to_plain
from opd_core.training.step_files import step_files
from opd_core.whole_file import write_whole

NO_ROLLOUTS = b'"rollouts":[]}'
"""How a record ends that keeps none."""
Segment = Literal["reasoning", "answer"]
SEGMENTS: tuple[str, ...] = get_args(Segment)
TokenClass = Literal["digit", "word", "punctuation", "symbol", "whitespace", "special", "other"]
TOKEN_CLASSES: tuple[str, ...] = get_args(TokenClass)


@dataclass(frozen=True, slots=True)
class KLSum:
    """One cell of the table over all valid response tokens of a train step.

    ``position`` is floor(log2(t + 1)) of the response token t (counted from 0): 0, 1-2, 3-6, 7-14 …
    ``k`` and ``k_squared`` are sums over its ``tokens``, in nats and nats².
    """

    data_source: str
    segment: str
    token_class: str
    position: int
    tokens: int
    k: float
    k_squared: float


@dataclass(frozen=True, slots=True)
class KeptRollout:
    """One rollout to look at. Index t of each per-token field describes response token t; the
    logprobs are in nats, 0 where ``response_mask`` is False (a tool's token).

    ``why`` is ``worst`` (largest mean k of its step) or ``random``. The answer begins at token
    ``answer_from``; before it is reasoning.
    """

    group_id: int
    index: int
    row: int
    data_source: str
    why: str
    reward: float | None
    finish_reason: str
    prompt_text: str
    prompt_tokens: int
    tokens: tuple[str, ...]
    response_mask: tuple[bool, ...]
    student: tuple[float, ...]
    teacher: tuple[float, ...]
    answer_from: int


@dataclass(frozen=True, slots=True)
class TokenKL:
    """What is kept of one train step; ``rollouts`` only of some steps."""

    train_step: int
    sums: tuple[KLSum, ...]
    rollouts: tuple[KeptRollout, ...]


def write_token_kl(path: Path, record: TokenKL) -> None:
    """Write it; it appears whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_json(to_plain(record)))


def read_token_kl(path: Path) -> TokenKL:
    """The inverse of :func:`write_token_kl`. Raises :class:`DataError`, naming the file."""
    try:
        record: TokenKL = from_plain(TokenKL, from_json(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected a train step's token KL, got {error}") from None
    return record


def keeps_rollouts(path: Path) -> bool:
    """Whether a record may keep rollouts, by its end: reading all of a long run takes half a
    minute."""
    try:
        with path.open("rb") as file:
            file.seek(-len(NO_ROLLOUTS), os.SEEK_END)
            return file.read() != NO_ROLLOUTS
    except OSError:  # whoever reads it says why it cannot be read
        return True


def read_token_kls(folder: Path) -> Iterator[TokenKL]:
    """All of a run, one after the other, in the order of their train steps. Raises
    :class:`DataError`."""
    return map(read_token_kl, step_files(folder).values())
