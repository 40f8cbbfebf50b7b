"""Answers in several pieces: interrupted by a weight sync, of several turns, cut at the limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from opd_core.agent_loop.loop import AgentLoop, GroupRequest
from opd_core.agent_loop.tools import ToolError
from opd_core.agent_loop.turns import Turns
from opd_core.rollout import Prompt, RolloutState, Status
from opd_core.sampling.protocol import Completion, FinishReason, SampleRequest

MakeLoop = Callable[..., AgentLoop]
Requests = Callable[..., list[GroupRequest]]
STOP, END = 7, 1


def piece(ids: tuple[int, ...], reason: FinishReason, version: int = 4) -> Completion:
    return Completion(ids, tuple(-float(i) for i in ids), (version,) * len(ids), reason)


class Script:
    """Gives each rollout its own pieces in turn; moves the sampler to a piece's version."""

    def __init__(self, sampler: Any, *pieces: Completion) -> None:
        self._pieces, self._sampler = list(pieces), sampler
        self.asked: list[SampleRequest] = []
        sampler.answer = self

    def __call__(self, request: SampleRequest) -> Completion:
        self.asked.append(request)
        given = self._pieces[len(self.asked) - 1]
        if given.finish_reason == "abort":
            self._sampler.version += 1
        return given


class FakeTool:
    """Says what it is told to, and notes what it was asked."""

    def __init__(self, *answers: str | Exception | None) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    async def call(self, text: str, prompt: Prompt) -> str | None:
        self.asked.append(text)
        said = self._answers.pop(0)
        if isinstance(said, Exception):
            raise said
        return said


@pytest.fixture
def run(make_loop: MakeLoop, requests_for: Requests, decode: Any) -> Any:
    """``await run(tool=…, max_turns=…, **settings)``: the one rollout of one group."""

    async def one(tool: Any = None, max_turns: int = 8, **settings: Any) -> RolloutState:
        def encode(text: str) -> list[int]:
            return [int(word) for word in text.split()]

        turns = Turns(tool, (STOP,), encode, decode, max_turns) if tool else None
        loop = make_loop(group_size=1, turns=turns, **({"max_new_tokens": 20} | settings))
        (group,) = await loop.run(requests_for(1), train_step=5)
        assert group.status is group.rollouts[0].status
        return group.rollouts[0]

    return one


# -------------------------------------------------------------------------------------- interrupted


async def test_an_interrupted_rollout_goes_on_where_it_was(run: Any, sampler: Any) -> None:
    script = Script(
        sampler, piece((11, 12), "abort", 4), piece((), "abort", 5), piece((13, END), "stop", 6)
    )
    rollout = await run(max_staleness=2)
    assert rollout.status is Status.COMPLETED
    assert rollout.response_ids == (11, 12, 13, END)
    assert rollout.rollout_logprobs == (-11.0, -12.0, -13.0, -1.0)
    assert rollout.policy_versions == (4, 4, 6, 6)
    assert (rollout.oldest_version, rollout.finish_reason) == (4, "stop")
    prompt = rollout.prompt.token_ids
    assert [r.token_ids for r in script.asked] == [prompt, (*prompt, 11, 12), (*prompt, 11, 12)]
    assert [r.drawn for r in script.asked] == [0, 2, 2]
    assert [r.max_new_tokens for r in script.asked] == [20, 18, 18]
    assert len({r.seed for r in script.asked}) == 1


async def test_it_is_scored_once_and_whole(run: Any, sampler: Any, scorer: Any) -> None:
    Script(sampler, piece((11,), "abort"), piece((12, END), "stop", 5))
    rollout = await run(max_staleness=1)
    assert scorer.scored == [(0, 0)]
    assert len(rollout.teacher_logprobs) == 3


async def test_it_expires_when_its_first_tokens_are_too_old(
    run: Any, sampler: Any, scorer: Any
) -> None:
    script = Script(sampler, piece((11,), "abort", 4), piece((12,), "abort", 5))
    rollout = await run(max_staleness=1)
    assert (rollout.status, rollout.cause) == (Status.EXPIRED, "stale")
    assert "weights too old" in rollout.error_msg
    assert len(script.asked) == 2  # nothing more was sampled for nothing
    assert scorer.scored == []


