"""Where the reverse KL lies, before and after training: tables over all tokens, sentences, and kept
rollouts.

*Before* are the first train steps that are recorded, *after* the last ones (five each, fewer in a
short run); rollouts are those of the first and the last train step that kept any. Only these files
are read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from opd_core.analysis.kl_tokens import ShownRollout, k_of, shown_rollouts
from opd_core.training.step_files import step_files
from opd_core.training.token_kl import (
    SEGMENTS,
    TOKEN_CLASSES,
    KeptRollout,
    KLSum,
    TokenKL,
    keeps_rollouts,
    read_token_kl,
)

STEPS_POOLED = 5
MAX_SOURCES = 12
OTHERS = "all others"
MATTERS = 0.1
"""The share of the KL from which a kind is named."""
WORST = 0.01
"""The share of tokens that is called the worst."""


@dataclass(frozen=True)
class Moment:
    """Tokens of one kind in one time: their number, mean k and its standard error in nats a token.

    The error is that of a mean over independent tokens; those of one rollout resemble each other,
    so that it is a lower bound. NaN below two tokens.
    """

    tokens: int
    mean: float
    stderr: float
    share: float
    """Of the time's whole sum of k, NaN where that is not above 0."""


@dataclass(frozen=True)
class Row:
    """One kind of tokens; None where it has no token in that time."""

    label: str
    before: Moment | None
    after: Moment | None


@dataclass(frozen=True)
class KLTable:
    """Rows by one dimension, with a sentence on what stands out."""

    name: str
    rows: tuple[Row, ...]
    said: str


@dataclass(frozen=True)
class RolloutsOfStep:
    """What is shown of one train step's kept rollouts, the worst first."""

    train_step: int
    rollouts: tuple[ShownRollout, ...]
    not_shown: int
    said: str


