"""One train step's worth of groups, and what became of the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from opd_core.agent_loop.loop import AgentLoop, GroupRequest, Key
from opd_core.agent_loop.parking import ParkingLot
from opd_core.agent_loop.prompts import PromptQueue
from opd_core.agent_loop.replay_buffer import ReplayBuffer
from opd_core.agent_loop.survivors import Survivors
from opd_core.errors import SurvivorError
from opd_core.rollout import Group, RolloutState, Status
from opd_core.rollout_json import from_plain, refused_as
from opd_core.scoring.client import POISON

logger = logging.getLogger(__name__)


class Teachers(Protocol):
    """What the collector wants of the teachers besides scores."""

    async def ready(self) -> None:
        """Return once all of them can be asked."""

    async def verified(self, groups: Sequence[Group], train_step: int) -> list[Group]:
        """The groups, with those FAILED whose scores are not to be believed."""


@dataclass(frozen=True, slots=True)
class CollectorState:
    """The states of a collector's parts."""

    queue: dict[str, Any]
    next_group_id: int
    survivors: dict[str, Any]
    buffer: tuple[Any, ...]


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
        self._lot: ParkingLot | None = None
        self._parked: dict[Key, RolloutState] = {}

    @property
    def epoch(self) -> int:
        """Number of the current pass over the data, from 0."""
        return self._queue.epoch

    def state(self) -> dict[str, Any]:
        """All that :meth:`restore` needs, as plain JSON data; taken between two steps."""
        return {
            "queue": self._queue.state(),
            "next_group_id": self._next_id,
            "survivors": self.survivors.state(),
            "buffer": self._buffer.state(),
        }

    def restore(self, state: object) -> None:
        """Go on where ``state`` was taken. Raises :class:`TrainingError` for one of other data, or
        that is none."""
        with refused_as("state of the collector"):
            saved: CollectorState = from_plain(CollectorState, state)
            survivors = Survivors.restore(saved.survivors)
            self._queue.restore(saved.queue)
            self._buffer.restore(saved.buffer)
        self.survivors, self._next_id = survivors, saved.next_group_id

    def restore_parked(self, lot: ParkingLot) -> None:
        """Let the next step use the rollouts that an end of the run left waiting for a teacher;
        those that do not belong to it are dropped. Raises what :meth:`ParkingLot.load` does."""
        self._lot = lot
        self._parked = {(r.group_id, r.index): r for r in lot.load()}

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
        self._drop_parked(train_step)
        return self._buffer.take(self._wanted), survivors

    async def _run(self, count: int, train_step: int) -> list[Group]:
        """New groups, brought to their ends. Nothing is sampled while a teacher is away, and
        nothing is taken from one that has changed."""
        if self._teachers is None:
            return await self._ended(count, train_step)
        await self._teachers.ready()
        return await self._teachers.verified(await self._ended(count, train_step), train_step)

    async def _ended(self, count: int, train_step: int) -> list[Group]:
        requests = self._requests(count)
        asked = {request.group_id for request in requests}
        already = {key: rollout for key, rollout in self._parked.items() if key[0] in asked}
        groups = await self._loop.run(requests, train_step, already)
        self._leave(already)
        return groups

    def _requests(self, count: int) -> list[GroupRequest]:
        first = self._next_id
        self._next_id += count
        taken = self._queue.take(count)
        return [GroupRequest(first + i, prompt, tries) for i, (prompt, tries) in enumerate(taken)]

    def _drop_parked(self, train_step: int) -> None:
        """Parked rollouts of groups that the step did not ask for will never be."""
        for group_id, index in self._parked:
            logger.warning(
                "parked rollout %d of group %d belongs to no group of train step %d: it is dropped",
                *(index, group_id, train_step),
            )
        self._leave(dict(self._parked))

    def _leave(self, rollouts: Mapping[Key, RolloutState]) -> None:
        """They wait no longer, whether they were scored, filtered, or did not fit."""
        for key, rollout in rollouts.items():
            del self._parked[key]
            if self._lot is not None:
                self._lot.remove(rollout)


def _holds_poison(group: Group) -> bool:
    """Whether asking its prompt again may end another server."""
    return any(rollout.cause == POISON for rollout in group.rollouts)