async def test_on_policy_an_interrupted_rollout_expires_unless_nothing_was_sampled(
    run: Any, sampler: Any
) -> None:
    Script(sampler, piece((), "abort", 4), piece((11, END), "stop", 5))
    assert (await run()).status is Status.COMPLETED
    sampler.version = 4
    Script(sampler, piece((11,), "abort", 4))
    assert (await run()).status is Status.EXPIRED


# -------------------------------------------------------------------------------------------- turns


async def test_a_tools_tokens_are_in_the_trace_and_not_in_the_mask(
    run: Any, sampler: Any, scorer: Any
) -> None:
    script = Script(
        sampler, piece((11, STOP), "stop"), piece((12, STOP), "stop"), piece((13, END), "stop")
    )
    tool = FakeTool("21 22", "")
    rollout = await run(tool)
    assert rollout.response_ids == (11, STOP, 21, 22, 12, STOP, 13, END)
    assert rollout.response_mask == (True, True, False, False, True, True, True, True)
    assert rollout.rollout_logprobs == (-11.0, -7.0, 0.0, 0.0, -12.0, -7.0, -13.0, -1.0)
    assert rollout.policy_versions == (4,) * 8
    assert (rollout.sampled_tokens, rollout.finish_reason) == (6, "stop")
    assert tool.asked == ["11 7", "11 7 21 22 12 7"]  # all of the response so far
    assert [r.drawn for r in script.asked] == [0, 2, 4]
    assert [r.max_new_tokens for r in script.asked] == [20, 16, 14]
    assert {r.stop_ids for r in script.asked} == {(STOP,)}
    assert scorer.scored == [(0, 0)]  # the whole trace in one request
    assert len(rollout.teacher_logprobs) == 8


async def test_a_tool_may_end_the_answer(run: Any, sampler: Any) -> None:
    Script(sampler, piece((11, STOP), "stop"))
    rollout = await run(FakeTool(None))
    assert (rollout.response_ids, rollout.finish_reason) == ((11, STOP), "stop")
    assert rollout.response_mask == ()


async def test_an_end_token_ends_the_answer_and_calls_nobody(run: Any, sampler: Any) -> None:
    Script(sampler, piece((11, END), "stop"))
    tool = FakeTool()
    assert (await run(tool)).response_ids == (11, END)
    assert tool.asked == []


@pytest.mark.parametrize("said", ["21 22 23", "21 22 23 24"])
async def test_an_answer_without_room_for_the_tools_is_cut(
    said: str, run: Any, sampler: Any
) -> None:
    Script(sampler, piece((11, STOP), "stop"))
    rollout = await run(FakeTool(said), max_new_tokens=5)
    assert (rollout.response_ids, rollout.finish_reason) == ((11, STOP), "length")


async def test_turns_are_counted(run: Any, sampler: Any) -> None:
    Script(sampler, piece((11, STOP), "stop"), piece((12, STOP), "stop"))
    tool = FakeTool("21", "22")
    rollout = await run(tool, max_turns=2)
    assert rollout.response_ids == (11, STOP, 21, 12, STOP)
    assert rollout.truncated
    assert len(tool.asked) == 1


async def test_a_tool_that_fails_fails_the_rollout_with_its_reason(
    run: Any, sampler: Any, scorer: Any
) -> None:
    Script(sampler, piece((11, STOP), "stop"))
    rollout = await run(FakeTool(ToolError("calc: ZeroDivisionError")))
    assert (rollout.status, rollout.cause) == (Status.FAILED, "tool")
    assert rollout.error_msg == "calc: ZeroDivisionError"
    assert scorer.scored == []


async def test_a_turn_may_be_interrupted(run: Any, sampler: Any) -> None:
    Script(
        sampler,
        piece((11, STOP), "stop", 4),
        piece((12,), "abort", 4),
        piece((13, END), "stop", 5),
    )
    rollout = await run(FakeTool("21"), max_staleness=1)
    assert rollout.response_ids == (11, STOP, 21, 12, 13, END)
    assert rollout.policy_versions == (4, 4, 4, 4, 5, 5)
    assert rollout.response_mask == (True, True, False, True, True, True)


# ---------------------------------------------------------------------------------------- truncated


