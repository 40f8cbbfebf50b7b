"""Which samples share a forward on which rank, and the tensors of one such micro-batch.

Two layouts of a micro-batch. Padded: a row a sample, all as wide as the longest. Packed: one row in
which the samples lie end to end, so that no token is computed for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opd_core.training.attention import boundaries_of
from opd_core.training.batch import TrainSample

Plan = list[list[tuple[TrainSample, ...]]]
_HALVINGS = 20


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward computes, on the device; index i of every [B, T] field describes
    ``token_ids[:, i]``. Packed: B = 1. Where the mask is False (prompt, padding, a tool's tokens)
    the rest is without meaning.
    """

    token_ids: Int[Tensor, "B T"]
    position_ids: Int[Tensor, "B T"]
    """From 0 in each sample; padding counts on."""
    response_mask: Bool[Tensor, "B T"]
    rollout_logprobs: Float[Tensor, "B T"]
    teacher_logprobs: Float[Tensor, "B T"]
    task_advantages: Float[Tensor, "B T"]
    staleness: Int[Tensor, "B T"]
    """Train steps between the weights that sampled a token and those that it trains."""
    source_index: Int[Tensor, "B T"]
    rollout_index: Int[Tensor, "B T"]
    """The place in ``samples`` of a token's rollout."""
    flat: Int[Tensor, " N"]
    """Indices of the valid tokens in the flattened [B*T]."""
    samples: tuple[TrainSample, ...]
    """On the host; empty for a rank that has no work left."""
    model_inputs: dict[str, Any]
    """Further keyword arguments of the model's forward."""


def plan(
    samples: Sequence[TrainSample], *, ranks: int, max_tokens: int, packed: bool, hidden_size: int
) -> Plan:
    """``plan[rank][number]``: the samples of each micro-batch.

    Every rank gets the same number of micro-batches, since their collectives must match; some may
    be empty. A micro-batch holds at most ``max_tokens`` tokens (padded: rows x longest), a longer
    sample goes alone. There are as few as that allows, rounded up to a multiple of ``ranks``.

    Neighbours in length share a micro-batch: that pads least, and runs of equal lengths attend in
    one call. The cuts are where the largest micro-batch has the least work. Only if sequences pack
    so badly in this order that other company needs fewer micro-batches, first-fit decreasing
    chooses the company. Micro-batches of one number run at the same time on all ranks: these are
    the most alike, and which rank has the largest alternates.

    The order of the input decides only between samples of one length.
    """
    if not samples:
        return [[] for _ in range(ranks)]
    longest_first = sorted(samples, key=_length, reverse=True)
    parts = _even(longest_first, ranks, max_tokens, packed, hidden_size)
    if packed:
        first_fit = _first_fit(longest_first, max_tokens)
        if _round_up(len(first_fit), ranks) < _round_up(len(parts), ranks):
            parts = first_fit
    parts += [[] for _ in range(-len(parts) % ranks)]
    parts.sort(key=lambda part: _part_work(part, packed, hidden_size), reverse=True)
    rounds = [parts[i : i + ranks] for i in range(0, len(parts), ranks)]
    rounds = [part[::-1] if number % 2 else part for number, part in enumerate(rounds)]
    return [[tuple(part[rank]) for part in rounds] for rank in range(ranks)]


def work(length: int, hidden_size: int) -> float:
    """n + n^2 / (12 H): a sequence's work, in units of one token's linear layers.

    A transformer layer of hidden size H has about 12 H^2 weights (4 H^2 in attention, 8 H^2 in the
    MLP), so 24 H^2 FLOPs a token. Scores and their weighted sum take 4 H FLOPs for each token seen,
    n / 2 of them in the mean of a causal sequence: 2 H n^2 in all. (Forward; backward doubles both.
    After Kaplan et al. 2020, section 2.1, with the causal half.)
    """
    return length + length**2 / (12 * hidden_size)


