"""A collector goes on where an earlier one was: its counts, its prompts, its parked rollouts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opd_core.agent_loop.collect import Collector
from opd_core.agent_loop.parking import ParkingLot
from opd_core.errors import TeacherAway, TrainingError
from opd_core.rollout import Group, Prompt, RolloutState, Status
from opd_core.rollout_json import group_to_plain

Make = Callable[..., Collector]
Key = tuple[int, int]
STEP = 5  # the stand-in samples at policy version 4
ROLLOUT = RolloutState(
    0, 0, Prompt(0, "sums", ()), Status.COMPLETED, (6,), (-0.5,), policy_versions=(4,)
)


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


async def test_a_restored_collector_collects_what_the_first_would_have(
    make_collector: Make, sampler: Any, scorer: Any
) -> None:
    """Three steps over five prompts cross two ends of epochs, and groups are lost on the way."""
    scorer.fails |= {(group_id, 0) for group_id in (1, 4, 5, 11)}

    def a_collector() -> Collector:
        return make_collector(
            prompts=5, wanted=3, filter_func=lambda rollouts: rollouts[0].group_id != 2
        )

    first = a_collector()
    await first.collect(1)
    await first.collect(2)
    saved = through_json(first.state())
    assert saved["survivors"]["by_cause"] == {"http_503": 3, "filtered": 1}
    later = a_collector()
    later.restore(saved)
    assert later.state() == first.state()
    for step in (3, 4):
        sampler.calls.clear()
        expected, asked = await first.collect(step), sampler.calls.copy()
        sampler.calls.clear()
        assert await later.collect(step) == expected
        assert sampler.calls == asked  # the seeds included
        assert later.state() == first.state()
        assert later.epoch == first.epoch
    assert later.survivors == first.survivors


async def test_groups_that_wait_in_the_buffer_are_part_of_the_state(
    make_collector: Make, make_group: Any, make_rollout: Any, sampler: Any
) -> None:
    group: Group = make_group(make_rollout(group_id=0, teacher_logprobs=(-1.0, -2.0)))
    collector = make_collector(wanted=1)
    state = collector.state() | {"buffer": [group_to_plain(group)]}
    collector.restore(through_json(state))
    assert collector.state() == state
    assert (await collector.collect(1))[0] == [group]
    assert sampler.calls == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"more": 1}, r"missing or unknown: \['more'\]"),
        ({"next_group_id": "3"}, "next_group_id: expected"),
        ({"queue": {}}, "state of the prompt queue: fields"),
        ({"survivors": {}}, "state of the survivors: fields"),
        ({"buffer": [{}]}, "state of the replay buffer: expected a group"),
    ],
)
def test_what_is_no_state_is_refused_with_its_part(
    make_collector: Make, change: dict[str, Any], said: str
) -> None:
    collector = make_collector()
    with pytest.raises(TrainingError, match=f"^state of the collector: .*{said}"):
        collector.restore(collector.state() | change)


# ------------------------------------------------------------------------------------------- parked


@pytest.fixture
def lot(tmp_path: Path) -> ParkingLot:
    return ParkingLot(tmp_path / "parked")


def files(lot: ParkingLot) -> list[Key]:
    return [(r.group_id, r.index) for r in ParkingLot(lot.path_of(ROLLOUT).parent).load()]


class ParkingScorer:
    """Parks the rollouts in ``away`` and ends the run with the last of them; scores others."""

    def __init__(self, lot: ParkingLot, away: set[Key]) -> None:
        self.lot, self.away, self.parked = lot, away, set[Key]()
        self.scored: list[RolloutState] = []

    async def score(self, rollout: RolloutState) -> RolloutState:
        key = (rollout.group_id, rollout.index)
        with self.lot.spot(rollout) as spot:
            if key in self.away:
                spot.park()
                self.parked.add(key)
                if self.parked == self.away:
                    raise TeacherAway("gone", "away")
                await asyncio.Event().wait()
            self.scored.append(rollout)
            return replace(rollout, teacher_logprobs=(-1.0,) * len(rollout.response_ids))


def sampled(sampler: Any) -> list[Key]:
    return [request.key for call in sampler.calls for request in call]


async def first_prompt(make_collector: Make, sampler: Any) -> Prompt:
    """The prompt that every collector asks first."""
    ((group,), _) = await make_collector(wanted=1).collect(STEP)
    sampler.calls.clear()
    return group.prompt


async def test_after_a_restart_no_rollout_is_sampled_twice_and_none_is_lost(
    make_collector: Make, lot: ParkingLot, sampler: Any
) -> None:
    waiting = {(0, 1), (2, 0), (2, 1)}
    with pytest.raises(TeacherAway):
        await make_collector(wanted=3, scorer=ParkingScorer(lot, waiting)).collect(STEP)
    assert set(files(lot)) == waiting
    sampler.calls.clear()
    scorer = ParkingScorer(ParkingLot(lot.path_of(ROLLOUT).parent), set())
    later = make_collector(wanted=3, scorer=scorer)
    later.restore_parked(scorer.lot)
    groups, _ = await later.collect(STEP)
    everything = [(group_id, index) for group_id in range(3) for index in range(2)]
    assert sorted([*sampled(sampler), *waiting]) == everything
    assert sorted((r.group_id, r.index) for r in scorer.scored) == everything
    assert [(r.group_id, r.index) for g in groups for r in g.rollouts] == everything
    assert files(lot) == []


async def test_a_second_restart_finds_what_still_waits(
    make_collector: Make, lot: ParkingLot, sampler: Any
) -> None:
    for waiting in ({(0, 1), (1, 0)}, {(1, 0)}):
        scorer = ParkingScorer(ParkingLot(lot.path_of(ROLLOUT).parent), waiting)
        collector = make_collector(wanted=2, scorer=scorer)
        collector.restore_parked(scorer.lot)
        with pytest.raises(TeacherAway):
            await collector.collect(STEP)
        assert (1, 0) in files(lot)
    assert sampled(sampler).count((1, 0)) == 1


async def test_one_of_a_later_round_of_the_step_is_used_there(
    make_collector: Make,
    lot: ParkingLot,
    sampler: Any,
    scorer: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompt = await first_prompt(make_collector, sampler)
    scorer.fails.add((0, 0))
    collector = make_collector(wanted=2)
    lot.add(replace(ROLLOUT, group_id=2, index=1, prompt=prompt))  # asked again after group 0
    collector.restore_parked(lot)
    groups, _ = await collector.collect(STEP)
    assert [g.group_id for g in groups] == [1, 2]
    assert (2, 1) not in sampled(sampler)
    assert caplog.records == []
    assert files(lot) == []


@pytest.mark.parametrize("key", [(0, 1), (9, 0)])
async def test_one_that_does_not_fit_is_dropped_with_a_word_and_its_file(
    key: Key,
    make_collector: Make,
    lot: ParkingLot,
    sampler: Any,
    make_prompt: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lot.add(replace(ROLLOUT, group_id=key[0], index=key[1], prompt=make_prompt(99)))
    collector = make_collector(wanted=2)
    collector.restore_parked(lot)
    await collector.collect(STEP)
    assert sorted(sampled(sampler)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert f"rollout {key[1]} of group {key[0]}" in caplog.text
    assert (files(lot), lot.parked) == ([], 0)


async def test_one_of_a_group_that_is_filtered_leaves_no_file(
    make_collector: Make, lot: ParkingLot, sampler: Any
) -> None:
    prompt = await first_prompt(make_collector, sampler)
    lot.add(replace(ROLLOUT, prompt=prompt))
    collector = make_collector(wanted=1, filter_func=lambda rollouts: rollouts[0].group_id > 0)
    collector.restore_parked(lot)
    await collector.collect(STEP)
    assert files(lot) == []
