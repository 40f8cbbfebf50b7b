"""Rollouts that are there already are not sampled again; those of something else are not used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from opd_core.agent_loop.loop import AgentLoop, GroupRequest
from opd_core.rollout import RolloutState, Status

MakeLoop = Callable[..., AgentLoop]
Requests = Callable[..., list[GroupRequest]]
STEP = 5  # the stand-in samples at policy version 4
Key = tuple[int, int]


@pytest.fixture
def there(make_rollout: Any, requests_for: Requests) -> Callable[..., dict[Key, RolloutState]]:
    """``there(*keys, **fields)``: rollouts of ``requests_for`` that could be told from sampled
    ones."""

    def make(*keys: Key, **fields: Any) -> dict[Key, RolloutState]:
        rollouts = [
            make_rollout(index, requests_for(9)[group_id].prompt, group_id=group_id)
            for group_id, index in keys
        ]
        of_step = {"policy_versions": (STEP - 1,) * 2, "text": "there"}
        return {
            key: replace(rollout, **(of_step | fields))
            for key, rollout in zip(keys, rollouts, strict=True)
        }

    return make


def sampled(sampler: Any) -> list[Key]:
    return [request.key for call in sampler.calls for request in call]


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(
    "keys", [[(0, 1)], [(0, 0), (1, 0), (1, 1)], [(1, 1), (1, 0), (0, 1), (0, 0)]]
)
async def test_every_rollout_is_either_there_or_sampled_and_scored_once(
    keys: list[Key],
    in_order: bool,
    make_loop: MakeLoop,
    requests_for: Requests,
    there: Any,
    sampler: Any,
    scorer: Any,
    judge: Any,
) -> None:
    loop = make_loop(judge=judge, in_order=in_order)
    groups = await loop.run(requests_for(2), STEP, there(*keys))
    everything = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert sorted([*sampled(sampler), *keys]) == everything
    assert sorted(scorer.scored) == everything
    rollouts = {(r.group_id, r.index): r for group in groups for r in group.rollouts}
    assert {key for key, rollout in rollouts.items() if rollout.text == "there"} == set(keys)
    assert list(rollouts) == everything
    assert all(r.teacher_logprobs and r.reward == 1.0 for r in rollouts.values())
    assert [group.status for group in groups] == [Status.COMPLETED] * 2


async def test_a_rollout_that_is_there_keeps_what_was_sampled(
    make_loop: MakeLoop, requests_for: Requests, there: Any
) -> None:
    already = there((0, 0), response_ids=(9, 8, 1), rollout_logprobs=(-0.1, -0.2, -0.3))
    (group,) = await make_loop().run(requests_for(1), STEP, already)
    expected = replace(already[0, 0], teacher_logprobs=(-1.0, -1.0, -1.0))
    assert group.rollouts[0] == expected


async def test_judges_see_the_prompt_of_the_data(
    make_loop: MakeLoop, make_prompt: Any, there: Any
) -> None:
    """What JSON made of a prompt's extra keys is not what a judge expects."""
    prompt = make_prompt(0, extra={"pair": (1, 2)})
    (group,) = await make_loop().run([GroupRequest(0, prompt)], STEP, there((0, 1)))
    assert all(rollout.prompt is prompt for rollout in group.rollouts)


@pytest.mark.parametrize(
    "fields",
    [
        {"policy_versions": (STEP - 1, STEP)},
        {"policy_versions": (STEP - 1, STEP - 2)},
        {"prompt": "row"},
        {"prompt": "tokens"},
        {"index": 1},
        {"group_id": 1},
    ],
)
async def test_one_of_something_else_is_sampled_anew_and_told(
    fields: dict[str, Any],
    make_loop: MakeLoop,
    requests_for: Requests,
    make_prompt: Any,
    there: Any,
    sampler: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = {"row": make_prompt(7), "tokens": make_prompt(0, token_ids=(3, 4))}
    if "prompt" in fields:
        fields = {"prompt": prompts[fields["prompt"]]}
    (group,) = await make_loop().run(requests_for(1), STEP, there((0, 0), **fields))
    assert sampled(sampler) == [(0, 0), (0, 1)]
    assert "there" not in {rollout.text for rollout in group.rollouts}
    assert f"in train step {STEP}: it is not used" in caplog.text


@pytest.mark.parametrize("key", [(0, 2), (4, 0)])
async def test_one_that_nobody_asked_for_is_left_out(
    key: Key,
    make_loop: MakeLoop,
    requests_for: Requests,
    there: Any,
    sampler: Any,
    scorer: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (group,) = await make_loop().run(requests_for(1), STEP, there(key))
    assert [r.index for r in group.rollouts] == [0, 1]
    assert key not in scorer.scored
    assert f"rollout {key[1]} of group {key[0]} (data row {key[0]}" in caplog.text
