"""One train step's worth of groups, and what became of the others.

Groups are under way side by side, those of later steps too where rollouts may be stale: they go on
while a batch trains. How many there may be is bounded, so the sampler never runs away from the
trainer: the groups of a step and of ``max_staleness`` more, or ``over_sampling`` times those of a
step if that is more. A step takes those that are done first.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from opd_core.agent_loop.loop import AgentLoop, GroupRequest, Key
from opd_core.agent_loop.parking import ParkingLot
from opd_core.agent_loop.prompts import PromptQueue
from opd_core.agent_loop.replay_buffer import ReplayBuffer
from opd_core.agent_loop.survivors import Survivors
from opd_core.errors import SurvivorError
from opd_core.rollout import Group, RolloutState, Status
from opd_core.rollout_json import from_plain, group_from_plain, refused_as, to_plain
from opd_core.scoring.client import POISON

TOO_OLD = "it waited for so long that its weights are too old (sampling.max_staleness)"
NOT_NEEDED = "the step had enough groups without it (sampling.over_sampling)"

logger = logging.getLogger(__name__)


class Teachers(Protocol):
    """What the collector wants of the teachers besides scores."""

    async def ready(self) -> None:
        """Return once all of them can be asked."""

    async def verified(self, groups: Sequence[Group], train_step: int) -> list[Group]:
        """The groups, with those FAILED whose scores are not to be believed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A group that was under way; its prompt by its data row."""

    group_id: int
    row: int
    tries: int


@dataclass(frozen=True, slots=True)
class CollectorState:
    """The states of a collector's parts."""

    queue: dict[str, Any]
    next_group_id: int
    survivors: dict[str, Any]
    buffer: tuple[Any, ...]
    under_way: tuple[Asked, ...]


