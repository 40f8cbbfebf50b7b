"""From groups to the numbers that one train step needs.

Everything that depends on the whole batch (valid-token counts, the baseline, group-relative
advantages) is computed here, before it is cut for ranks and micro-batches, so that any cut gives
the same update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from opd_core.objective.advantages import group_relative_advantages
from opd_core.rollout import Group


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One rollout as the learner sees it. ``teacher_logprobs`` is empty when OPD is off;
    ``rollout`` is its group id and index, by which an error names it."""

    token_ids: tuple[int, ...]
    prompt_tokens: int
    rollout_logprobs: tuple[float, ...]
    teacher_logprobs: tuple[float, ...]
    task_advantage: float
    source_index: int
    rollout: tuple[int, int] = (0, 0)

    @property
    def response_tokens(self) -> int:
        """R, the number of tokens that train."""
        return len(self.token_ids) - self.prompt_tokens


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """Samples of one optimizer step over all ranks, and their number of response tokens."""

    samples: tuple[TrainSample, ...]
    valid_tokens: int


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One train step's samples over all ranks. ``baseline`` is in nats."""

    mini_batches: tuple[MiniBatch, ...]
    sources: tuple[str, ...]
    scored: bool
    baseline: float = 0.0


def build_batch(
    groups: Sequence[Group],
    *,
    sources: tuple[str, ...],
    scored: bool,
    use_rewards: bool,
    use_baseline: bool,
    mini_batches: int,
) -> TrainBatch:
    """The whole step.

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
            (group.group_id, rollout.index),
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
