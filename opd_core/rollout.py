"""The records that travel through a run: a prompt, a rollout, a group.

Alignment: position t of ``response_ids``, ``rollout_logprobs`` and ``teacher_logprobs``
describes the same response token. The records are frozen; each stage returns a new one with its
field filled in.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from opd_core.config import TruncatedPolicy


class Status(StrEnum):
    """What has become of a rollout or a group."""

    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    FAILED = "failed"
    FILTERED = "filtered"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data, rendered and tokenised.

    ``row`` is the row's number in its file (0-based): the public files repeat or lack other ids.
    """

    row: int
    data_source: str
    token_ids: tuple[int, ...]
    text: str = ""
    ground_truth: str | None = None
    extra: dict[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class RolloutState:
    """One sampled completion of a prompt and all that is known of it.

    ``finish_reason`` is ``stop`` (the end token, which belongs to the response) or ``length``;
    empty where an interrupted rollout expired. ``response_mask`` is True on tokens that the
    student sampled and False on those of a tool, whose rollout_logprobs are 0; empty where the
    student sampled all. ``policy_versions`` are the train steps that the weights had seen which
    sampled each token (of a tool's token: the turn's before it).
    ``cause`` is a short word for counting, ``error_msg`` the sentence for people.
    """

    group_id: int
    index: int
    prompt: Prompt
    status: Status = Status.INIT
    response_ids: tuple[int, ...] = ()
    rollout_logprobs: tuple[float, ...] = ()
    text: str = ""
    finish_reason: str = ""
    response_mask: tuple[bool, ...] = ()
    policy_versions: tuple[int, ...] = ()
    teacher_logprobs: tuple[float, ...] | None = None
    teacher_latency_s: float = 0.0
    teacher_queue_s: float = 0.0
    teacher_attempts: int = 0
    teacher_cached_tokens: int | None = None
    reward: float | None = None
    cause: str = ""
    error_msg: str = ""

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among its tokens; 0 without tokens."""
        return min(self.policy_versions, default=0)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the student sampled."""
        return sum(self.response_mask) if self.response_mask else len(self.response_ids)

    @property
    def truncated(self) -> bool:
        """Whether the answer was cut, at the limit of its length or of its turns."""
        return self.finish_reason == "length"

    def trains(self, policy: TruncatedPolicy) -> bool:
        """Whether its tokens train, given what is to become of truncated answers."""
        return policy == "train" or not self.truncated

    def failed(self, cause: str, error_msg: str) -> RolloutState:
        """This rollout as FAILED: final, with its reason."""
        return replace(self, status=Status.FAILED, cause=cause, error_msg=error_msg)


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt; lives and dies as one."""

    group_id: int
    prompt: Prompt
    rollouts: tuple[RolloutState, ...]
    status: Status
    cause: str = ""

    @property
    def error_msg(self) -> str:
        """The reason of the first member that has the group's status, if any."""
        own = (r.error_msg for r in self.rollouts if r.status is self.status)
        return next((said for said in own if said), "")

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among the tokens of its rollouts."""
        return min(rollout.oldest_version for rollout in self.rollouts)
