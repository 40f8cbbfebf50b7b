"""One train step's worth of groups, and what became of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from opd_core.agent_loop.loop import AgentLoop, GroupRequest
from opd_core.agent_loop.prompts import PromptQueue
from opd_core.agent_loop.replay_buffer import ReplayBuffer
from opd_core.errors import SurvivorError
from opd_core.rollout import Group, Status


@dataclass(slots=True)
class Survivors:
    """Counts of what became of groups and, for lost ones, of the reasons."""

    by_status: Counter[str] = field(default_factory=Counter)
    by_cause: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def count(self, group: Group) -> None:
        """Count one ended group; the first message of each cause is kept as its example."""
        self.by_status[group.status.value] += 1
        if group.status is not Status.COMPLETED:
            cause = group.cause or group.status.value
            self.by_cause[cause] += 1
            if group.error_msg:
                self.examples.setdefault(cause, group.error_msg)

    @property
    def started(self) -> int:
        """Groups that were started."""
        return self.by_status.total()

    def add(self, other: Survivors) -> None:
        """Take another table's counts in."""
        self.by_status.update(other.by_status)
        self.by_cause.update(other.by_cause)
        for cause, example in other.examples.items():
            self.examples.setdefault(cause, example)

    def table(self) -> str:
        """For people: counts by status, then each cause with an example."""
        lines = [f"{status}: {count}" for status, count in sorted(self.by_status.items())]
        lines += [
            f"  {cause}: {count}"
            + (f" (e.g. {self.examples[cause]})" if cause in self.examples else "")
            for cause, count in self.by_cause.most_common()
        ]
        return "\n".join(lines)

    def as_counts(self) -> Mapping[str, int]:
        """Metric names and values: ``groups/<status>`` and ``lost/<cause>``."""
        counts = {f"groups/{s.value}": self.by_status[s.value] for s in Status if s != Status.INIT}
        return counts | {f"lost/{cause}": count for cause, count in self.by_cause.items()}


class Collector:
    """Runs groups until a train step has its full number of them."""

    def __init__(
        self,
        queue: PromptQueue,
        loop: AgentLoop,
        buffer: ReplayBuffer,
        *,
        groups_per_step: int,
        limit: int,
        on_group: Callable[[Group], None] = lambda group: None,
    ) -> None:
        self._queue = queue
        self._loop = loop
        self._buffer = buffer
        self._wanted = groups_per_step
        self._limit = limit
        self._on_group = on_group
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
            for group in await self._loop.run(self._requests(missing), train_step):
                survivors.count(group)
                self._on_group(group)
                if group.status is Status.COMPLETED:
                    self._buffer.put(group)
                elif group.status is not Status.FILTERED:
                    self._queue.give_back(group.prompt)
        return self._buffer.take(self._wanted), survivors

    def _requests(self, count: int) -> list[GroupRequest]:
        first = self._next_id
        self._next_id += count
        taken = self._queue.take(count)
        return [GroupRequest(first + i, prompt, tries) for i, (prompt, tries) in enumerate(taken)]
