"""One group from its prompt to its final status: the same component for every kind of sampling.

Without a filter each rollout is scored as soon as it is sampled, beside its siblings' sampling and
beside its own judge; a batch judge comes last. With a filter only groups that pass are scored.
In order, everything is sampled first, and then one rollout after the other is dealt with.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from opd_core.agent_loop.judging import JudgeError, JudgeRunner
from opd_core.errors import SamplingError
from opd_core.rollout import Group, Prompt, RolloutState, Status
from opd_core.sampling.protocol import Completion, Sampler, SampleRequest, rollout_seed

Key = tuple[int, int]
"""Group id and index of a rollout."""

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
    """What the loop needs to know besides its organs."""

    group_size: int
    max_new_tokens: int
    seed: int
    temperature: float = 1.0


class AgentLoop:
    """Runs groups. ``scorer`` is None when OPD is off; ``judge`` and ``batch_judge`` exclude each
    other; ``decode`` turns response ids into the text that judges read. ``in_order``: rollouts are
    scored and judged one at a time in the order of group id and index, whatever the order in
    which they are sampled."""

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
        in_order: bool = False,
    ) -> None:
        self._settings = settings
        self._sampler = sampler
        self._decode = decode
        self._scorer = scorer
        self._judge = judge
        self._batch_judge = batch_judge
        self._filter = filter_func
        self._in_order = in_order
        self.sampling_s = 0.0
        """Seconds spent waiting for the sampler, over all calls."""

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
        rollouts = self._rollouts(requests, train_step, there)
        try:
            groups = await (self._one_by_one if self._in_order else self._side_by_side)(rollouts)
        except* Exception as errors:
            raise _first(errors) from None
        return [groups[r.group_id] if r.group_id in groups else _aborted(r) for r in requests]

    async def _side_by_side(self, rollouts: AsyncIterator[RolloutState]) -> dict[int, Group]:
        """Complete groups; every rollout goes on as soon as it is there."""
        members: dict[int, list[asyncio.Task[RolloutState]]] = {}
        endings: dict[int, asyncio.Task[Group]] = {}

        async def end(siblings: list[asyncio.Task[RolloutState]]) -> Group:
            return await self._end_group([await sibling for sibling in siblings])

        async with asyncio.TaskGroup() as tasks:
            async for rollout in rollouts:
                siblings = members.setdefault(rollout.group_id, [])
                siblings.append(tasks.create_task(self._after_sampling(rollout)))
                if len(siblings) == self._settings.group_size:
                    endings[rollout.group_id] = tasks.create_task(end(siblings))
        return {group_id: ending.result() for group_id, ending in endings.items()}

    async def _one_by_one(self, rollouts: AsyncIterator[RolloutState]) -> dict[int, Group]:
        """Complete groups; nothing goes on before all is sampled, and then in order."""
        members: dict[int, list[RolloutState]] = {}
        groups = {}
        async for rollout in rollouts:
            members.setdefault(rollout.group_id, []).append(rollout)
        for group_id, siblings in sorted(members.items()):
            if len(siblings) == self._settings.group_size:
                siblings.sort(key=lambda rollout: rollout.index)
                ended = [await self._after_sampling(rollout) for rollout in siblings]
                groups[group_id] = await self._end_group(ended)
        return groups

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
            if (
                (rollout.group_id, rollout.index) == (group_id, index)
                and index < self._settings.group_size
                and rollout.prompt == asked.get(group_id)
                and rollout.policy_version == train_step - 1
            ):
                usable[group_id, index] = replace(rollout, prompt=asked[group_id])
            else:
                logger.warning(
                    "rollout %d of group %d (data row %d, policy version %d) was sampled for "
                    "something else than this group in train step %d: it is not used",
                    *(rollout.index, rollout.group_id, rollout.prompt.row),
                    *(rollout.policy_version, train_step),
                )
        return usable

    async def _rollouts(
        self,
        requests: Sequence[GroupRequest],
        train_step: int,
        there: Mapping[Key, RolloutState],
    ) -> AsyncIterator[RolloutState]:
        """What is there, then what is sampled, as it finishes."""
        for rollout in there.values():
            yield rollout
        prompts = {r.group_id: r.prompt for r in requests}
        samples = [s for s in self._samples(requests, train_step) if s.key not in there]
        waiting = {sample.key for sample in samples}
        started = time.perf_counter()
        async for completions in self._sampler.sample(samples):
            for completion in completions:
                if completion.key not in waiting:
                    said = f"the engine returned {completion.key} twice, or unasked"
                    raise SamplingError(said)
                waiting.remove(completion.key)
                group_id, index = completion.key
                state = RolloutState(group_id, index, prompts[group_id])
                yield self._sampled(state, completion)
        self.sampling_s += time.perf_counter() - started

    def _samples(self, requests: Sequence[GroupRequest], train_step: int) -> list[SampleRequest]:
        s = self._settings
        return [
            SampleRequest(
                (r.group_id, index),
                r.prompt.token_ids,
                rollout_seed(s.seed, train_step, r.prompt.row, r.tries, index),
                s.max_new_tokens,
                s.temperature,
            )
            for r in requests
            for index in range(s.group_size)
        ]

    def _sampled(self, state: RolloutState, completion: Completion) -> RolloutState:
        return replace(
            state,
            status=Status.COMPLETED,
            response_ids=completion.response_ids,
            rollout_logprobs=completion.rollout_logprobs,
            finish_reason=completion.finish_reason,
            policy_version=completion.policy_version,
            text=self._decode(completion.response_ids),
        )

    async def _after_sampling(self, rollout: RolloutState) -> RolloutState:
        """What can be done for a rollout alone, beside its siblings."""
        if self._filter is not None:
            return await self._judged(rollout)
        async with asyncio.TaskGroup() as tasks:  # unlike gather, it leaves nothing behind
            scoring = tasks.create_task(self._scored(rollout))
            judging = tasks.create_task(self._judged(rollout))
        scored, judged = scoring.result(), judging.result()
        if scored.status is Status.FAILED or judged.status is not Status.FAILED:
            return replace(scored, reward=judged.reward)
        return judged

    async def _end_group(self, members: Sequence[RolloutState]) -> Group:
        """What needs all of a group: batch judge, filter, and the group's status."""
        rollouts = tuple(sorted(members, key=lambda rollout: rollout.index))
        rollouts = await self._judged_together(rollouts)
        if self._filter is not None and not _any_failed(rollouts):
            try:
                passes = self._filter(rollouts)
            except Exception as error:  # a user's function: its failure is this group's reason
                said = f"filter_func raised {type(error).__name__}: {error}"
                rollouts = tuple(r.failed("filter_func", said) for r in rollouts)
            else:
                if not passes:
                    return _group(rollouts, Status.FILTERED)
                rollouts = await self._all_scored(rollouts)
        return _group(rollouts, Status.FAILED if _any_failed(rollouts) else Status.COMPLETED)

    async def _all_scored(self, rollouts: tuple[RolloutState, ...]) -> tuple[RolloutState, ...]:
        if self._in_order:
            return tuple([await self._scored(rollout) for rollout in rollouts])
        async with asyncio.TaskGroup() as tasks:
            scoring = [tasks.create_task(self._scored(rollout)) for rollout in rollouts]
        return tuple(task.result() for task in scoring)

    async def _scored(self, rollout: RolloutState) -> RolloutState:
        return rollout if self._scorer is None else await self._scorer.score(rollout)

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
        if self._batch_judge is None or _any_failed(rollouts):
            return rollouts
        try:
            rewards = await self._batch_judge.judge_batch(rollouts)
        except JudgeError as error:
            return tuple(r.failed("judge", str(error)) for r in rollouts)
        return tuple(replace(r, reward=w) for r, w in zip(rollouts, rewards, strict=True))


def _any_failed(rollouts: tuple[RolloutState, ...]) -> bool:
    return any(rollout.status is Status.FAILED for rollout in rollouts)


def _group(rollouts: tuple[RolloutState, ...], status: Status) -> Group:
    if status is Status.FILTERED:
        rollouts = tuple(replace(r, status=status, cause="filtered") for r in rollouts)
    cause = next((r.cause for r in rollouts if r.cause), "")
    return Group(rollouts[0].group_id, rollouts[0].prompt, rollouts, status, cause)


def _aborted(request: GroupRequest) -> Group:
    said = "the sampling engine did not return all of the group's rollouts"
    rollout = RolloutState(
        request.group_id, 0, request.prompt, Status.ABORTED, cause="incomplete", error_msg=said
    )
    return _group((rollout,), Status.ABORTED)


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