@dataclass(frozen=True)
class KLView:
    """All that the page shows. ``before`` and ``after`` are train steps; one record alone has no
    ``after``."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    tables: tuple[KLTable, ...]
    steps: tuple[RolloutsOfStep, ...]
    prompt_tokens: str


def load_kl_view(folder: Path) -> KLView | None:
    """What the records in ``folder`` say; None without any. Raises
    :class:`~opd_core.errors.DataError`, naming the file that cannot be read."""
    paths = list(step_files(folder).values())
    if not paths:
        return None
    pooled = min(STEPS_POOLED, max(len(paths) // 2, 1))
    first = [read_token_kl(path) for path in paths[:pooled]]
    last = [read_token_kl(path) for path in paths[-pooled:]] if len(paths) > 1 else []
    kept = _with_rollouts(first, paths[pooled:])
    latest = _with_rollouts(reversed(last), reversed(paths[:-pooled]))
    steps = [record for record in (kept, latest) if record is not None]
    steps = steps[:1] if len({record.train_step for record in steps}) < 2 else steps
    rollouts = [rollout for record in steps for rollout in record.rollouts]
    return KLView(
        before=tuple(record.train_step for record in first),
        after=tuple(record.train_step for record in last),
        tables=_tables(_sums(first), _sums(last)),
        steps=tuple(_of_step(record) for record in steps),
        prompt_tokens=_prompt_said(rollouts),
    )


def _with_rollouts(read: Iterable[TokenKL], unread: Iterable[Path]) -> TokenKL | None:
    """The first record that kept rollouts."""
    for record in read:
        if record.rollouts:
            return record
    records = map(read_token_kl, filter(keeps_rollouts, unread))
    return next((record for record in records if record.rollouts), None)


def _sums(records: Iterable[TokenKL]) -> list[KLSum]:
    return [cell for record in records for cell in record.sums]


def _tables(before: Sequence[KLSum], after: Sequence[KLSum]) -> tuple[KLTable, ...]:
    positions = sorted({cell.position for cell in (*before, *after)})
    sources = _largest_sources([*before, *after])
    return (
        _table("position", before, after, lambda cell: cell.position, positions, position_label),
        _table("segment", before, after, lambda cell: cell.segment, SEGMENTS),
        _table("token class", before, after, lambda cell: cell.token_class, TOKEN_CLASSES),
        _table(
            "data source",
            before,
            after,
            lambda cell: cell.data_source if cell.data_source in sources else OTHERS,
            [*sources, OTHERS],
        ),
    )


def _largest_sources(cells: Iterable[KLSum]) -> list[str]:
    tokens: defaultdict[str, int] = defaultdict(int)
    for cell in cells:
        tokens[cell.data_source] += cell.tokens
    return sorted(sorted(tokens, key=lambda name: -tokens[name])[:MAX_SOURCES])


def _table(
    name: str,
    before: Sequence[KLSum],
    after: Sequence[KLSum],
    kind: Callable[[KLSum], Hashable],
    kinds: Iterable[Hashable],
    label: Callable[..., str] = str,
) -> KLTable:
    early, late = _moments(before, kind), _moments(after, kind)
    rows = tuple(
        Row(label(each), early.get(each), late.get(each))
        for each in kinds
        if each in early or each in late
    )
    return KLTable(name, rows, _said(rows, late=bool(after)))


def _moments(cells: Sequence[KLSum], kind: Callable[[KLSum], Hashable]) -> dict[Hashable, Moment]:
    groups: defaultdict[Hashable, list[KLSum]] = defaultdict(list)
    for cell in cells:
        if cell.tokens:
            groups[kind(cell)].append(cell)
    total = sum(cell.k for cell in cells)
    return {each: _moment(group, total) for each, group in groups.items()}


def _moment(cells: Sequence[KLSum], total: float) -> Moment:
    tokens = sum(cell.tokens for cell in cells)
    k = sum(cell.k for cell in cells)
    mean, stderr = k / tokens, math.nan
    if tokens > 1:
        k_squared = sum(cell.k_squared for cell in cells)
        variance = max(k_squared - k * mean, 0.0) / (tokens - 1)
        stderr = math.sqrt(variance / tokens)
    return Moment(tokens, mean, stderr, k / total if total > 0 else math.nan)


def position_label(position: int) -> str:
    """Which response tokens, counted from 1, a position stands for."""
    first, last = 2**position, 2 ** (position + 1) - 1
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _said(rows: Sequence[Row], *, late: bool) -> str:
    """Which kind holds the most KL for its tokens; of those that matter, if any does."""
    found = [(row.label, row.after if late else row.before) for row in rows]
    moments = [(label, moment) for label, moment in found if moment is not None]
    if len(moments) < 2 or any(math.isnan(moment.share) for _, moment in moments):
        return ""
    matter = [pair for pair in moments if pair[1].share >= MATTERS] or moments
    label, most = max(matter, key=lambda pair: pair[1].share / pair[1].tokens)
    of_tokens = most.tokens / sum(moment.tokens for _, moment in moments)
    when = "After training" if late else "In these steps"
    said = f"{when}, “{label}” holds {most.share:.0%} of the KL in {of_tokens:.0%} of the tokens."
    if most.share > 1:
        said = f"{said[:-1]}; the sum over all others is negative."
    return said.replace("%", "\u00a0%")


def _of_step(record: TokenKL) -> RolloutsOfStep:
    shown = tuple(shown_rollouts(record.rollouts))
    return RolloutsOfStep(
        record.train_step, shown, len(record.rollouts) - len(shown), worst_said(record.rollouts)
    )


def worst_said(rollouts: Iterable[KeptRollout]) -> str:
    """How much of the disagreement the worst tokens of these rollouts carry, in a sentence."""
    parts = [np.abs(k_of(r))[np.asarray(r.response_mask, dtype=bool)] for r in rollouts]
    size = np.sort(np.concatenate(parts or [np.empty(0)]))
    if not size.size or not size.sum():
        return ""
    worst = max(1, round(WORST * size.size))
    share = size[-worst:].sum() / size.sum()
    which = f"worst {WORST:.0%} carry" if worst > 1 else "worst one carries"
    said = (
        f"Of the {size.size:,} tokens of these rollouts, the {which} {share:.0%} of the "
        f"disagreement (sum of |k|); half of all tokens have |k| ≤ {np.median(size):.2g}."
    )
    return said.replace("%", "\u00a0%")


def _prompt_said(rollouts: Sequence[KeptRollout]) -> str:
    if not rollouts:
        return "not scored"
    mean = float(np.mean([rollout.prompt_tokens for rollout in rollouts]))
    return f"not scored; {mean:,.0f} tokens on average in the rollouts below"
