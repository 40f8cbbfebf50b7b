"""One train step's groups: what trains, what is tried again, and when it stops."""

from __future__ import annotations

import re
from typing import Any

import pytest

from opd_core.errors import SurvivorError
from opd_core.rollout import Group, RolloutState, Status
from opd_core.scoring.client import POISON


def rows_asked(sampler: Any) -> list[list[int]]:
    """The rows of each call of the sampler, in order, once per group."""
    return [[r.token_ids[1] for r in call if r.key[1] == 0] for call in sampler.calls]


async def test_a_step_gets_its_full_number_of_groups_and_no_more(
    make_collector: Any, sampler: Any
) -> None:
    collector = make_collector(wanted=3)
    groups, survivors = await collector.collect(train_step=1)
    assert [g.group_id for g in groups] == [0, 1, 2]
    assert survivors.started == 3
    groups, _ = await collector.collect(train_step=2)
    assert [g.group_id for g in groups] == [3, 4, 5]
    assert len(sampler.calls) == 2


async def test_a_lost_group_is_replaced_and_its_prompt_asked_again_first(
    make_collector: Any, sampler: Any, scorer: Any
) -> None:
    scorer.fails.add((0, 1))
    groups, survivors = await make_collector(wanted=2).collect(train_step=1)
    first, second = rows_asked(sampler)
    assert second == [first[0]]
    assert [g.group_id for g in groups] == [1, 2]
    assert [g.prompt.row for g in groups] == [first[1], first[0]]
    assert survivors.by_status == {"completed": 2, "failed": 1}
    assert survivors.by_cause == {"http_503": 1}


@pytest.mark.parametrize("index", [0, 1])
async def test_a_prompt_that_ends_servers_is_not_asked_again(
    index: int, make_collector: Any, sampler: Any, scorer: Any
) -> None:
    scorer.fails |= {(0, 0), (0, 1)}
    scorer.causes[(0, index)] = POISON
    await make_collector(wanted=2).collect(train_step=1)
    first, second = rows_asked(sampler)
    assert len(second) == 1
    assert second[0] not in first


async def test_a_retried_prompt_is_sampled_anew_in_the_same_step(
    make_collector: Any, sampler: Any, scorer: Any
) -> None:
    scorer.fails.add((0, 0))
    await make_collector(prompts=1, wanted=1).collect(train_step=1)
    seeds = [[r.seed for r in call] for call in sampler.calls]
    assert len(seeds) == 2
    assert set(seeds[0]).isdisjoint(seeds[1])


async def test_two_groups_of_one_prompt_in_one_step_are_sampled_differently(
    make_collector: Any, sampler: Any
) -> None:
    await make_collector(prompts=2, wanted=6).collect(train_step=1)
    (asked,) = sampler.calls
    assert len({r.seed for r in asked}) == len(asked) == 12


async def test_a_lost_prompt_is_tried_again_at_most_max_requeue_times(
    make_collector: Any, sampler: Any, scorer: Any
) -> None:
    poison = []

    async def first_prompt_never_passes(rollout: RolloutState) -> None:
        if not poison:
            poison.append(rollout.prompt.row)
        if rollout.prompt.row == poison[0]:
            scorer.fails.add((rollout.group_id, rollout.index))

    scorer.before = first_prompt_never_passes
    groups, survivors = await make_collector(prompts=20, wanted=1, limit=10, max_requeue=2).collect(
        train_step=1
    )
    asked = [row for call in rows_asked(sampler) for row in call]
    assert asked[:3] == [poison[0]] * 3
    assert asked[3] != poison[0]
    assert groups[0].prompt.row == asked[3]
    assert survivors.by_status == {"failed": 3, "completed": 1}


async def test_a_filtered_prompt_does_not_return_in_its_epoch(
    make_collector: Any, sampler: Any, scorer: Any
) -> None:
    dull = set()

    def first_two_are_dull(rollouts: tuple[RolloutState, ...]) -> bool:
        if len(dull) < 2:
            dull.add(rollouts[0].prompt.row)
            return False
        return True

    collector = make_collector(prompts=6, wanted=4, filter_func=first_two_are_dull)
    groups, survivors = await collector.collect(train_step=1)
    asked = [row for call in rows_asked(sampler) for row in call]
    assert sorted(asked) == [0, 1, 2, 3, 4, 5]
    assert {g.prompt.row for g in groups} == set(range(6)) - dull
    assert survivors.by_status == {"filtered": 2, "completed": 4}
    assert {key[0] for key in scorer.scored} == {g.group_id for g in groups}


async def test_over_the_limit_the_run_stops_with_the_survivor_table(
    make_collector: Any, scorer: Any
) -> None:
    scorer.fails |= {(group_id, 0) for group_id in range(100)}
    with pytest.raises(SurvivorError) as caught:
        await make_collector(prompts=50, wanted=2, limit=8).collect(train_step=3)
    said = str(caught.value)
    assert "train step 3: 8 groups were started and 2 are still missing (limit 8" in said
    assert "task.max_groups_per_step" in said
    assert re.search(r"^failed +8 ", said, re.MULTILINE)
    assert "http_503: 8 (e.g. teacher 'big': HTTP 503)" in said
    assert len({group_id for group_id, _ in scorer.scored}) == 8


async def test_the_limit_is_never_exceeded_by_the_last_round(
    make_collector: Any, scorer: Any
) -> None:
    scorer.fails |= {(group_id, 0) for group_id in range(0, 100, 3)}
    scorer.fails |= {(group_id, 0) for group_id in range(1, 100, 3)}
    with pytest.raises(SurvivorError, match=r"kept +2 "):
        await make_collector(prompts=50, wanted=3, limit=7).collect(train_step=1)
    assert len({group_id for group_id, _ in scorer.scored}) <= 7


async def test_groups_are_in_the_same_order_whatever_finished_first(
    make_collector: Any, sampler: Any
) -> None:
    def ids(groups: list[Group]) -> list[tuple[int, int]]:
        return [(g.group_id, g.prompt.row) for g in groups]

    forwards, _ = await make_collector(wanted=4).collect(train_step=1)
    sampler.order = lambda requests: requests[::-1]
    backwards, _ = await make_collector(wanted=4).collect(train_step=1)
    assert ids(forwards) == ids(backwards)


async def test_every_ended_group_is_shown(make_collector: Any, scorer: Any) -> None:
    shown: list[Group] = []
    scorer.fails.add((0, 0))
    await make_collector(wanted=2, on_group=shown.append).collect(train_step=1)
    assert [g.status for g in shown] == [Status.FAILED, Status.COMPLETED, Status.COMPLETED]


async def test_an_epoch_that_ends_within_a_step_goes_on_with_the_next(
    make_collector: Any, sampler: Any
) -> None:
    collector = make_collector(prompts=3, wanted=2)
    for step in (1, 2, 3):
        await collector.collect(step)
    asked = [row for call in rows_asked(sampler) for row in call]
    assert sorted(asked[:3]) == sorted(asked[3:]) == [0, 1, 2]


async def test_filtering_and_a_failing_filter_are_counted_apart(make_collector: Any) -> None:
    def fussy(rollouts: tuple[RolloutState, ...]) -> bool:
        if rollouts[0].group_id == 1:
            raise KeyError("x")
        return rollouts[0].group_id > 1

    _, survivors = await make_collector(wanted=2, filter_func=fussy).collect(train_step=1)
    assert survivors.by_cause == {"filtered": 1, "filter_func": 1}
    assert "filter_func: 1 (e.g. filter_func raised KeyError: 'x')" in survivors.table()
