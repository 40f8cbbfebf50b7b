"""Which teacher scores which ``data_source``, and whether its scores are to be believed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import replace
from typing import Protocol, Self

from opd_core.config import OPDConfig
from opd_core.errors import ScoringError, TeacherAway
from opd_core.rollout import Group, RolloutState, Status
from opd_core.scoring.budget import FailureBudget
from opd_core.scoring.client import TeacherLogprobClient
from opd_core.scoring.facts import TeacherFacts
from opd_core.scoring.state import ReplicaState, ScoringState
from opd_core.scoring.store import ScoreStore

TELL_EVERY_S = 2.0
CHANGED = "teacher_changed"
"""Cause of a rollout whose teacher was found to score differently than before."""


class Spot(Protocol):
    """A rollout's place on disk while its teacher is away."""

    def park(self) -> None: ...


class Parking(Protocol):
    """Where rollouts wait."""

    def spot(self, rollout: RolloutState) -> AbstractContextManager[Spot]: ...


class _NoParking:
    """Rollouts wait in memory only."""

    def spot(self, rollout: RolloutState) -> AbstractContextManager[Spot]:
        return nullcontext(self)

    def park(self) -> None:
        pass


class TeacherRouter:
    """Fills ``teacher_logprobs`` of rollouts. Use as an async context manager.

    ``publish`` is told how scoring goes: whenever a replica goes or comes back, and every few
    seconds.
    """

    def __init__(
        self,
        opd: OPDConfig,
        clients: Mapping[str, TeacherLogprobClient],
        *,
        parking: Parking | None = None,
        stores: Mapping[str, ScoreStore] | None = None,
        publish: Callable[[dict[str, ScoringState]], None] = lambda states: None,
    ) -> None:
        self._opd = opd
        self._clients = clients
        self._parking = parking or _NoParking()
        self._stores = stores or {}
        self._publish = publish
        budget = opd.failure_budget
        self._budgets = {name: FailureBudget(budget.ratio, budget.window) for name in clients}
        self._exit = AsyncExitStack()

    @classmethod
    def connect(
        cls,
        opd: OPDConfig,
        facts: Mapping[str, TeacherFacts],
        keys: Mapping[str, str],
        *,
        current_facts: Callable[[str], TeacherFacts] | None = None,
        parking: Parking | None = None,
        stores: Mapping[str, ScoreStore] | None = None,
        publish: Callable[[dict[str, ScoringState]], None] = lambda states: None,
    ) -> TeacherRouter:
        """Clients for all teachers of a run; ``facts`` and ``keys`` by teacher name.

        ``current_facts`` gives a teacher's facts as they are now: it may have moved.
        """
        router: TeacherRouter

        def client(name: str) -> TeacherLogprobClient:
            return TeacherLogprobClient(
                next(teacher for teacher in opd.teachers if teacher.name == name),
                facts[name],
                api_key=keys.get(name),
                current_facts=(lambda: current_facts(name)) if current_facts else None,
                on_change=lambda: router.tell(),
            )

        clients = {teacher.name: client(teacher.name) for teacher in opd.teachers}
        router = cls(opd, clients, parking=parking, stores=stores, publish=publish)
        return router

    async def __aenter__(self) -> Self:
        for client in self._clients.values():
            await self._exit.enter_async_context(client)
        telling = asyncio.create_task(self._tell_forever())
        self._exit.callback(telling.cancel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit.aclose()

    async def ready(self) -> None:
        """Return once every teacher can be asked; raises :class:`TeacherAway` for one that stays
        away. Sampling for a teacher that is away would only fill the disk."""
        for client in self._clients.values():
            await client.replicas.wait_for_one(client.away_limit_s)

    async def score(self, rollout: RolloutState) -> RolloutState:
        """The rollout with its scores, or FAILED with the reason. Scores are asked for only once.

        Raises :class:`TeacherAway` when the teacher does not come back: that ends the run, and the
        rollout's tokens are not to blame.
        """
        if rollout.teacher_logprobs is not None:
            return rollout
        name = self._opd.teacher_of(rollout.prompt.data_source)
        if name is None:
            said = f"no teacher is mapped to data_source {rollout.prompt.data_source!r}"
            return rollout.failed("no_teacher", said)
        store = self._stores.get(name)
        ids = rollout.prompt.token_ids + rollout.response_ids
        start = len(rollout.prompt.token_ids) - 1
        if store is not None and (known := store.get(ids, start)) is not None:
            return replace(rollout, teacher_logprobs=known)
        scored = await self._ask(name, rollout)
        if store is not None and scored.teacher_logprobs:
            store.put(ids, start, scored.teacher_logprobs)
        return scored

    async def verified(self, groups: Sequence[Group], train_step: int) -> list[Group]:
        """The groups, with those FAILED whose teacher has changed since they were scored.

        A teacher's known sequences are scored again every ``canary_every`` train steps; in other
        steps its scores are believed.
        """
        doubts = {}
        for name, client in self._clients.items():
            every = client.teacher.canary_every
            if every and train_step % every == 0:
                verdict = await client.check_canaries()
                doubts[name] = verdict.doubt
                if (store := self._stores.get(name)) is not None:
                    if verdict.doubt:
                        store.discard()
                    elif verdict.proven:
                        store.flush()
        return [self._believed(group, doubts) for group in groups]

    def tell(self) -> None:
        """Publish the state now."""
        self._publish(
            {
                name: ScoringState(
                    time.time(),
                    tuple(
                        ReplicaState(r.away, r.changed, r.in_flight, r.progress_at)
                        for r in client.replicas.all
                    ),
                )
                for name, client in self._clients.items()
            }
        )

    async def _tell_forever(self) -> None:
        while True:
            self.tell()
            await asyncio.sleep(TELL_EVERY_S)

    async def _ask(self, name: str, rollout: RolloutState) -> RolloutState:
        with self._parking.spot(rollout) as spot:
            try:
                score = await self._clients[name].score(
                    rollout.prompt.token_ids,
                    rollout.response_ids,
                    group_id=rollout.group_id,
                    on_away=spot.park,
                )
            except TeacherAway:
                raise
            except ScoringError as error:
                self._count_failure(name, error)
                return rollout.failed(error.cause, str(error))
        self._budgets[name].spend(failed=False)
        return replace(
            rollout,
            teacher_logprobs=score.teacher_logprobs,
            teacher_latency_s=score.latency_s,
            teacher_queue_s=score.queue_s,
            teacher_attempts=score.attempts,
            teacher_cached_tokens=score.cached_tokens,
        )

    def _count_failure(self, name: str, error: ScoringError) -> None:
        if self._budgets[name].spend(failed=True):
            budget = self._opd.failure_budget
            self._clients[name].suspend(
                f"more than {budget.ratio:.0%} of the last {budget.window} rollouts failed "
                f"(opd.failure_budget); last: {error}"
            )

    def _believed(self, group: Group, doubts: Mapping[str, str]) -> Group:
        name = self._opd.teacher_of(group.prompt.data_source)
        doubt = doubts.get(name or "", "")
        if not doubt or group.status is not Status.COMPLETED:
            return group
        rollouts = tuple(rollout.failed(CHANGED, doubt) for rollout in group.rollouts)
        return replace(group, rollouts=rollouts, status=Status.FAILED, cause=CHANGED)
