"""Groups that are under way while a batch trains: how many, how old, and what becomes of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from opd_core.agent_loop.collect import Collector, asked_again
from opd_core.errors import SamplingError, SurvivorError
from opd_core.rollout import Group, RolloutState, Status
from opd_core.rollout_json import group_to_plain
from opd_core.sampling.protocol import SampleRequest

Make = Callable[..., Collector]
LIMIT_S = 10


@pytest.fixture
def held(sampler: Any) -> Callable[[int], None]:
    """``held(group_id)``: groups from this one on are sampled when it is called again with more."""
    state = {"until": 0, "event": asyncio.Event()}

    async def hold(request: SampleRequest) -> None:
        while request.key[0] >= state["until"]:
            await state["event"].wait()

    def release(until: int) -> None:
        state["until"] = until
        state["event"].set()
        state["event"] = asyncio.Event()

    sampler.before = hold
    return release


def groups_asked(sampler: Any) -> list[int]:
    return sorted({r.key[0] for call in sampler.calls for r in call})


async def all_ended(collector: Collector) -> None:
    """While a batch trains, all that is under way comes to its end."""
    async with asyncio.timeout(LIMIT_S):
        while any(not task.done() for task in collector._under_way):
            await asyncio.sleep(0)


def ids(groups: list[Group]) -> list[int]:
    return [group.group_id for group in groups]


@pytest.mark.parametrize(
    ("staleness", "over", "started"), [(0, 1.0, 2), (1, 1.0, 4), (2, 1.5, 6), (1, 2.5, 5)]
)
async def test_so_many_groups_are_under_way_and_no_more(
    staleness: int, over: float, started: int, make_collector: Make, sampler: Any, held: Any
) -> None:
    held(2)
    collector = make_collector(
        prompts=20, wanted=2, max_staleness=staleness, over_sampling=over, limit=20
    )
    groups, _ = await collector.collect(train_step=5, further=9)
    assert ids(groups) == [0, 1]
    assert groups_asked(sampler) == list(range(started))
    assert collector.ahead == started - 2
    await collector.aclose()


async def test_the_next_step_finds_what_was_sampled_meanwhile(
    make_collector: Make, sampler: Any, scorer: Any, held: Any
) -> None:
    held(2)
    collector = make_collector(prompts=20, wanted=2, max_staleness=1)
    await collector.collect(train_step=5, further=2)
    held(4)
    while len(scorer.scored) < 8:  # while the batch trains
        await asyncio.sleep(0)
    assert groups_asked(sampler) == [0, 1, 2, 3]  # and nothing is started meanwhile
    groups, _ = await collector.collect(train_step=6, further=1)
    assert ids(groups) == [2, 3]
    assert len(scorer.scored) == len(set(scorer.scored))
    await collector.aclose()


async def test_nothing_is_sampled_for_steps_that_will_not_come(
    make_collector: Make, sampler: Any
) -> None:
    collector = make_collector(prompts=20, wanted=2, max_staleness=3)
    await collector.collect(train_step=5, further=1)
    assert groups_asked(sampler) == [0, 1, 2, 3]
    await collector.collect(train_step=6, further=0)
    assert groups_asked(sampler) == [0, 1, 2, 3]


async def test_what_has_waited_too_long_expires_and_its_prompt_returns(
    make_collector: Make, sampler: Any
) -> None:
    shown: list[Group] = []
    collector = make_collector(
        prompts=20, wanted=2, max_staleness=1, limit=20, on_group=shown.append
    )
    await collector.collect(train_step=5, further=5)  # 2 and 3, of policy version 4, wait
    sampler.version = 6
    groups, survivors = await collector.collect(train_step=7, further=0)
    expired = {group.group_id: group for group in shown if group.status is Status.EXPIRED}
    assert sorted(expired) == [2, 3]
    assert survivors.by_status == {"expired": 2, "completed": 2}
    assert survivors.by_cause == {"stale": 2}
    assert min(r.oldest_version for g in groups for r in g.rollouts) == 6
    rows = {group.prompt.row for group in expired.values()}
    asked = {g.prompt.row for g in groups}
    assert rows & asked or collector.state()["queue"]["returned"]


async def test_on_policy_what_a_step_leaves_over_is_given_up_at_once(
    make_collector: Make, sampler: Any, scorer: Any, held: Any
) -> None:
    held(2)
    shown: list[Group] = []
    collector = make_collector(
        prompts=20, wanted=2, over_sampling=2.0, limit=20, on_group=shown.append
    )
    groups, survivors = await collector.collect(train_step=5, further=1)
    assert ids(groups) == [0, 1]
    assert survivors.by_status == {"completed": 2, "aborted": 2}
    assert survivors.by_cause == {"over_sampled": 2}
    assert "sampling.over_sampling" in survivors.examples["over_sampled"]
    assert (collector.ahead, sampler.streams_open) == (0, 0)
    assert len(scorer.scored) == 4  # and never more
    late = {row_of(sampler, 2), row_of(sampler, 3)}
    held(99)
    sampler.version = 5
    await collector.collect(train_step=6, further=0)
    assert {row_of(sampler, 4), row_of(sampler, 5)} == late  # asked again, and first


async def test_what_was_lost_while_a_batch_trained_is_replaced_though_the_buffer_is_full(
    make_collector: Make, sampler: Any, scorer: Any
) -> None:
    scorer.fails |= {(4, 0), (5, 0)}
    collector = make_collector(prompts=30, wanted=2, max_staleness=2, limit=20)
    await collector.collect(train_step=5, further=9)
    await all_ended(collector)
    await collector.collect(train_step=6, further=9)
    assert collector.ahead == 4
    async with asyncio.timeout(LIMIT_S):
        while max(groups_asked(sampler)) < 9:
            await asyncio.sleep(0)
    await collector.aclose()


async def test_a_death_is_told_though_the_buffer_is_full(
    make_collector: Make, make_group: Any, make_rollout: Any, sampler: Any
) -> None:
    collector = make_collector(prompts=20, wanted=1, max_staleness=2)
    rollout = make_rollout(group_id=9, teacher_logprobs=(-1.0, -2.0), policy_versions=(4, 4))
    state = collector.state() | {"buffer": [group_to_plain(make_group(rollout))]}
    collector.restore(state)
    sampler.error = SamplingError("none left")
    sampler.omit |= {(group, i) for group in range(9) for i in (0, 1)}
    await collector.collect(train_step=5, further=5)  # the buffer's
    await all_ended(collector)
    with pytest.raises(SamplingError, match="none left"):
        await collector.collect(train_step=6, further=5)
    await collector.aclose()


class SlowTeachers:
    """While they are proven, all that is under way comes to its end."""

    def __init__(self) -> None:
        self.collector: Collector

    async def ready(self) -> None: ...

    async def verified(self, groups: list[Group], train_step: int) -> list[Group]:
        await all_ended(self.collector)
        return list(groups)


@pytest.mark.parametrize(("staleness", "over"), [(1, 1.0), (2, 1.0), (0, 2.0)])
async def test_what_ends_while_teachers_are_proven_is_neither_lost_nor_too_old(
    staleness: int, over: float, make_collector: Make, sampler: Any
) -> None:
    shown: list[Group] = []
    collector = make_collector(
        prompts=40,
        wanted=2,
        limit=40,
        max_staleness=staleness,
        over_sampling=over,
        on_group=shown.append,
    )
    collector._teachers = teachers = SlowTeachers()
    teachers.collector = collector
    for step in range(5, 9):
        sampler.version = step - 1
        groups, _ = await collector.collect(step, further=9)
        oldest = min(r.oldest_version for g in groups for r in g.rollouts)
        assert step - 1 - oldest <= staleness
        state = collector.state()
        waiting = [plain["group_id"] for plain in state["buffer"] + state["under_way"]]
        assert sorted([*ids(shown), *waiting]) == list(range(state["next_group_id"]))
    await collector.aclose()


async def test_for_other_settings_what_waits_is_asked_again(
    make_collector: Make, make_group: Any, make_rollout: Any, sampler: Any, scorer: Any
) -> None:
    collector = make_collector(prompts=20, wanted=1)
    prompt = collector._queue.of_row(7)
    rollout = make_rollout(0, prompt, group_id=9, teacher_logprobs=(-1.0, -2.0))
    state = collector.state() | {"buffer": [group_to_plain(make_group(rollout))]}
    again = asked_again(json.loads(json.dumps(state)))
    assert again["buffer"] == []
    assert again["under_way"] == [{"group_id": 9, "row": 7, "tries": 0}]
    collector.restore(again)
    groups, _ = await collector.collect(train_step=5)
    assert [(g.group_id, g.prompt.row, len(g.rollouts)) for g in groups] == [(9, 7, 2)]
    assert len(scorer.scored) == 2


@pytest.mark.parametrize(("wanted", "over", "started"), [(10, 1.1, 11), (3, 1.34, 5), (7, 1.0, 7)])
async def test_over_sampling_is_rounded_up_and_no_further(
    wanted: int, over: float, started: int, make_collector: Make, sampler: Any
) -> None:
    collector = make_collector(prompts=40, wanted=wanted, over_sampling=over, limit=99)
    await collector.collect(train_step=5)
    assert len(groups_asked(sampler)) == started


def row_of(sampler: Any, group_id: int) -> int:
    return next(r.token_ids[1] for call in sampler.calls for r in call if r.key[0] == group_id)


async def test_groups_under_way_are_named_in_the_state_and_asked_again(
    make_collector: Make, sampler: Any, held: Any
) -> None:
    held(2)
    first = make_collector(prompts=20, wanted=2, max_staleness=1)
    await first.collect(train_step=5, further=2)
    rows = {i: row_of(sampler, i) for i in (2, 3)}
    saved = json.loads(json.dumps(first.state()))
    assert [(a["group_id"], a["row"]) for a in saved["under_way"]] == sorted(rows.items())
    await first.aclose()
    assert first.state() == saved  # ending what is under way forgets nothing
    held(99)
    sampler.calls.clear()
    later = make_collector(prompts=20, wanted=2, max_staleness=1)
    later.restore(saved)
    assert later.state() == saved
    groups, _ = await later.collect(train_step=6, further=0)
    assert {g.group_id: g.prompt.row for g in groups} == rows
    assert groups_asked(sampler) == [2, 3]


async def test_a_row_that_the_data_does_not_give_is_refused(make_collector: Make) -> None:
    collector = make_collector(prompts=4)
    state = collector.state() | {"under_way": [{"group_id": 0, "row": 99, "tries": 0}]}
    with pytest.raises(
        Exception, match="state of the collector: the data gives no prompt of row 99"
    ):
        collector.restore(state)


async def test_a_lost_group_is_replaced_while_others_are_under_way(
    make_collector: Make, sampler: Any, scorer: Any, held: Any
) -> None:
    held(1)
    scorer.fails.add((0, 0))
    collector = make_collector(prompts=20, wanted=2)
    collecting = asyncio.create_task(collector.collect(train_step=5))
    async with asyncio.timeout(LIMIT_S):
        while 2 not in groups_asked(sampler):
            await asyncio.sleep(0)
    held(99)
    groups, _ = await collecting
    assert ids(groups) == [1, 2]


async def test_the_limit_counts_this_steps_groups_only(make_collector: Make, scorer: Any) -> None:
    scorer.fails |= {(group_id, 0) for group_id in range(100)}
    collector = make_collector(prompts=50, wanted=2, limit=4, max_staleness=1)
    with pytest.raises(
        SurvivorError, match=r"6 groups were started and 2 are still missing \(limit 6"
    ):
        await collector.collect(train_step=5, further=5)


async def test_an_engine_that_is_lost_meanwhile_is_told_by_the_next_step(
    make_collector: Make, sampler: Any
) -> None:
    sampler.error = SamplingError("none left")
    sampler.omit |= {(group, i) for group in (2, 3) for i in (0, 1)}
    collector = make_collector(prompts=20, wanted=2, max_staleness=1)

    async def two_steps() -> None:
        for step in (5, 6):
            await collector.collect(step, further=5)

    with pytest.raises(SamplingError, match="none left"):
        await two_steps()
    await collector.aclose()


async def test_teachers_are_proven_before_a_group_trains(
    make_collector: Make, sampler: Any
) -> None:
    class Teachers:
        def __init__(self) -> None:
            self.asked: list[list[int]] = []

        async def ready(self) -> None: ...

        async def verified(self, groups: list[Group], train_step: int) -> list[Group]:
            self.asked.append(sorted(ids(groups)))
            return [
                Group(
                    g.group_id,
                    g.prompt,
                    tuple(r.failed("doubt", "changed") for r in g.rollouts),
                    Status.FAILED,
                    "doubt",
                )
                if g.group_id == 1
                else g
                for g in groups
            ]

    teachers = Teachers()
    collector = make_collector(prompts=20, wanted=2)
    collector._teachers = teachers
    groups, survivors = await collector.collect(train_step=5)
    assert ids(groups) == [0, 2]
    assert survivors.by_cause == {"doubt": 1}
    assert teachers.asked == [[0, 1], [2]]


def test_a_rollout_knows_its_oldest_token(make_rollout: Any) -> None:
    rollout: RolloutState = make_rollout()
    assert RolloutState(0, 0, rollout.prompt).oldest_version == 0