class Collector:
    """Runs groups until a train step has its full number of them. ``teachers`` is None when OPD is
    off; ``max_staleness`` is in train steps, ``over_sampling`` the groups that are started over
    those that a step needs."""

    def __init__(
        self,
        queue: PromptQueue,
        loop: AgentLoop,
        buffer: ReplayBuffer,
        *,
        groups_per_step: int,
        limit: int,
        max_staleness: int = 0,
        over_sampling: float = 1.0,
        teachers: Teachers | None = None,
        on_group: Callable[[Group], None] = lambda group: None,
    ) -> None:
        self._queue = queue
        self._loop = loop
        self._buffer = buffer
        self._wanted = groups_per_step
        self._limit = limit
        self._max_staleness = max_staleness
        self._over_sampling = over_sampling
        self._teachers = teachers
        self._on_group = on_group
        self.survivors = Survivors()
        """What became of all groups so far."""
        self._next_id = 0
        self._under_way: dict[asyncio.Task[list[Group]], list[GroupRequest]] = {}
        self._ended: list[Group] = []
        """COMPLETED groups whose teachers have not been proven since; none between two steps."""
        self._again: list[GroupRequest] = []
        """Groups that were under way when the state was taken that this collector began from."""
        self._lot: ParkingLot | None = None
        self._parked: dict[Key, RolloutState] = {}

    @property
    def epoch(self) -> int:
        """Number of the current pass over the data, from 0."""
        return self._queue.epoch

    @property
    def ahead(self) -> int:
        """Groups that are under way or wait for a later train step."""
        return sum(map(len, self._under_way.values())) + len(self._ended) + len(self._buffer)

    async def aclose(self) -> None:
        """End what is under way; a state that is taken afterwards still names it."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        self._again = self._unfinished()
        self._under_way.clear()

    def state(self) -> dict[str, Any]:
        """All that :meth:`restore` needs, as plain JSON data; taken between two steps. Groups under
        way are named only: they are sampled anew."""
        asked = [Asked(r.group_id, r.prompt.row, r.tries) for r in self._unfinished()]
        return {
            "queue": self._queue.state(),
            "next_group_id": self._next_id,
            "survivors": self.survivors.state(),
            "buffer": self._buffer.state(),
            "under_way": to_plain(sorted(asked, key=lambda a: a.group_id)),
        }

    def restore(self, state: object) -> None:
        """Go on where ``state`` was taken; nothing may be under way. Raises
        :class:`TrainingError` for one of other data, or that is none."""
        with refused_as("state of the collector"):
            saved: CollectorState = from_plain(CollectorState, state)
            survivors = Survivors.restore(saved.survivors)
            again = [
                GroupRequest(asked.group_id, self._queue.of_row(asked.row), asked.tries)
                for asked in saved.under_way
            ]
            self._queue.restore(saved.queue)
            self._buffer.restore(saved.buffer)
        self.survivors, self._next_id, self._again = survivors, saved.next_group_id, again

    def restore_parked(self, lot: ParkingLot) -> None:
        """Let the next step use the rollouts that an end of the run left waiting for a teacher;
        those that do not belong to it are dropped. Raises what :meth:`ParkingLot.load` does."""
        self._lot = lot
        self._parked = {(r.group_id, r.index): r for r in lot.load()}

    async def collect(self, train_step: int, further: int = 0) -> tuple[list[Group], Survivors]:
        """The step's groups, and what became of them and of those that were lost meanwhile.
        ``further`` train steps will come. Raises :class:`SurvivorError` when the limit of started
        groups is reached: the step would otherwise loop through the data for ever."""
        survivors = Survivors()
        steps = max(self._over_sampling, 1 + min(self._max_staleness, further))
        room = math.ceil(round(steps * self._wanted, 6))
        oldest = train_step - 1 - self._max_staleness
        for group in self._buffer.take_older(oldest):
            self._expire(group, survivors)
        while True:
            self._gather_ended(oldest, survivors)
            self._start(train_step, room, survivors)
            missing = self._wanted - len(self._buffer)
            if self._ended and (len(self._ended) >= missing or not self._under_way):
                await self._believe_ended(train_step, survivors)
                if len(self._buffer) >= self._wanted:  # what has ended meanwhile can wait
                    self._start(train_step, room, survivors)
                    break
            elif missing <= 0:
                break
            else:
                await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
        taken = self._buffer.take(self._wanted)
        for group in taken:
            self._tell(group, survivors)
        if self._max_staleness == 0:
            await self._abort_under_way(survivors)
        self._drop_parked(train_step)
        return taken, survivors

    def _unfinished(self) -> list[GroupRequest]:
        """What is under way, and what is to be asked again."""
        return [*(r for requests in self._under_way.values() for r in requests), *self._again]

    def _gather_ended(self, oldest: int, survivors: Survivors) -> None:
        """Take in what has ended; weights before policy version ``oldest`` are too old for this
        step, and so for every later one. An error that ended one ends them all."""
        for task in [task for task in self._under_way if task.done()]:
            requests, groups = self._under_way.pop(task), task.result()
            self._leave([key for r in requests for key in self._parked if key[0] == r.group_id])
            for group in groups:
                if group.status is not Status.COMPLETED:
                    self._lose(group, survivors)
                elif group.oldest_version < oldest:
                    self._expire(group, survivors)
                else:
                    self._ended.append(group)

    def _expire(self, group: Group, survivors: Survivors) -> None:
        self._lose(_lost(group, Status.EXPIRED, "stale", TOO_OLD), survivors)

    async def _abort_under_way(self, survivors: Survivors) -> None:
        """On-policy, what a step has left over can train in no other: it is not sampled on, and
        costs no request."""
        await self.aclose()
        aborted, self._again = self._again, []
        for request in aborted:
            rollout = RolloutState(request.group_id, 0, request.prompt)
            group = Group(request.group_id, request.prompt, (rollout,), Status.INIT)
            self._lose(_lost(group, Status.ABORTED, "over_sampled", NOT_NEEDED), survivors)

    async def _believe_ended(self, train_step: int, survivors: Survivors) -> None:
        """Put into the buffer what teachers scored that still score as they did."""
        ended, self._ended = self._ended, []
        if self._teachers is not None:
            ended = await self._teachers.verified(ended, train_step)
        for group in ended:
            if group.status is Status.COMPLETED:
                self._buffer.put(group)
            else:
                self._lose(group, survivors)

    def _tell(self, group: Group, survivors: Survivors) -> None:
        survivors.count(group)
        self.survivors.count(group)
        self._on_group(group)

    def _lose(self, group: Group, survivors: Survivors) -> None:
        self._tell(group, survivors)
        if group.status is not Status.FILTERED and not _holds_poison(group):
            self._queue.give_back(group.prompt)

    def _start(self, train_step: int, room: int, survivors: Survivors) -> None:
        """Start as many groups as there is room for."""
        if self._loop.in_order and self._under_way:
            return  # what is sampled beside what must not depend on time
        limit = self._limit + room - self._wanted  # those of later steps do not count
        count = min(room, limit - survivors.started) - self.ahead
        if count <= 0:
            if not self._under_way and self.ahead < self._wanted:
                raise self._too_many(train_step, limit, survivors)
            return
        requests = self._requests(count)
        together = [requests] if self._loop.in_order else [[request] for request in requests]
        for some in together:
            ids = {request.group_id for request in some}
            already = {key: rollout for key, rollout in self._parked.items() if key[0] in ids}
            task = asyncio.create_task(self._run(some, train_step, already))
            self._under_way[task] = some

    async def _run(
        self, requests: Sequence[GroupRequest], train_step: int, already: Mapping[Key, RolloutState]
    ) -> list[Group]:
        """Nothing is sampled while a teacher is away."""
        if self._teachers is not None:
            await self._teachers.ready()
        return await self._loop.run(requests, train_step, already)

    def _too_many(self, train_step: int, limit: int, survivors: Survivors) -> SurvivorError:
        missing = self._wanted - len(self._buffer) - len(self._ended)
        for group in (*self._buffer.groups, *self._ended):
            survivors.count(group)
        return SurvivorError(
            f"train step {train_step}: {survivors.started} groups were started and "
            f"{missing} are still missing (limit {limit}, "
            f"task.max_groups_per_step):\n{survivors.table()}",
            dict(survivors.as_counts()),
        )

    def _requests(self, count: int) -> list[GroupRequest]:
        again, self._again = self._again[:count], self._again[count:]
        first = self._next_id
        self._next_id += count - len(again)
        taken = self._queue.take(count - len(again))
        new = [GroupRequest(first + i, prompt, tries) for i, (prompt, tries) in enumerate(taken)]
        return [*again, *new]

    def _drop_parked(self, train_step: int) -> None:
        """Parked rollouts of groups that nobody has asked for will never be."""
        asked = {request.group_id for request in self._unfinished()}
        for key in [key for key in self._parked if key[0] not in asked]:
            logger.warning(
                "parked rollout %d of group %d belongs to no group of train step %d: it is dropped",
                *(key[1], key[0], train_step),
            )
            self._leave([key])

    def _leave(self, keys: Sequence[Key]) -> None:
        """They wait no longer, whether they were scored, filtered, or did not fit."""
        for key in keys:
            rollout = self._parked.pop(key)
            if self._lot is not None:
                self._lot.remove(rollout)


def asked_again(state: Mapping[str, Any]) -> dict[str, Any]:
    """A collector's state in which the groups of the buffer are under way: for a run of other
    settings, where what was sampled and scored counts for nothing."""
    saved: CollectorState = from_plain(CollectorState, state)
    groups = [group_from_plain(plain) for plain in saved.buffer]
    asked = [Asked(group.group_id, group.prompt.row, 0) for group in groups]
    plain: dict[str, Any] = to_plain(
        replace(saved, buffer=(), under_way=(*saved.under_way, *asked))
    )
    return plain


def _lost(group: Group, status: Status, cause: str, said: str) -> Group:
    rollouts = tuple(
        replace(rollout, status=status, cause=cause, error_msg=said) for rollout in group.rollouts
    )
    return replace(group, rollouts=rollouts, status=status, cause=cause)


def _holds_poison(group: Group) -> bool:
    """Whether asking its prompt again may end another server."""
    return any(rollout.cause == POISON for rollout in group.rollouts)