def collate(
    samples: Sequence[TrainSample], *, packed: bool, pad_id: int, device: torch.device
) -> MicroBatch:
    """The tensors of one micro-batch.

    No samples give one pad token that trains nothing: forward and backward still run, and add
    exactly 0.
    """
    lengths = [_length(s) for s in samples] or [1]
    shape = (1, sum(lengths)) if packed else (len(lengths), max(lengths))
    starts = [0, *accumulate(lengths)] if packed else [row * shape[1] for row in range(shape[0])]
    fields = {
        "token_ids": torch.full(shape, pad_id),
        # Padding counts on: a break would make the library build a [B, T, T] mask for it.
        "position_ids": torch.arange(shape[1]).repeat(shape[0], 1),
        "response_mask": torch.zeros(shape, dtype=torch.bool),
        "rollout_logprobs": torch.zeros(shape),
        "teacher_logprobs": torch.zeros(shape),
        "task_advantages": torch.zeros(shape),
        "staleness": torch.zeros(shape, dtype=torch.long),
        "source_index": torch.zeros(shape, dtype=torch.long),
        "rollout_index": torch.zeros(shape, dtype=torch.long),
    }
    end_to_end = {name: field.view(-1) for name, field in fields.items()}
    for number, (sample, start) in enumerate(zip(samples, starts, strict=False)):
        _fill(end_to_end, number, sample, start)
    fields["flat"] = end_to_end["response_mask"].nonzero()[:, 0]
    moved: dict[str, Any] = {
        name: field.to(device, non_blocking=True) for name, field in fields.items()
    }
    inputs = {"boundaries": boundaries_of(lengths, device)} if packed else {}
    return MicroBatch(**moved, samples=tuple(samples), model_inputs=inputs)


def _fill(fields: dict[str, Tensor], number: int, sample: TrainSample, start: int) -> None:
    """Write one sample into fields that are seen as one row."""
    end = start + _length(sample)
    response = slice(start + sample.prompt_tokens, end)
    fields["token_ids"][start:end] = torch.tensor(sample.token_ids)
    fields["position_ids"][start:end] = torch.arange(end - start)
    mask = sample.response_mask
    fields["response_mask"][response] = torch.tensor(mask) if mask else True
    fields["rollout_logprobs"][response] = torch.tensor(sample.rollout_logprobs)
    if sample.teacher_logprobs:
        fields["teacher_logprobs"][response] = torch.tensor(sample.teacher_logprobs)
    if sample.staleness:
        fields["staleness"][response] = torch.tensor(sample.staleness)
    fields["task_advantages"][start:end] = sample.task_advantage
    fields["source_index"][start:end] = sample.source_index
    fields["rollout_index"][start:end] = number


def _length(sample: TrainSample) -> int:
    return len(sample.token_ids)


def _round_up(number: int, ranks: int) -> int:
    return number + -number % ranks


def _part_work(part: Sequence[TrainSample], packed: bool, hidden_size: int) -> float:
    """Work of a micro-batch whose longest sample comes first, padding included."""
    return sum(work(_length(s if packed else part[0]), hidden_size) for s in part)


def _even(
    longest_first: Sequence[TrainSample],
    ranks: int,
    max_tokens: int,
    packed: bool,
    hidden_size: int,
) -> list[list[TrainSample]]:
    """Cut into the fewest parts, rounded up to a multiple of ``ranks``, so that the largest has the
    least work; found by bisection over a bound on the work of a part."""
    parts = _cut(longest_first, max_tokens, float("inf"), packed, hidden_size)
    number = _round_up(len(parts), ranks)
    low, high = 0.0, max(_part_work(part, packed, hidden_size) for part in parts)
    for _ in range(_HALVINGS):
        bound = (low + high) / 2
        tried = _cut(longest_first, max_tokens, bound, packed, hidden_size)
        if len(tried) > number:
            low = bound
        else:
            parts, high = tried, bound
    return parts


def _cut(
    longest_first: Sequence[TrainSample],
    max_tokens: int,
    max_work: float,
    packed: bool,
    hidden_size: int,
) -> list[list[TrainSample]]:
    """Cut into parts of neighbours, each as large as both bounds allow, one sample at least."""
    parts: list[list[TrainSample]] = []
    tokens, done = 0, 0.0
    for sample in longest_first:
        counted = _length(sample if packed or not parts else parts[-1][0])
        tokens, done = tokens + counted, done + work(counted, hidden_size)
        if parts and tokens <= max_tokens and done <= max_work:
            parts[-1].append(sample)
        else:
            parts.append([sample])
            tokens, done = _length(sample), work(_length(sample), hidden_size)
    return parts


def _first_fit(longest_first: Sequence[TrainSample], max_tokens: int) -> list[list[TrainSample]]:
    """First-fit decreasing: each sample to the first part that has room."""
    parts: list[list[TrainSample]] = []
    tokens: list[int] = []
    for sample in longest_first:
        length = _length(sample)
        fits = (i for i, held in enumerate(tokens) if held + length <= max_tokens)
        chosen = next(fits, len(parts))
        if chosen == len(parts):
            parts.append([])
            tokens.append(0)
        parts[chosen].append(sample)
        tokens[chosen] += length
    return parts
