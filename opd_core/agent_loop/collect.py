"""One train step's worth of groups, and what became of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from opd_core.agent_loop.loop import AgentLoop, GroupRequest
from opd_core.agent_loop.prompts import PromptQueue
from opd_core.agent_loop.replay_buffer import ReplayBuffer
from opd_core.agent_loop.survivors import Survivors
from opd_core.errors import SurvivorError
from opd_core.rollout import Group, Status
from opd_core.scoring.client import POISON


class Teachers(Protocol):
    """What the collector wants of the teachers besides scores."""

    async def ready(self) -> None:
        """Return once all of them can be asked."""

    async def verified(self, groups: Sequence[Group], train_step: int) -> list[Group]:
        """The groups, with those FAILED whose scores are not to be believed."""


class Collector:
    """Runs groups until a train step has its full number of them. ``teachers`` is None when OPD is
    off."""

    def __init__(
        self,
        queue: PromptQueue,
        loop: AgentLoop,
        buffer: ReplayBuffer,
        *,
        groups_per_step: int,
        limit: int,
        teachers: Teachers | None = None,
        on_group: Callable[[Group], None] = lambda group: None,
    ) -> None:
        self._queue = queue
        self._loop = loop
        self._buffer = buffer
        self._wanted = groups_per_step
        self._limit = limit
        self._teachers = teachers
        self._on_group = on_group
        self.survivors = Survivors()
        """What became of all groups so far."""
        self._next_id = 0

    @property
    def epoch(self) -> int:
        """Number of the current pass over the data, from 0."""
        return self._queue.epoch

    async def collect(self, train_step: int) -> tuple[list[Group], Survivors]:
        """The step's groups. Raises :class:`SurvivorError` when the limit of started groups is
        reached: the step would otherwise loop through the data for ever."""
        survivors = Survivors()
        while (missing := self._wanted - len(self._buffer)) > 0:
            if survivors.started + missing > self._limit:
                raise SurvivorError(
                    f"train step {train_step}: {survivors.started} groups were started and "
                    f"{missing} are still missing (limit {self._limit}, "
                    f"task.max_groups_per_step):\n{survivors.table()}",
                    dict(survivors.as_counts()),
                )
            for group in await self._run(missing, train_step):
                survivors.count(group)
                self.survivors.count(group)
                self._on_group(group)
                if group.status is Status.COMPLETED:
                    self._buffer.put(group)
                elif group.status is not Status.FILTERED and not _holds_poison(group):
                    self._queue.give_back(group.prompt)
        return self._buffer.take(self._wanted), survivors

    async def _run(self, count: int, train_step: int) -> list[Group]:
        """New groups, brought to their ends. Nothing is sampled while a teacher is away, and
        nothing is taken from one that has changed."""
        if self._teachers is None:
            return await self._loop.run(self._requests(count), train_step)
        await self._teachers.ready()
        groups = await self._loop.run(self._requests(count), train_step)
        return await self._teachers.verified(groups, train_step)

    def _requests(self, count: int) -> list[GroupRequest]:
        first = self._next_id
        self._next_id += count
        taken = self._queue.take(count)
        return [GroupRequest(first + i, prompt, tries) for i, (prompt, tries) in enumerate(taken)]


def _holds_poison(group: Group) -> bool:
    """Whether asking its prompt again may end another server."""
    return any(rollout.cause == POISON for rollout in group.rollouts)
