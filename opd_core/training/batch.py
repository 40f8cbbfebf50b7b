"""From groups to the numbers that one train step needs.

Everything that depends on the whole batch (valid-token counts, the baseline, group-relative
advantages) is computed here, before it is cut for ranks and micro-batches, so that any cut gives
the same update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import torch

from opd_core.config import TruncatedPolicy
from opd_core.objective.advantages import group_relative_advantages
from opd_core.rollout import Group, RolloutState


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One rollout as the learner sees it.

    Index t of every per-token field describes response token t. ``teacher_logprobs`` is empty when
    OPD is off. ``response_mask`` is True on tokens that the student sampled, the others are context
    that no sum counts; empty: it sampled all. ``staleness`` is the number of train steps between
    the weights that sampled a token and those that it trains; empty: all 0. ``rollout`` is its
    group id and index, by which an error names it.
    """

    token_ids: tuple[int, ...]
    prompt_tokens: int
    rollout_logprobs: tuple[float, ...]
    teacher_logprobs: tuple[float, ...]
    task_advantage: float
    source_index: int
    rollout: tuple[int, int] = (0, 0)
    response_mask: tuple[bool, ...] = ()
    staleness: tuple[int, ...] = ()

    @property
    def response_tokens(self) -> int:
        """The number of tokens that train."""
        mask = self.response_mask
        return sum(mask) if mask else len(self.token_ids) - self.prompt_tokens


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """Samples of one optimizer step over all ranks, and their number of tokens that train."""

    samples: tuple[TrainSample, ...]
    valid_tokens: int


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One train step's samples over all ranks. ``baseline`` is in nats; ``measure_teacher`` asks
    for the norm of the teacher's own gradient where that takes a pass of its own."""

    mini_batches: tuple[MiniBatch, ...]
    sources: tuple[str, ...]
    scored: bool
    baseline: float = 0.0
    measure_teacher: bool = False


def build_batch(
    groups: Sequence[Group],
    *,
    policy_version: int,
    truncated: TruncatedPolicy,
    sources: tuple[str, ...],
    scored: bool,
    use_rewards: bool,
    use_baseline: bool,
    mini_batches: int,
    measure_teacher: bool = False,
) -> TrainBatch:
    """The whole step.

    ``policy_version`` is that of the weights that train, from which staleness is measured.
    ``truncated`` says what becomes of truncated rollouts: ``mask`` leaves out their tokens, and
    their rewards count in their groups; ``drop`` leaves out both. ``mini_batches`` is the number of
    optimizer steps; fewer if there are fewer samples. The baseline is the token mean of
    ``rollout_logprobs - teacher_logprobs``.
    """
    advantages = _task_advantages(groups, truncated) if use_rewards else {}
    samples = [
        TrainSample(
            rollout.prompt.token_ids + rollout.response_ids,
            len(rollout.prompt.token_ids),
            rollout.rollout_logprobs,
            (rollout.teacher_logprobs or ()) if scored else (),
            advantages.get((group.group_id, rollout.index), 0.0),
            sources.index(rollout.prompt.data_source),
            (group.group_id, rollout.index),
            () if all(rollout.response_mask) else rollout.response_mask,
            _staleness(rollout, policy_version),
        )
        for group in groups
        for rollout in group.rollouts
        if rollout.trains(truncated)
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
        measure_teacher,
    )


def _staleness(rollout: RolloutState, policy_version: int) -> tuple[int, ...]:
    behind = tuple(policy_version - version for version in rollout.policy_versions)
    return behind if any(behind) else ()


def _task_advantages(
    groups: Sequence[Group], truncated: TruncatedPolicy
) -> dict[tuple[int, int], float]:
    keys, rewards, index = [], [], []
    for number, group in enumerate(groups):
        for rollout in group.rollouts:
            if truncated == "drop" and rollout.truncated:
                continue
            if rollout.reward is None:
                raise ValueError(f"rollout {rollout.index} of group {group.group_id} has no reward")
            keys.append((group.group_id, rollout.index))
            rewards.append(rollout.reward)
            index.append(number)
    values = group_relative_advantages(
        torch.tensor(rewards), torch.tensor(index, dtype=torch.long), len(groups)
    )
    return dict(zip(keys, values.tolist(), strict=True))


def _mean_gap(samples: Sequence[TrainSample]) -> float:
    gaps: list[float] = []
    for sample in samples:
        pairs = zip(sample.rollout_logprobs, sample.teacher_logprobs, strict=True)
        found = [own - teacher for own, teacher in pairs]
        gaps += compress(found, sample.response_mask) if sample.response_mask else found
    return sum(gaps) / max(len(gaps), 1)
