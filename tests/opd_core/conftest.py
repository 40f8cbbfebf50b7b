"""Builders of the records that travel through a run: a test names only the fields that matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from opd_core.rollout import Group, Prompt, RolloutState, Status


def _prompt(row: int = 0, **fields: Any) -> Prompt:
    defaults: dict[str, Any] = {"data_source": "sums", "token_ids": (3, 4, 5), "ground_truth": "7"}
    return Prompt(row, **(defaults | fields))


def _rollout(index: int = 0, prompt: Prompt | None = None, **fields: Any) -> RolloutState:
    defaults: dict[str, Any] = {
        "status": Status.COMPLETED,
        "response_ids": (6, 7),
        "rollout_logprobs": (-0.5, -1.5),
        "finish_reason": "stop",
    }
    group_id = fields.pop("group_id", 0)
    return RolloutState(group_id, index, prompt or _prompt(), **(defaults | fields))


def _group(*rollouts: RolloutState, status: Status = Status.COMPLETED, **fields: Any) -> Group:
    members = rollouts or (_rollout(),)
    return Group(members[0].group_id, members[0].prompt, members, status, **fields)


@pytest.fixture(scope="session")
def make_prompt() -> Callable[..., Prompt]:
    """``make_prompt(row, **fields)``."""
    return _prompt


@pytest.fixture(scope="session")
def make_rollout() -> Callable[..., RolloutState]:
    """``make_rollout(index, prompt, **fields)``: COMPLETED, two tokens, not scored, not judged."""
    return _rollout


@pytest.fixture(scope="session")
def make_group() -> Callable[..., Group]:
    """``make_group(*rollouts, status=…)``."""
    return _group
