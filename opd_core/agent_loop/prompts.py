"""The order in which prompts are asked."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from opd_core.rollout import Prompt


class PromptQueue:
    """Endless epochs over the prompts, each in its own seeded order.

    Prompts of lost groups come back first, at most ``max_requeue`` times each in an epoch.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, max_requeue: int) -> None:
        if not prompts:
            raise ValueError("PromptQueue needs at least one prompt")
        self._prompts = prompts
        self._seed = seed
        self._max_requeue = max_requeue
        self._epoch = -1
        self._order: list[int] = []
        self._returned: list[Prompt] = []
        self._requeued: Counter[int] = Counter()  # of this epoch
        self._asked: Counter[int] = Counter()

    @property
    def epoch(self) -> int:
        """Number of the current pass over the data, from 0."""
        return max(self._epoch, 0)

    def take(self, count: int) -> list[tuple[Prompt, int]]:
        """The next ``count`` prompts, each with how often it was asked before."""
        return [self._next() for _ in range(count)]

    def give_back(self, prompt: Prompt) -> bool:
        """Return the prompt of a lost group; False if it has been tried often enough."""
        if self._requeued[prompt.row] >= self._max_requeue:
            return False
        self._requeued[prompt.row] += 1
        self._returned.append(prompt)
        return True

    def _next(self) -> tuple[Prompt, int]:
        prompt = self._returned.pop(0) if self._returned else self._next_in_order()
        asked = self._asked[prompt.row]
        self._asked[prompt.row] += 1
        return prompt, asked

    def _next_in_order(self) -> Prompt:
        if not self._order:
            self._epoch += 1
            self._requeued.clear()
            self._order = list(range(len(self._prompts)))
            random.Random(f"{self._seed}:{self._epoch}").shuffle(self._order)
        return self._prompts[self._order.pop()]
