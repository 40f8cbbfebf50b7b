"""The order in which prompts are asked."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from opd_core.errors import TrainingError
from opd_core.rollout import Prompt
from opd_core.rollout_json import from_plain, refused_as, to_plain


@dataclass(frozen=True, slots=True)
class QueueState:
    """How far a queue of ``prompts`` prompts is: ``taken`` of the order of ``epoch``; -1 is over
    before the first is asked. Prompts are named by their rows, which are strings as keys."""

    prompts: int
    epoch: int
    taken: int
    returned: tuple[int, ...]
    requeued: dict[str, int]
    asked: dict[str, int]


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

    def of_row(self, row: int) -> Prompt:
        """The prompt of a data row. Raises ValueError for a row that the data does not give."""
        found = next((prompt for prompt in self._prompts if prompt.row == row), None)
        if found is None:
            raise ValueError(f"the data gives no prompt of row {row}")
        return found

    def give_back(self, prompt: Prompt) -> bool:
        """Return the prompt of a lost group; False if it has been tried often enough."""
        if self._requeued[prompt.row] >= self._max_requeue:
            return False
        self._requeued[prompt.row] += 1
        self._returned.append(prompt)
        return True

    def state(self) -> dict[str, Any]:
        """All that :meth:`restore` needs, as plain JSON data; the order itself follows from the
        seed."""
        state = QueueState(
            prompts=len(self._prompts),
            epoch=self._epoch,
            taken=len(self._prompts) - len(self._order),
            returned=tuple(prompt.row for prompt in self._returned),
            requeued={str(row): count for row, count in self._requeued.items()},
            asked={str(row): count for row, count in self._asked.items()},
        )
        plain: dict[str, Any] = to_plain(state)
        return plain

    def restore(self, state: object) -> None:
        """Go on where ``state`` was taken. Raises :class:`TrainingError` for one of other data, or
        that is none; the queue is then as it was."""
        with refused_as("state of the prompt queue"):
            saved: QueueState = from_plain(QueueState, state)
            requeued = {int(row): count for row, count in saved.requeued.items()}
            asked = {int(row): count for row, count in saved.asked.items()}
            self._check(saved, {*saved.returned, *requeued, *asked})
        by_row = {prompt.row: prompt for prompt in self._prompts}
        self._epoch = saved.epoch
        self._order = self._order_of(saved.epoch)[: len(self._prompts) - saved.taken]
        self._returned = [by_row[row] for row in saved.returned]
        self._requeued, self._asked = Counter(requeued), Counter(asked)

    def _check(self, saved: QueueState, rows: set[int]) -> None:
        count, unknown = len(self._prompts), rows - {prompt.row for prompt in self._prompts}
        if saved.prompts != count or unknown:
            found = f"it is of {saved.prompts} prompts, and the data gives {count}"
            if unknown:
                found += f"; it names rows that the data does not give: {sorted(unknown)[:5]}"
            raise TrainingError(
                f"{found}; go on with the data file, data.max_prompt_tokens and tokenizer that the "
                "run began with, or start a new run"
            )
        if saved.epoch < -1 or not 0 <= saved.taken <= count:
            raise ValueError(f"{saved.taken} prompts of epoch {saved.epoch} cannot have been taken")

    def _next(self) -> tuple[Prompt, int]:
        prompt = self._returned.pop(0) if self._returned else self._next_in_order()
        asked = self._asked[prompt.row]
        self._asked[prompt.row] += 1
        return prompt, asked

    def _next_in_order(self) -> Prompt:
        if not self._order:
            self._epoch += 1
            self._requeued.clear()
            self._order = self._order_of(self._epoch)
        return self._prompts[self._order.pop()]

    def _order_of(self, epoch: int) -> list[int]:
        """An epoch's order, the first prompt last."""
        order = list(range(len(self._prompts)))
        random.Random(f"{self._seed}:{epoch}").shuffle(order)
        return order
