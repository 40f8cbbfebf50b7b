"""From the rollouts of a train step to where its reverse KL lies, beside the update.

64 rollouts of 16k tokens take about a second.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from opd_core.config import ExperimentConfig, TruncatedPolicy
from opd_core.rollout import RolloutState
from opd_core.training.step_files import path_of
from opd_core.training.step_records import StepRecord
from opd_core.training.token_kl import (
    SEGMENTS,
    TOKEN_CLASSES,
    KeptRollout,
    KLSum,
    TokenKL,
    write_token_kl,
)
from opd_core.training.vocabulary import Vocabulary

THINK, THOUGHT = "<think>", "</think>"
ANSWER_SIGNS = ("\\boxed{", "####", "Answer:")
DECIMALS = 5
"""Of the logprobs of a kept rollout."""
POSITIONS = 64
SEARCHED = 20_000
"""Characters at the end of a response in which a recipe's pattern is searched for: it may take
quadratic time, and nothing else runs meanwhile (the GIL)."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scored:
    """One rollout that trains. Index t of every array describes response token t; ``k`` and
    ``teacher`` are 0 where ``mask`` is False."""

    rollout: RolloutState
    ids: Ints
    mask: NDArray[np.bool_]
    student: Floats
    teacher: Floats
    answer_from: int

    @property
    def k(self) -> Floats:
        """``rollout_logprobs - teacher_logprobs``, in nats."""
        return self.student - self.teacher

    @property
    def mean_k(self) -> float:
        """Over the tokens that the student sampled."""
        return float(self.k.sum() / max(self.mask.sum(), 1))


@dataclass(frozen=True, slots=True)
class TokenKLWriter:
    """Keeps a file for each train step; one that cannot be written costs the file only."""

    folder: Path
    vocabulary: Vocabulary
    config: ExperimentConfig

    def write(self, record: StepRecord) -> None:
        """Write the file of a step, once however often it is trained."""
        path = path_of(self.folder, record.train_step)
        try:
            if not path.exists():
                write_token_kl(path, self._measured(record))
        except Exception as error:  # what is only looked at must not end a run
            logger.warning("%s is not written: %s: %s", path, type(error).__name__, error)

    def _measured(self, record: StepRecord) -> TokenKL:
        tracking, step, last = self.config.tracking, record.train_step, self.config.training.steps
        rollouts = [rollout for group in record.groups for rollout in group.rollouts]
        scored = scored_rollouts(
            rollouts, self.vocabulary, self.config.training.truncated, tracking.answer_pattern
        )
        keeps = step in (1, last) or step % tracking.rollouts_every == 0
        seed = (self.config.seed, step)
        kept = kept_rollouts(scored, self.vocabulary, tracking.rollouts_kept if keeps else 0, seed)
        return TokenKL(step, kl_sums(scored, self.vocabulary), kept)


def scored_rollouts(
    rollouts: Sequence[RolloutState],
    vocabulary: Vocabulary,
    truncated: TruncatedPolicy,
    answer_pattern: str | None,
) -> list[Scored]:
    """Those that train on teacher_logprobs, as arrays."""
    found = []
    for rollout in rollouts:
        if not (rollout.trains(truncated) and rollout.teacher_logprobs):
            continue
        ids = np.array(rollout.response_ids, np.int64)
        vocabulary.meet(ids)
        mask = np.array(rollout.response_mask or np.ones(len(ids)), np.bool_)
        student, teacher = (
            np.where(mask, np.array(logprobs, np.float64), 0.0)
            for logprobs in (rollout.rollout_logprobs, rollout.teacher_logprobs)
        )
        pieces = [vocabulary.texts[one] for one in rollout.response_ids]
        start = answer_start("".join(pieces), rollout.prompt.text, answer_pattern)
        ends = np.cumsum(vocabulary.lengths[ids])
        answer_from = int(np.searchsorted(ends, start, side="right")) if start else 0
        found.append(Scored(rollout, ids, mask, student, teacher, answer_from))
    return found


