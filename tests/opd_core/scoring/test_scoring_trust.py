"""When a teacher is believed: canaries, the failure budget, and what waits while it is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from opd_core.agent_loop.parking import ParkingLot
from opd_core.config import FailureBudgetConfig, OPDConfig
from opd_core.errors import TeacherAway
from opd_core.rollout import Group, RolloutState, Status
from opd_core.scoring.budget import FailureBudget
from opd_core.scoring.facts import Canary, TeacherFacts
from opd_core.scoring.routing import CHANGED, TeacherRouter
from opd_core.scoring.state import ScoringState
from opd_core.scoring.store import ScoreStore

MakeRollout = Callable[..., RolloutState]
CANARY_IDS = (11, 12, 13, 14)


def never(_: float) -> Any:
    """A sleep that does not end."""
    return asyncio.Event().wait()


@pytest.fixture
def facts(true_logprobs: Any) -> Callable[..., TeacherFacts]:
    """``facts(replicas=1)`` with a canary that an honest teacher repeats."""

    def make(replicas: int = 1) -> TeacherFacts:
        canary = Canary(CANARY_IDS, (true_logprobs(CANARY_IDS, 0),) * replicas)
        return TeacherFacts(100, canaries=(canary,))

    return make


@pytest.fixture
def route(connect: Any, teacher_config: Any, facts: Any) -> Callable[..., TeacherRouter]:
    """``route(budget=…, parking=…, sleep=…, **teacher fields)``: a router with one teacher."""

    def make(
        *,
        budget: FailureBudgetConfig | None = None,
        sleep: Any = never,
        parking: Any = None,
        stores: Any = None,
        publish: Any = lambda states: None,
        **fields: Any,
    ) -> TeacherRouter:
        teacher = teacher_config(**fields)
        opd = OPDConfig(
            teachers=[teacher],
            default_teacher="big",
            failure_budget=budget or FailureBudgetConfig(),
        )
        client = connect(facts=facts(len(teacher.all_replicas)), sleep=sleep, **fields)
        return TeacherRouter(opd, {"big": client}, parking=parking, stores=stores, publish=publish)

    return make


def drifted(body: dict[str, Any], honest: Any) -> httpx.Response:
    """The right shape, plausible numbers, other weights."""
    answer = honest("sglang", body["input_ids"], body["logprob_start_len"])
    for row in answer["meta_info"]["input_token_logprobs"][1:]:
        row[0] -= 0.01
    return httpx.Response(200, json=answer)


def group_of(*rollouts: RolloutState) -> Group:
    return Group(0, rollouts[0].prompt, rollouts, Status.COMPLETED)


# --- canaries


async def test_groups_of_a_teacher_that_repeats_its_canaries_are_believed(
    route: Any, fake: Any, make_rollout: MakeRollout
) -> None:
    router = route()
    group = group_of(await router.score(make_rollout()))
    assert await router.verified([group], train_step=1) == [group]
    assert fake.bodies[-1]["input_ids"] == list(CANARY_IDS)


async def test_groups_of_a_teacher_that_has_changed_fail(
    route: Any, fake: Any, make_rollout: MakeRollout, honest_answer: Any
) -> None:
    router = route()
    fake.script.extend([lambda body: drifted(body, honest_answer)] * 2)
    scored = await router.score(make_rollout())
    filtered = Group(1, scored.prompt, (scored,), Status.FILTERED)
    (group, other) = await router.verified([group_of(scored), filtered], train_step=1)
    assert (group.status, group.cause) == (Status.FAILED, CHANGED)
    assert "0.01 nats" in group.error_msg
    assert other.status is Status.FILTERED


async def test_a_teacher_that_has_changed_is_not_asked_until_it_is_right_again(
    route: Any, fake: Any, make_rollout: MakeRollout, honest_answer: Any
) -> None:
    router = route(sleep=lambda _: asyncio.sleep(0))
    fake.script.extend([lambda body: drifted(body, honest_answer)] * 4)
    await router.verified([], train_step=1)
    await router.score(make_rollout())
    asked = [tuple(body["input_ids"]) for body in fake.bodies]
    assert asked == [CANARY_IDS] * 5 + [(3, 4, 5, 6, 7)]


@pytest.mark.parametrize(
    "wrong", [httpx.Response(200, text="nonsense"), httpx.Response(200, json={"meta_info": {}})]
)
async def test_a_canary_answered_with_nonsense_casts_doubt(
    wrong: httpx.Response, route: Any, fake: Any, make_rollout: MakeRollout
) -> None:
    router = route()
    scored = await router.score(make_rollout())
    fake.script.append(wrong)
    (group,) = await router.verified([group_of(scored)], train_step=1)
    assert group.status is Status.FAILED


async def test_a_canary_that_nobody_answers_casts_no_doubt(
    route: Any, fake: Any, make_rollout: MakeRollout
) -> None:
    router = route(away_limit_s=0)
    scored = await router.score(make_rollout())
    fake.down.add("one")
    (group,) = await router.verified([group_of(scored)], train_step=1)
    assert group.status is Status.COMPLETED
    with pytest.raises(TeacherAway):
        await router.ready()


async def test_what_a_knock_finds_to_be_changed_was_not_to_be_believed_before(
    route: Any, fake: Any, make_rollout: MakeRollout, honest_answer: Any
) -> None:
    router = route(sleep=lambda _: asyncio.sleep(0))
    wrong = lambda body: drifted(body, honest_answer)  # noqa: E731
    fake.script.append(wrong)
    group = group_of(await router.score(make_rollout()))
    fake.script.extend([httpx.ConnectError("refused"), wrong, wrong])
    await router.score(make_rollout(1))  # the teacher was away, found changed, and came back right
    (judged,) = await router.verified([group], train_step=1)
    assert judged.status is Status.FAILED
    assert "0.01 nats" in judged.error_msg
    (later,) = await router.verified([group_of(await router.score(make_rollout(2)))], train_step=2)
    assert later.status is Status.COMPLETED  # the doubt was taken once


async def test_a_busy_moment_at_a_canary_does_not_lose_the_teacher(
    route: Any, fake: Any, make_rollout: MakeRollout
) -> None:
    router = route(away_limit_s=0)
    fake.script.append(429)
    await router.verified([], train_step=1)
    await router.ready()
    assert (await router.score(make_rollout())).status is Status.COMPLETED


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (0, [])])
async def test_canaries_are_scored_every_so_many_train_steps(
    every: int, steps: list[int], route: Any, fake: Any
) -> None:
    router = route(canary_every=every)
    asked = []
    for train_step in (1, 2, 3, 4):
        before = len(fake.requests)
        await router.verified([], train_step)
        asked += [train_step] * (len(fake.requests) - before)
    assert asked == steps


async def test_every_replica_repeats_the_canaries_and_only_the_changed_one_is_lost(
    route: Any, fake: Any, make_rollout: MakeRollout, honest_answer: Any
) -> None:
    router = route(replicas=[{"endpoint": "http://a"}, {"endpoint": "http://b"}])
    fake.script.append(lambda body: drifted(body, honest_answer))
    await router.verified([], train_step=1)
    assert sorted(fake.hosts) == ["a", "b"]
    changed = fake.hosts[0]
    await asyncio.gather(*(router.score(make_rollout(i, group_id=i)) for i in range(4)))
    assert changed not in fake.hosts[2:]


# --- failure budget


def test_the_budget_is_spent_by_too_many_failures_in_a_window() -> None:
    budget = FailureBudget(ratio=0.5, window=4)
    assert [budget.spend(failed=f) for f in (True, True, False, True)] == [False] * 3 + [True]
    assert budget.failures == 0


def test_failures_that_are_spread_out_do_not_spend_it() -> None:
    budget = FailureBudget(ratio=0.5, window=4)
    assert not any(budget.spend(failed=f) for f in (True, True, False, False) * 5)


async def test_over_the_budget_nothing_is_asked_until_the_canaries_are_right(
    route: Any, fake: Any, make_rollout: MakeRollout
) -> None:
    awake = asyncio.Event()

    async def sleep(_: float) -> None:
        await awake.wait()

    router = route(budget=FailureBudgetConfig(ratio=0.5, window=4), sleep=sleep)
    fake.script.extend([404] * 3)
    failed = [await router.score(make_rollout(i, group_id=i)) for i in range(3)]
    assert {rollout.cause for rollout in failed} == {"http_404"}
    paused = asyncio.create_task(router.ready())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not paused.done()
    assert len(fake.requests) == 3
    awake.set()
    await paused
    assert fake.bodies[-1]["input_ids"] == list(CANARY_IDS)


async def test_a_teacher_that_does_not_come_back_from_over_the_budget_says_why(
    route: Any, fake: Any, make_rollout: MakeRollout
) -> None:
    router = route(budget=FailureBudgetConfig(ratio=0.5, window=4), away_limit_s=0)
    fake.script.extend([404] * 3)
    for i in range(3):
        await router.score(make_rollout(i, group_id=i))
    with pytest.raises(TeacherAway, match=r"50% of the last 4 rollouts failed.*HTTP 404"):
        await router.ready()


# --- parking


async def test_a_rollout_waits_on_disk_while_its_teacher_is_away(
    route: Any, fake: Any, make_rollout: MakeRollout, tmp_path: Path
) -> None:
    lot = ParkingLot(tmp_path)
    waits: list[int] = []

    async def come_back(_: float) -> None:
        waits.append(len(list(tmp_path.iterdir())))
        fake.down.clear()

    router = route(parking=lot, sleep=come_back)
    fake.down.add("one")
    scored = await router.score(make_rollout())
    assert scored.teacher_logprobs is not None
    assert waits == [1]
    assert list(tmp_path.iterdir()) == []


async def test_a_rollout_whose_teacher_stays_away_is_kept_on_disk(
    route: Any, fake: Any, make_rollout: MakeRollout, tmp_path: Path
) -> None:
    router = route(parking=ParkingLot(tmp_path), away_limit_s=0)
    fake.down.add("one")
    rollout = make_rollout()
    with pytest.raises(TeacherAway):
        await router.score(rollout)
    assert ParkingLot(tmp_path).load() == [rollout]


async def test_a_rollout_that_fails_for_good_leaves_its_place(
    route: Any, fake: Any, make_rollout: MakeRollout, tmp_path: Path
) -> None:
    router = route(parking=ParkingLot(tmp_path), sleep=lambda _: asyncio.sleep(0))
    fake.script.extend([httpx.ConnectError("refused"), 200, 404])
    assert (await router.score(make_rollout())).cause == "http_404"
    assert list(tmp_path.iterdir()) == []


# --- store


async def test_a_known_score_is_not_asked_for(
    route: Any, fake: Any, make_rollout: MakeRollout, tmp_path: Path
) -> None:
    with ScoreStore(tmp_path, "model") as store:
        first = route(stores={"big": store})
        scored = await first.score(make_rollout())
        await first.verified([], train_step=1)
        before = len(fake.requests)
        again = await route(stores={"big": store}).score(make_rollout())
    assert again.teacher_logprobs == scored.teacher_logprobs
    assert len(fake.requests) == before


async def test_scores_are_not_kept_before_every_replica_has_proven_itself(
    route: Any, fake: Any, make_rollout: MakeRollout, tmp_path: Path
) -> None:
    with ScoreStore(tmp_path, "model") as store:
        router = route(stores={"big": store})
        await router.score(make_rollout())
        fake.script.append(503)
        await router.verified([], train_step=1)
        with ScoreStore(tmp_path, "model") as other:
            assert other.get((3, 4, 5, 6, 7), 2) is None
        await router.verified([], train_step=2)
        with ScoreStore(tmp_path, "model") as other:
            assert other.get((3, 4, 5, 6, 7), 2) is not None


async def test_scores_of_a_teacher_that_has_changed_are_not_kept(
    route: Any, fake: Any, make_rollout: MakeRollout, honest_answer: Any, tmp_path: Path
) -> None:
    with ScoreStore(tmp_path, "model") as store:
        router = route(stores={"big": store})
        fake.script.extend([lambda body: drifted(body, honest_answer)] * 2)
        await router.score(make_rollout())
        await router.verified([], train_step=1)
        assert store.get((3, 4, 5, 6, 7), 2) is None


# --- state


async def test_the_state_tells_what_is_in_flight_and_who_is_away(
    route: Any, fake: Any, make_rollout: MakeRollout
) -> None:
    told: list[dict[str, ScoringState]] = []
    router = route(publish=told.append, away_limit_s=0)

    async def look(_: object) -> int:
        router.tell()
        return 200

    fake.script.append(look)
    await router.score(make_rollout())
    router.tell()
    (during,), (after,) = (states["big"].replicas for states in told)
    assert (during.in_flight, after.in_flight) == (1, 0)
    assert after.progress_at >= during.progress_at > 0
    fake.down.add("one")
    with pytest.raises(TeacherAway):
        await router.score(make_rollout())
    router.tell()
    assert "connection refused" in told[-1]["big"].replicas[0].away


# --- hedging


async def test_a_late_answer_is_asked_of_a_second_replica(
    connect: Any, fake: Any, true_logprobs: Any
) -> None:
    two = [{"endpoint": "http://a"}, {"endpoint": "http://b"}]
    client = connect(replicas=two, hedge=True, sleep=never)
    for _ in range(64):
        await client.score([3, 4, 5], [6, 7], group_id=0)

    async def hang(_: object) -> None:
        await asyncio.Event().wait()

    fake.script.append(hang)
    score = await client.score([3, 4, 5], [6, 7], group_id=0)
    assert fake.hosts[-2:] == ["a", "b"]
    assert score.teacher_logprobs == true_logprobs([3, 4, 5, 6, 7], 2)
    assert client.limit.in_flight == 0


async def test_a_replica_that_is_always_late_is_away_in_the_end(connect: Any, fake: Any) -> None:
    two = [{"endpoint": "http://a"}, {"endpoint": "http://b"}]
    client = connect(replicas=two, hedge=True, sleep=never)
    for _ in range(64):
        await client.score([3, 4, 5], [6, 7], group_id=1)

    async def hang() -> None:
        if fake.hosts[-1] == "a":
            await asyncio.Event().wait()

    fake.work = hang
    for _ in range(5):
        await client.score([3, 4, 5], [6, 7], group_id=0)
    assert "another had one" in client.replicas.all[0].away


async def test_without_hedging_a_late_answer_is_waited_for(connect: Any, fake: Any) -> None:
    two = [{"endpoint": "http://a"}, {"endpoint": "http://b"}]
    client = connect(replicas=two, sleep=never)
    for _ in range(64):
        await client.score([3, 4, 5], [6, 7], group_id=0)

    async def late(_: object) -> int:
        await asyncio.sleep(0.05)
        return 200

    fake.script.append(late)
    await client.score([3, 4, 5], [6, 7], group_id=0)
    assert set(fake.hosts) == {"a"}
