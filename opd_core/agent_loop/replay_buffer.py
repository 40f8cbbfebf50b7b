"""Finished groups that may train; nothing else ever gets in."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from opd_core.config import TruncatedPolicy
from opd_core.errors import TrainingError
from opd_core.rollout import Group, RolloutState, Status
from opd_core.rollout_json import group_from_plain, group_to_plain, refused_as


class ReplayBuffer:
    """COMPLETED groups in the order in which they train.

    ``needs_scores`` / ``needs_rewards``: what every rollout must carry to be accepted. A truncated
    one that ``truncated`` keeps from training needs no scores, and a dropped one no reward.
    """

    def __init__(
        self, *, needs_scores: bool, needs_rewards: bool, truncated: TruncatedPolicy = "train"
    ) -> None:
        self._needs_scores = needs_scores
        self._needs_rewards = needs_rewards
        self._truncated = truncated
        self._groups: list[Group] = []

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> tuple[Group, ...]:
        """What is in it."""
        return tuple(self._groups)

    def put(self, group: Group) -> None:
        """Accept a group. Raises :class:`TrainingError`, naming the rollout, for one that must not
        train."""
        if group.status is not Status.COMPLETED:
            raise TrainingError(
                f"group {group.group_id} is {group.status}; only COMPLETED ones train"
            )
        for rollout in group.rollouts:
            self._check(rollout)
        self._groups.append(group)

    def take(self, count: int) -> list[Group]:
        """Remove and return ``count`` groups: those of the oldest weights, which would be too old
        first, and of these those with the lowest ids."""
        self._groups.sort(key=lambda group: (group.oldest_version, group.group_id))
        taken, self._groups = self._groups[:count], self._groups[count:]
        return taken

    def take_older(self, policy_version: int) -> list[Group]:
        """Remove and return the groups of which a token is of weights before that version."""
        older = [group for group in self._groups if group.oldest_version < policy_version]
        self._groups = [g for g in self._groups if g.oldest_version >= policy_version]
        return older

    def state(self) -> list[dict[str, Any]]:
        """The groups as plain JSON data."""
        return [group_to_plain(group) for group in self._groups]

    def restore(self, state: Iterable[object]) -> None:
        """Hold the groups of ``state`` and no others. Raises :class:`TrainingError` for what is no
        group or must not train."""
        self._groups = []
        with refused_as("state of the replay buffer"):
            for plain in state:
                self.put(group_from_plain(plain))

    def _check(self, rollout: RolloutState) -> None:
        who = f"rollout {rollout.index} of group {rollout.group_id} (data row {rollout.prompt.row})"
        if rollout.status is not Status.COMPLETED:
            raise TrainingError(f"{who} is {rollout.status}; only COMPLETED ones train")
        length, trains = len(rollout.response_ids), rollout.trains(self._truncated)
        per_token = [("rollout_logprobs", rollout.rollout_logprobs)]
        if self._needs_scores and trains:
            per_token.append(("teacher_logprobs", rollout.teacher_logprobs or ()))
        for name, values in per_token:
            if len(values) != length or not all(map(math.isfinite, values)):
                raise TrainingError(f"{who}: {name} are not {length} finite numbers")
        for name in ("response_mask", "policy_versions"):
            if len(getattr(rollout, name)) not in (0, length):
                raise TrainingError(f"{who}: {name} does not go with its {length} tokens")
        counts = self._needs_rewards and (trains or self._truncated != "drop")
        if counts and (rollout.reward is None or not math.isfinite(rollout.reward)):
            raise TrainingError(
                f"{who} has reward {rollout.reward}, and task_adv_weight is above 0: the judge "
                "must give every rollout a finite number"
            )