def answer_start(text: str, prompt: str, pattern: str | None) -> int:
    """Where the answer begins in a response, in characters: at the last match of ``pattern``
    in the last ``SEARCHED`` ones.

    None is what models do most: after ``</think>`` (nowhere, where thoughts did not end), else at
    the last ``\\boxed{``, ``####`` or ``Answer:``. Without any of it all is answer.
    """
    if pattern is not None:
        matches = re.compile(pattern).finditer(text, max(len(text) - SEARCHED, 0))
        return max((match.start() for match in matches), default=0)
    if (thought := text.rfind(THOUGHT)) >= 0:
        return thought + len(THOUGHT)
    if THINK in text or prompt.rstrip().endswith(THINK):
        return len(text)
    return max(0, *(text.rfind(sign) for sign in ANSWER_SIGNS))


def kl_sums(scored: Sequence[Scored], vocabulary: Vocabulary) -> tuple[KLSum, ...]:
    """The cross table of all tokens that the student sampled; cells without tokens are left out."""
    if not scored:
        return ()
    sources = sorted({one.rollout.prompt.data_source for one in scored})
    shape = (len(sources), len(SEGMENTS), len(TOKEN_CLASSES), POSITIONS)
    cells = np.concatenate([_cells(one, sources, shape, vocabulary) for one in scored])
    k = np.concatenate([one.k[one.mask] for one in scored])
    tokens = np.bincount(cells)
    sums, squares = np.bincount(cells, k), np.bincount(cells, k * k)
    table = []
    for cell in np.flatnonzero(tokens):
        source, segment, kind, position = (int(n) for n in np.unravel_index(cell, shape))
        names = sources[source], SEGMENTS[segment], TOKEN_CLASSES[kind]
        numbers = int(tokens[cell]), float(sums[cell]), float(squares[cell])
        table.append(KLSum(*names, position, *numbers))
    return tuple(table)


def _cells(one: Scored, sources: list[str], shape: tuple[int, ...], vocabulary: Vocabulary) -> Ints:
    """The cell of each token that the student sampled."""
    place = np.arange(len(one.ids))
    _, exponents = np.frexp(place + 1.0)  # x = m * 2**e with m in [0.5, 1): no logarithm to round
    coordinates = (
        np.full(len(place), sources.index(one.rollout.prompt.data_source)),
        (place >= one.answer_from).astype(np.int64),
        vocabulary.classes[one.ids],
        exponents - 1,
    )
    return np.ravel_multi_index(coordinates, shape)[one.mask]


def kept_rollouts(
    scored: Sequence[Scored], vocabulary: Vocabulary, count: int, seed: tuple[int, int]
) -> tuple[KeptRollout, ...]:
    """Half (the larger) those of the largest mean k, half drawn from the others by ``seed``."""
    ranked = sorted(scored, key=lambda one: -one.mean_k)
    worst, others = ranked[: count - count // 2], ranked[count - count // 2 :]
    drawn = np.random.default_rng(seed).permutation(len(others))[: count // 2]
    return (
        *(_kept(one, "worst", vocabulary) for one in worst),
        *(_kept(others[number], "random", vocabulary) for number in sorted(drawn)),
    )


def _kept(one: Scored, why: str, vocabulary: Vocabulary) -> KeptRollout:
    rollout, prompt = one.rollout, one.rollout.prompt
    return KeptRollout(
        group_id=rollout.group_id,
        index=rollout.index,
        row=prompt.row,
        data_source=prompt.data_source,
        why=why,
        reward=rollout.reward,
        finish_reason=rollout.finish_reason,
        prompt_text=prompt.text,
        prompt_tokens=len(prompt.token_ids),
        tokens=tuple(vocabulary.texts[token] for token in rollout.response_ids),
        response_mask=tuple(one.mask.tolist()),
        student=tuple(one.student.round(DECIMALS).tolist()),
        teacher=tuple(one.teacher.round(DECIMALS).tolist()),
        answer_from=one.answer_from,
    )
