"""Stand-ins for the loop's organs: a sampler, a scorer and a judge that do as a test says, and note
what was asked of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from opd_core.agent_loop.collect import Collector
from opd_core.agent_loop.judging import JudgeError
from opd_core.agent_loop.loop import AgentLoop, GroupRequest, LoopSettings
from opd_core.agent_loop.prompts import PromptQueue
from opd_core.agent_loop.replay_buffer import ReplayBuffer
from opd_core.rollout import Group, Prompt, RolloutState
from opd_core.sampling.protocol import Completion, FinishReason, SampleRequest

Key = tuple[int, int]


async def _at_once(_: object) -> None:
    await asyncio.sleep(0)


class FakeSampler:
    """Answers the requests of one turn of the event loop one after the other, in the order that
    ``order`` makes of them.

    ``before`` is awaited before each of them; ``answer`` makes the completion; keys in ``omit`` are
    never answered, or with ``error`` if there is one. ``version`` is the policy version now.
    """

    def __init__(self) -> None:
        self.calls: list[list[SampleRequest]] = []
        self.order: Callable[[list[SampleRequest]], Sequence[SampleRequest]] = lambda r: r
        self.before: Callable[[SampleRequest], Awaitable[object]] = _at_once
        self.answer: Callable[[SampleRequest], Completion] = self.completion
        self.omit: set[Key] = set()
        self.error: Exception | None = None
        self.version = 4
        self.streams_open = 0
        self._turn: list[tuple[SampleRequest, asyncio.Future[Completion]]] = []
        self._serving: set[asyncio.Task[None]] = set()

    async def ready(self) -> int:
        return self.version

    async def sample(self, request: SampleRequest) -> Completion:
        loop = asyncio.get_running_loop()
        if not self._turn:
            loop.call_soon(self._serve)
        answered: asyncio.Future[Completion] = loop.create_future()
        self._turn.append((request, answered))
        self.streams_open += 1
        try:
            return await answered
        finally:
            self.streams_open -= 1

    def _serve(self) -> None:
        turn, self._turn = self._turn, []
        serving = asyncio.create_task(self._serve_all(turn))
        self._serving.add(serving)
        for _, answered in turn:
            answered.add_done_callback(lambda _: self._end(serving, turn))

    def _end(self, serving: asyncio.Task[None], turn: list[Any]) -> None:
        """Nobody waits any more: what was cancelled is not served."""
        if all(answered.done() for _, answered in turn):
            serving.cancel()
            self._serving.discard(serving)

    async def _serve_all(self, turn: list[Any]) -> None:
        requests = [request for request, _ in turn]
        self.calls.append(requests)
        waiting = {id(request): answered for request, answered in turn}
        for request in self.order(list(requests)):
            if request.key not in self.omit:
                await self.before(request)
                if not waiting[id(request)].done():
                    waiting[id(request)].set_result(self.answer(request))
        for answered in waiting.values():
            if self.error is not None and not answered.done():
                answered.set_exception(self.error)

    def completion(self, request: SampleRequest) -> Completion:
        """Response ids that name the group and the index; logprobs that go with them."""
        group_id, index = request.key
        ids = (10 + group_id, 10 + index, 1)
        reason: FinishReason = "length" if index % 2 else "stop"
        versions = (self.version,) * 3
        return Completion(ids, (-0.5, -0.25 * (1 + index), -0.1), versions, reason)


class FakeScorer:
    """Scores every token -1, except for the keys in ``fails``, with the cause in ``causes``;
    ``before`` is awaited first."""

    def __init__(self, log: list[tuple[str, Any]]) -> None:
        self.scored: list[Key] = []
        self.log = log
        self.before: Callable[[RolloutState], Awaitable[object]] = _at_once
        self.fails: set[Key] = set()
        self.causes: dict[Key, str] = {}

    async def score(self, rollout: RolloutState) -> RolloutState:
        key = (rollout.group_id, rollout.index)
        self.scored.append(key)
        self.log.append(("score", key))
        await self.before(rollout)
        if key in self.fails:
            cause = self.causes.get(key, "http_503")
            return rollout.failed(cause, "teacher 'big': HTTP 503")
        return replace(rollout, teacher_logprobs=(-1.0,) * len(rollout.response_ids))


class FakeJudge:
    """Rewards a rollout with ``reward(text, prompt)``, which may raise JudgeError."""

    def __init__(self, log: list[tuple[str, Any]]) -> None:
        self.log = log
        self.seen: list[str] = []
        self.batches: list[tuple[RolloutState, ...]] = []
        self.before: Callable[[object], Awaitable[object]] = _at_once
        self.reward: Callable[[str, Prompt], float] = lambda text, prompt: 1.0
        self.error: str | None = None

    async def judge(self, text: str, prompt: Prompt) -> float:
        self.seen.append(text)
        self.log.append(("judge", text))
        await self.before(text)
        return self._give(text, prompt)

    async def judge_batch(self, rollouts: Sequence[RolloutState]) -> list[float]:
        self.batches.append(tuple(rollouts))
        self.log.append(("judge together", rollouts[0].group_id))
        await self.before(rollouts)
        return [self._give(r.text, r.prompt) for r in rollouts]

    def _give(self, text: str, prompt: Prompt) -> float:
        if self.error is not None:
            raise JudgeError(self.error)
        return self.reward(text, prompt)


def _decode(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


@pytest.fixture
def log() -> list[tuple[str, Any]]:
    """What happened, in order, over all organs."""
    return []


@pytest.fixture
def sampler() -> FakeSampler:
    return FakeSampler()


@pytest.fixture
def scorer(log: list[tuple[str, Any]]) -> FakeScorer:
    return FakeScorer(log)


@pytest.fixture
def judge(log: list[tuple[str, Any]]) -> FakeJudge:
    return FakeJudge(log)


@pytest.fixture
def make_loop(sampler: FakeSampler, scorer: FakeScorer) -> Callable[..., AgentLoop]:
    """``make_loop(group_size=2, scorer=…, judge=…, batch_judge=…, filter_func=…)``."""

    def make(group_size: int = 2, seed: int = 7, **organs: Any) -> AgentLoop:
        names = ("max_new_tokens", "max_staleness", "truncated")
        given = {name: organs.pop(name) for name in names if name in organs}
        settings = LoopSettings(group_size, seed=seed, **({"max_new_tokens": 3} | given))
        defaults = {"sampler": sampler, "scorer": scorer, "decode": _decode}
        return AgentLoop(settings, **(defaults | organs))

    return make


@pytest.fixture
def requests_for(make_prompt: Callable[..., Prompt]) -> Callable[..., list[GroupRequest]]:
    """``requests_for(count)``: groups 0, 1, … of the prompts of rows 0, 1, …"""
    return lambda count: [GroupRequest(i, make_prompt(i)) for i in range(count)]


@pytest.fixture
def decode() -> Callable[[Sequence[int]], str]:
    return _decode


@pytest.fixture
def make_collector(make_loop: Any, make_prompt: Any) -> Callable[..., Collector]:
    """``make_collector(prompts=…, wanted=…, limit=…, max_requeue=…, **organs of the loop)``."""

    def make(
        prompts: int = 4,
        wanted: int = 2,
        limit: int = 8,
        max_requeue: int = 2,
        on_group: Callable[[Group], None] = lambda group: None,
        max_staleness: int = 0,
        over_sampling: float = 1.0,
        **organs: Any,
    ) -> Collector:
        rows = [make_prompt(row, token_ids=(3, row)) for row in range(prompts)]
        return Collector(
            PromptQueue(rows, seed=0, max_requeue=max_requeue),
            make_loop(max_staleness=max_staleness, **organs),
            ReplayBuffer(needs_scores=True, needs_rewards=False),
            groups_per_step=wanted,
            limit=limit,
            max_staleness=max_staleness,
            over_sampling=over_sampling,
            on_group=on_group,
        )

    return make
