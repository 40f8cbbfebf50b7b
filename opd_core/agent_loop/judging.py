"""Runs judges: what a judge gives is a finite number, or a reason, and never a guessed 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from opd_core.agent_loop.functions import FunctionError, FunctionRunner
from opd_core.rollout import Prompt, RolloutState


class JudgeError(FunctionError):
    """A judge raised, crashed, hung or gave something that is no number."""


class JudgeRunner(FunctionRunner):
    """Runs the judge named by ``path`` in a process of its own. Use as a context manager."""

    kind, error = "judge", JudgeError

    async def judge(self, text: str, prompt: Prompt) -> float:
        """The reward of one response. Raises :class:`JudgeError`."""
        return self._number(await self._run(text, prompt))

    async def judge_batch(self, rollouts: Sequence[RolloutState]) -> list[float]:
        """The rewards of a group that is judged together. Raises :class:`JudgeError`."""
        rewards = await self._run(tuple(rollouts))
        if not isinstance(rewards, Sequence) or len(rewards) != len(rollouts):
            raise self._failed(f"expected {len(rollouts)} rewards, got {rewards!r:.200}")
        return [self._number(reward) for reward in rewards]

    def _number(self, value: Any) -> float:
        if isinstance(value, bool | int | float) and math.isfinite(value):
            return float(value)
        raise self._failed(f"expected a finite number as reward, got {value!r:.80}")
