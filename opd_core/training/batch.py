"""From groups to the numbers that one train step needs, cut for ranks and micro-batches.

Everything that depends on the whole batch (valid-token counts, the baseline, group-relative
advantages) is computed here, before the cut, so that any number of ranks and any micro-batch split
gives the same update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opd_core.objective.advantages import group_relative_advantages
from opd_core.rollout import Group


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One rollout as the learner sees it. ``teacher_logprobs`` is empty when OPD is off."""

    token_ids: tuple[int, ...]
    prompt_tokens: int
    rollout_logprobs: tuple[float, ...]
    teacher_logprobs: tuple[float, ...]
    task_advantage: float
    source_index: int

    @property
    def response_tokens(self) -> int:
        """R, the number of tokens that train."""
        return len(self.token_ids) - self.prompt_tokens


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """Samples of one optimizer step on one rank; ``valid_tokens`` counts those of all ranks."""

    samples: tuple[TrainSample, ...]
    valid_tokens: int


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One train step's samples on one rank. ``baseline`` is in nats."""

    mini_batches: tuple[MiniBatch, ...]
    sources: tuple[str, ...]
    scored: bool
    baseline: float = 0.0


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """A micro-batch on the device, right-padded; index i of every [B, T] field describes
    ``token_ids[:, i]``. ``flat`` are the indices of the valid tokens in the flattened [B*T]."""

    token_ids: Int[Tensor, "B T"]
    response_mask: Bool[Tensor, "B T"]
    rollout_logprobs: Float[Tensor, "B T"]
    teacher_logprobs: Float[Tensor, "B T"]
    task_advantages: Float[Tensor, " B"]
    source_index: Int[Tensor, "B T"]
    flat: Int[Tensor, " N"]


def build_batch(
    groups: Sequence[Group],
    *,
    sources: tuple[str, ...],
    scored: bool,
    use_rewards: bool,
    use_baseline: bool,
    mini_batches: int,
) -> TrainBatch:
    """The whole step, before it is cut for ranks.

    ``mini_batches`` is the number of optimizer steps; fewer if there are fewer samples. The
    baseline is the token mean of ``rollout_logprobs - teacher_logprobs``.
    """
    advantages = _task_advantages(groups) if use_rewards else {}
    samples = [
        TrainSample(
            rollout.prompt.token_ids + rollout.response_ids,
            len(rollout.prompt.token_ids),
            rollout.rollout_logprobs,
            (rollout.teacher_logprobs or ()) if scored else (),
            advantages.get((group.group_id, rollout.index), 0.0),
            sources.index(rollout.prompt.data_source),
        )
        for group in groups
        for rollout in group.rollouts
    ]
    parts = [samples[i::mini_batches] for i in range(mini_batches)]
    return TrainBatch(
        tuple(
            MiniBatch(tuple(part), sum(sample.response_tokens for sample in part))
            for part in parts
            if part
        ),
        sources,
        scored,
        _mean_gap(samples) if use_baseline and scored else 0.0,
    )


def shard(batch: TrainBatch, ranks: int) -> list[TrainBatch]:
    """One batch per rank: samples are dealt longest first, so that ranks get like work."""
    shards = []
    for rank in range(ranks):
        dealt = []
        for mini in batch.mini_batches:
            by_length = sorted(mini.samples, key=lambda s: len(s.token_ids), reverse=True)
            dealt.append(replace(mini, samples=tuple(by_length[rank::ranks])))
        shards.append(replace(batch, mini_batches=tuple(dealt)))
    return shards


def micro_batches(
    samples: Sequence[TrainSample], max_tokens: int
) -> Iterator[tuple[TrainSample, ...]]:
    """Cut samples so that rows x longest row stays within ``max_tokens`` (one row always goes)."""
    rows: list[TrainSample] = []
    for sample in sorted(samples, key=lambda s: len(s.token_ids), reverse=True):
        if rows and (len(rows) + 1) * len(rows[0].token_ids) > max_tokens:
            yield tuple(rows)
            rows = []
        rows.append(sample)
    if rows:
        yield tuple(rows)


def collate(samples: Sequence[TrainSample], pad_id: int, device: torch.device) -> PaddedBatch:
    """Right-pad samples to tensors on ``device``."""
    longest = max(len(sample.token_ids) for sample in samples)
    shape = (len(samples), longest)
    ids = torch.full(shape, pad_id)
    mask = torch.zeros(shape, dtype=torch.bool)
    rollout, teacher = torch.zeros(shape), torch.zeros(shape)
    for row, sample in enumerate(samples):
        first, last = sample.prompt_tokens, len(sample.token_ids)
        ids[row, :last] = torch.tensor(sample.token_ids)
        mask[row, first:last] = True
        rollout[row, first:last] = torch.tensor(sample.rollout_logprobs)
        if sample.teacher_logprobs:
            teacher[row, first:last] = torch.tensor(sample.teacher_logprobs)
    source = torch.tensor([s.source_index for s in samples])[:, None].expand(shape)
    task = torch.tensor([s.task_advantage for s in samples])
    flat = mask.flatten().nonzero()[:, 0]
    fields = (ids, mask, rollout, teacher, task, source, flat)
    return PaddedBatch(*(field.to(device, non_blocking=True) for field in fields))


def _task_advantages(groups: Sequence[Group]) -> dict[tuple[int, int], float]:
    keys, rewards, index = [], [], []
    for number, group in enumerate(groups):
        for rollout in group.rollouts:
            if rollout.reward is None:
                raise ValueError(f"rollout {rollout.index} of group {group.group_id} has no reward")
            keys.append((group.group_id, rollout.index))
            rewards.append(rollout.reward)
            index.append(number)
    values = group_relative_advantages(torch.tensor(rewards), torch.tensor(index), len(groups))
    return dict(zip(keys, values.tolist(), strict=True))


def _mean_gap(samples: Sequence[TrainSample]) -> float:
    gaps = [
        own - teacher
        for sample in samples
        for own, teacher in zip(sample.rollout_logprobs, sample.teacher_logprobs, strict=True)
    ]
    return sum(gaps) / max(len(gaps), 1)