@pytest.mark.parametrize("policy", ["train", "mask", "drop"])
async def test_only_truncated_answers_that_train_are_scored(
    policy: str, make_loop: MakeLoop, requests_for: Requests, scorer: Any, judge: Any
) -> None:
    loop = make_loop(group_size=4, judge=judge, truncated=policy)  # odd indices are truncated
    (group,) = await loop.run(requests_for(1), train_step=5)
    assert group.status is Status.COMPLETED
    assert sorted(scorer.scored) == [
        (0, i) for i in ((0, 1, 2, 3) if policy == "train" else (0, 2))
    ]
    of_cut = None if policy == "drop" else 1.0
    assert [r.reward for r in group.rollouts] == [1.0, of_cut] * 2


@pytest.mark.parametrize("policy", ["mask", "drop"])
async def test_a_group_of_which_nothing_trains_is_filtered_and_costs_no_request(
    policy: str, make_loop: MakeLoop, requests_for: Requests, sampler: Any, scorer: Any
) -> None:
    sampler.answer = lambda request: piece((11, 12, 13), "length")
    (group,) = await make_loop(truncated=policy).run(requests_for(1), train_step=5)
    assert (group.status, group.cause) == (Status.FILTERED, "truncated")
    assert scorer.scored == []


async def test_judges_and_filters_do_not_see_what_is_dropped(
    make_loop: MakeLoop, requests_for: Requests, judge: Any
) -> None:
    seen: list[int] = []

    def keep(rollouts: tuple[RolloutState, ...]) -> bool:
        seen.extend(rollout.index for rollout in rollouts)
        return True

    loop = make_loop(group_size=4, batch_judge=judge, filter_func=keep, truncated="drop")
    (group,) = await loop.run(requests_for(1), train_step=5)
    assert [[r.index for r in batch] for batch in judge.batches] == [[0, 2]]
    assert seen == [0, 2]
    assert [r.reward for r in group.rollouts] == [1.0, None, 1.0, None]
    assert group.status is Status.COMPLETED


async def test_a_judge_that_fails_on_a_dropped_answer_costs_nothing(
    make_loop: MakeLoop, requests_for: Requests, judge: Any
) -> None:
    def only_even(text: str, prompt: Prompt) -> float:
        assert text == "10 10 1"
        return 1.0

    judge.reward = only_even
    (group,) = await make_loop(judge=judge, truncated="drop").run(requests_for(1), train_step=5)
    assert group.status is Status.COMPLETED


# ----------------------------------------------------------------------------- groups that are lost


async def test_the_siblings_of_an_expired_rollout_are_neither_sampled_on_nor_scored(
    make_loop: MakeLoop, requests_for: Requests, sampler: Any, scorer: Any
) -> None:
    """One is interrupted with tokens, the other with none: that one could go on, for nothing."""
    asked: list[SampleRequest] = []

    def answer(request: SampleRequest) -> Completion:
        asked.append(request)
        if len(asked) <= 2:
            sampler.version = 5
            return piece((11,) if request.key[1] == 0 else (), "abort", 4)
        return piece((12, END), "stop", 5)

    sampler.answer = answer
    (group,) = await make_loop().run(requests_for(1), train_step=5)
    assert (group.status, group.cause) == (Status.EXPIRED, "stale")
    assert len(asked) == 2
    assert scorer.scored == []


async def test_the_cause_of_a_group_is_that_of_its_status(
    make_loop: MakeLoop, requests_for: Requests, sampler: Any, scorer: Any
) -> None:
    async def wait_for_the_sync(request: SampleRequest) -> None:
        while request.key == (0, 0) and not scorer.scored:
            await asyncio.sleep(0)

    def answer(request: SampleRequest) -> Completion:
        if request.key == (0, 0):
            sampler.version = 5
            return piece((11,), "abort", 4)
        return piece((12, END), "stop", 4)

    sampler.before, sampler.answer = wait_for_the_sync, answer
    sampler.order = lambda requests: requests[::-1]
    scorer.fails.add((0, 1))
    (group,) = await make_loop().run(requests_for(1), train_step=5)
    assert (group.status, group.cause) == (Status.FAILED, "http_503")
    assert group.error_msg == "teacher 'big': HTTP 503"
