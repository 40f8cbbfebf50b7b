"""One group from its prompt to its final status: the same component for every kind of sampling.

Without a filter each rollout is scored as soon as it is sampled, beside its siblings' sampling and
beside its own judge; a batch judge comes last. With a filter only groups that pass are scored.
In order, everything is sampled first, and then one rollout after the other is dealt with.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from opd_core.agent_loop.judging import JudgeError, JudgeRunner
from opd_core.agent_loop.turns import SampledPart, Turns
from opd_core.config import TruncatedPolicy
from opd_core.rollout import Group, Prompt, RolloutState, Status
from opd_core.sampling.protocol import Sampler, rollout_seed

Key = tuple[int, int]
"""Group id and index of a rollout."""

INTERRUPTED = "it was interrupted when its group's first tokens were of weights too old to go on"

logger = logging.getLogger(__name__)


class Scorer(Protocol):
    """Fills in ``teacher_logprobs``, or returns the rollout FAILED with its reason."""

    async def score(self, rollout: RolloutState) -> RolloutState: ...


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A prompt that is to become a group; ``tries`` counts how often it was asked before, so
    that no two groups of a prompt draw the same random numbers."""

    group_id: int
    prompt: Prompt
    tries: int = 0


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What the loop needs to know besides its organs. ``max_staleness`` is in train steps;
    ``truncated`` says what becomes of answers that were cut."""

    group_size: int
    max_new_tokens: int
    seed: int
    temperature: float = 1.0
    max_staleness: int = 0
    truncated: TruncatedPolicy = "train"


class AgentLoop:
    """Runs groups. ``scorer`` is None when OPD is off; ``judge`` and ``batch_judge`` exclude each
    other; ``decode`` turns response ids into the text that judges read; ``turns`` calls the tool,
    where there is one. ``in_order``: rollouts are scored and judged one at a time in the order of
    group id and index, whatever the order in which they are sampled."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        sampler: Sampler,
        decode: Callable[[Sequence[int]], str],
        scorer: Scorer | None = None,
        judge: JudgeRunner | None = None,
        batch_judge: JudgeRunner | None = None,
        filter_func: Callable[[tuple[RolloutState, ...]], bool] | None = None,
        turns: Turns | None = None,
        in_order: bool = False,
    ) -> None:
        self._settings = settings
        self._sampler = sampler
        self._decode = decode
        self._scorer = scorer
        self._judge = judge
        self._batch_judge = batch_judge
        self._filter = filter_func
        self._turns = turns
        self.in_order = in_order
        self.sampling = BusyClock()
        """How long anything was being sampled."""

    async def run(
        self,
        requests: Sequence[GroupRequest],
        train_step: int,
        already: Mapping[Key, RolloutState] = MappingProxyType({}),
    ) -> list[Group]:
        """Sample all groups and bring each to its end. An error that is nobody's fault in
        particular (teacher away, engine lost) ends the whole call.

        Rollouts in ``already`` that belong to this step are not sampled again; others are ignored,
        and a warning says so.
        """
        there = self._usable(already, requests, train_step)
        try:
            if self.in_order:
                return await self._one_by_one(requests, train_step, there)
            async with asyncio.TaskGroup() as tasks:
                groups = [tasks.create_task(self._group(r, train_step, there)) for r in requests]
        except* Exception as errors:
            raise _first(errors) from None
        return [group.result() for group in groups]

    async def _group(
        self, request: GroupRequest, train_step: int, there: Mapping[Key, RolloutState]
    ) -> Group:
        """One group; every rollout goes on as soon as it is sampled."""

        lost: list[RolloutState] = []

        async def rollout(index: int) -> RolloutState:
            sampled = await self._sampled(request, index, train_step, there, lost)
            if sampled.status is not Status.COMPLETED:
                lost.append(sampled)
            return sampled if lost else await self._after_sampling(sampled)

        async with asyncio.TaskGroup() as tasks:  # unlike gather, it leaves nothing behind
            siblings = [tasks.create_task(rollout(i)) for i in range(self._settings.group_size)]
        return await self._end_group(tuple(sibling.result() for sibling in siblings))

    async def _one_by_one(
        self,
        requests: Sequence[GroupRequest],
        train_step: int,
        there: Mapping[Key, RolloutState],
    ) -> list[Group]:
        """Nothing goes on before all is sampled, and then in order."""
        async with asyncio.TaskGroup() as tasks:
            sampled = [
                [
                    tasks.create_task(self._sampled(request, index, train_step, there, ()))
                    for index in range(self._settings.group_size)
                ]
                for request in requests
            ]
        groups = {}
        for siblings in sorted(sampled, key=lambda siblings: siblings[0].result().group_id):
            ended = [await self._after_sampling(sibling.result()) for sibling in siblings]
            group = await self._end_group(tuple(ended))
            groups[group.group_id] = group
        return [groups[request.group_id] for request in requests]

    def _usable(
        self,
        already: Mapping[Key, RolloutState],
        requests: Sequence[GroupRequest],
        train_step: int,
    ) -> dict[Key, RolloutState]:
        """Those of ``already`` that are of this step's groups, prompts and student."""
        asked = {r.group_id: r.prompt for r in requests}
        usable = {}
        for (group_id, index), rollout in already.items():
            behind = {train_step - 1 - version for version in rollout.policy_versions}
            if (
                (rollout.group_id, rollout.index) == (group_id, index)
                and index < self._settings.group_size
                and rollout.prompt == asked.get(group_id)
                and all(0 <= steps <= self._settings.max_staleness for steps in behind)
            ):
                usable[group_id, index] = replace(rollout, prompt=asked[group_id])
            else:
                logger.warning(
                    "rollout %d of group %d (data row %d, policy version %d) was sampled for "
                    "something else than this group in train step %d: it is not used",
                    *(rollout.index, rollout.group_id, rollout.prompt.row),
                    *(rollout.oldest_version, train_step),
                )
        return usable

    async def _sampled(
        self,
        request: GroupRequest,
        index: int,
        train_step: int,
        there: Mapping[Key, RolloutState],
        lost: Sequence[RolloutState],
    ) -> RolloutState:
        """The rollout that is there, else one sampled now: COMPLETED, FAILED by its tool, or
        EXPIRED because an interruption left it too far behind, or one of its siblings in
        ``lost``."""
        if (request.group_id, index) in there:
            return there[request.group_id, index]
        seed = rollout_seed(
            self._settings.seed, train_step, request.prompt.row, request.tries, index
        )
        part = SampledPart((request.group_id, index), request.prompt, seed)
        while not part.finish_reason:
            if lost or (part.policy_versions and await self._too_stale(part)):
                return self._rollout(part, Status.EXPIRED, "stale", INTERRUPTED)
            with self.sampling:
                await part.sample(
                    self._sampler,
                    max_new_tokens=self._settings.max_new_tokens,
                    temperature=self._settings.temperature,
                    stop_ids=self._turns.stop_ids if self._turns else (),
                )
            if part.called and self._turns is not None:
                said = await self._turns.answer(part, self._settings.max_new_tokens)
                if said:
                    return self._rollout(part, Status.FAILED, "tool", said)
        return self._rollout(part, Status.COMPLETED)

    async def _too_stale(self, part: SampledPart) -> bool:
        """Whether an interrupted rollout could not be trained any more if it went on."""
        version = await self._sampler.ready()
        return version - min(part.policy_versions) > self._settings.max_staleness

    def _rollout(
        self, part: SampledPart, status: Status, cause: str = "", error_msg: str = ""
    ) -> RolloutState:
        return RolloutState(
            *part.key,
            part.prompt,
            status,
            response_ids=tuple(part.response_ids),
            rollout_logprobs=tuple(part.rollout_logprobs),
            response_mask=tuple(part.response_mask) if not all(part.response_mask) else (),
            policy_versions=tuple(part.policy_versions),
            finish_reason=part.finish_reason,
            text=self._decode(part.response_ids),
            cause=cause,
            error_msg=error_msg,
        )

    async def _after_sampling(self, rollout: RolloutState) -> RolloutState:
        """What can be done for a rollout alone, beside its siblings."""
        if rollout.status is not Status.COMPLETED or self._dropped(rollout):
            return rollout
        if self._filter is not None:
            return await self._judged(rollout)
        async with asyncio.TaskGroup() as tasks:
            scoring = tasks.create_task(self._scored(rollout))
            judging = tasks.create_task(self._judged(rollout))
        scored, judged = scoring.result(), judging.result()
        if scored.status is Status.FAILED or judged.status is not Status.FAILED:
            return replace(scored, reward=judged.reward)
        return judged

    async def _end_group(self, rollouts: tuple[RolloutState, ...]) -> Group:
        """What needs all of a group: batch judge, filter, and the group's status."""
        if _all_completed(rollouts) and not any(map(self._trains, rollouts)):
            return _group(_filtered(rollouts, "truncated"), Status.FILTERED)
        rollouts = await self._judged_together(rollouts)
        if self._filter is not None and _all_completed(rollouts):
            try:
                passes = self._filter(tuple(r for r in rollouts if not self._dropped(r)))
            except Exception as error:  # a user's function: its failure is this group's reason
                said = f"filter_func raised {type(error).__name__}: {error}"
                rollouts = tuple(r.failed("filter_func", said) for r in rollouts)
            else:
                if not passes:
                    return _group(_filtered(rollouts, "filtered"), Status.FILTERED)
                rollouts = await self._all_scored(rollouts)
        return _group(rollouts, _status_of(rollouts))

    async def _all_scored(self, rollouts: tuple[RolloutState, ...]) -> tuple[RolloutState, ...]:
        if self.in_order:
            return tuple([await self._scored(rollout) for rollout in rollouts])
        async with asyncio.TaskGroup() as tasks:
            scoring = [tasks.create_task(self._scored(rollout)) for rollout in rollouts]
        return tuple(task.result() for task in scoring)

    def _trains(self, rollout: RolloutState) -> bool:
        return rollout.trains(self._settings.truncated)

    def _dropped(self, rollout: RolloutState) -> bool:
        """Whether judges and filters are not to see it."""
        return self._settings.truncated == "drop" and not self._trains(rollout)

    async def _scored(self, rollout: RolloutState) -> RolloutState:
        if self._scorer is None or not self._trains(rollout):
            return rollout
        return await self._scorer.score(rollout)

    async def _judged(self, rollout: RolloutState) -> RolloutState:
        if self._judge is None:
            return rollout
        try:
            reward = await self._judge.judge(rollout.text, rollout.prompt)
        except JudgeError as error:
            return rollout.failed("judge", str(error))
        return replace(rollout, reward=reward)

    async def _judged_together(
        self, rollouts: tuple[RolloutState, ...]
    ) -> tuple[RolloutState, ...]:
        if self._batch_judge is None or not _all_completed(rollouts):
            return rollouts
        judged = [rollout for rollout in rollouts if not self._dropped(rollout)]
        try:
            rewards = iter(await self._batch_judge.judge_batch(judged))
        except JudgeError as error:
            return tuple(r.failed("judge", str(error)) for r in rollouts)
        return tuple(r if self._dropped(r) else replace(r, reward=next(rewards)) for r in rollouts)


