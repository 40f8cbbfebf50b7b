"""Which teacher scores which ``data_source``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Self

from opd_core.config import OPDConfig
from opd_core.errors import ScoringError, TeacherAway
from opd_core.rollout import RolloutState
from opd_core.scoring.client import TeacherFacts, TeacherLogprobClient


class TeacherRouter:
    """Fills ``teacher_logprobs`` of rollouts. Use as an async context manager."""

    def __init__(self, opd: OPDConfig, clients: Mapping[str, TeacherLogprobClient]) -> None:
        self._opd = opd
        self._clients = clients
        self._exit = AsyncExitStack()

    @classmethod
    def connect(
        cls, opd: OPDConfig, facts: Mapping[str, TeacherFacts], keys: Mapping[str, str]
    ) -> TeacherRouter:
        """Clients for all teachers of a run; ``facts`` and ``keys`` by teacher name."""
        clients = {
            teacher.name: TeacherLogprobClient(
                teacher, facts[teacher.name], api_key=keys.get(teacher.name)
            )
            for teacher in opd.teachers
        }
        return cls(opd, clients)

    async def __aenter__(self) -> Self:
        for client in self._clients.values():
            await self._exit.enter_async_context(client)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit.aclose()

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
        try:
            score = await self._clients[name].score(
                rollout.prompt.token_ids, rollout.response_ids, group_id=rollout.group_id
            )
        except TeacherAway:
            raise
        except ScoringError as error:
            return rollout.failed(error.cause, str(error))
        return replace(
            rollout,
            teacher_logprobs=score.teacher_logprobs,
            teacher_latency_s=score.latency_s,
            teacher_queue_s=score.queue_s,
            teacher_attempts=score.attempts,
        )