class BusyClock:
    """Seconds during which at least one of the blocks that it is entered for was open."""

    def __init__(self) -> None:
        self._open = 0
        self._since = self._total = 0.0

    @property
    def seconds(self) -> float:
        """So far."""
        return self._total + (time.perf_counter() - self._since if self._open else 0.0)

    def __enter__(self) -> None:
        if not self._open:
            self._since = time.perf_counter()
        self._open += 1

    def __exit__(self, *_: object) -> None:
        self._open -= 1
        if not self._open:
            self._total += time.perf_counter() - self._since


def _all_completed(rollouts: tuple[RolloutState, ...]) -> bool:
    return all(rollout.status is Status.COMPLETED for rollout in rollouts)


def _status_of(rollouts: tuple[RolloutState, ...]) -> Status:
    """A group dies with any of its members; a failure says more than an expiry."""
    found = {rollout.status for rollout in rollouts}
    return next((s for s in (Status.FAILED, Status.EXPIRED) if s in found), Status.COMPLETED)


def _filtered(rollouts: tuple[RolloutState, ...], cause: str) -> tuple[RolloutState, ...]:
    return tuple(replace(r, status=Status.FILTERED, cause=cause) for r in rollouts)


def _group(rollouts: tuple[RolloutState, ...], status: Status) -> Group:
    cause = next((r.cause for r in rollouts if r.cause and r.status is status), "")
    return Group(rollouts[0].group_id, rollouts[0].prompt, rollouts, status, cause)


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
