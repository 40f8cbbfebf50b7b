"""Which teacher scores which data_source, and what becomes of a rollout that gets no scores."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from opd_core.config import OPDConfig
from opd_core.errors import TeacherAway
from opd_core.rollout import RolloutState, Status
from opd_core.scoring.facts import TeacherFacts
from opd_core.scoring.routing import TeacherRouter

MakeRollout = Callable[..., RolloutState]


@pytest.fixture
def make_router(connect: Any, teacher_config: Any) -> Callable[..., TeacherRouter]:
    """``make_router(map, default=…, **teacher fields)`` with teachers maths and prose."""

    def make(sources: dict[str, str], default: str | None = None, **fields: Any) -> TeacherRouter:
        names = ("maths", "prose")
        places = {name: fields | {"name": name, "endpoint": f"http://{name}"} for name in names}
        opd = OPDConfig(
            teachers=[teacher_config(**place) for place in places.values()],
            data_source_teacher_map=sources,
            default_teacher=default,
        )
        return TeacherRouter(opd, {name: connect(**place) for name, place in places.items()})

    return make


BOTH = {"sums": "maths", "essays": "prose"}


async def test_the_data_source_selects_the_teacher(
    make_router: Any, fake: Any, make_rollout: MakeRollout, make_prompt: Any, true_logprobs: Any
) -> None:
    router = make_router(BOTH)
    sums = await router.score(make_rollout(prompt=make_prompt(data_source="sums")))
    await router.score(make_rollout(prompt=make_prompt(data_source="essays")))
    assert fake.hosts == ["maths", "prose"]
    assert sums.status is Status.COMPLETED
    assert sums.teacher_logprobs == true_logprobs([3, 4, 5, 6, 7], 2)
    assert sums.teacher_attempts == 1
    assert sums.teacher_latency_s > 0


async def test_a_scored_rollout_keeps_everything_else(
    make_router: Any, make_rollout: MakeRollout
) -> None:
    before = make_rollout(text="six", reward=0.5, policy_versions=(3, 3))
    after = await make_router(BOTH).score(before)
    assert after.response_ids == before.response_ids
    assert after.rollout_logprobs == before.rollout_logprobs
    assert (after.text, after.reward, after.policy_versions) == ("six", 0.5, (3, 3))


async def test_the_default_teacher_takes_what_the_map_does_not_name(
    make_router: Any, fake: Any, make_rollout: MakeRollout, make_prompt: Any
) -> None:
    router = make_router({"sums": "maths"}, default="prose")
    await router.score(make_rollout(prompt=make_prompt(data_source="letters")))
    assert fake.hosts == ["prose"]


async def test_an_unknown_data_source_fails_the_rollout_and_asks_nobody(
    make_router: Any, fake: Any, make_rollout: MakeRollout, make_prompt: Any
) -> None:
    rollout = make_rollout(prompt=make_prompt(data_source="letters"))
    failed = await make_router(BOTH).score(rollout)
    assert failed.status is Status.FAILED
    assert failed.cause == "no_teacher"
    assert "'letters'" in failed.error_msg
    assert fake.requests == []


@pytest.mark.parametrize(
    ("failure", "cause"),
    [(503, "http_503"), (404, "http_404"), (httpx.ReadError(""), "poison")],
)
async def test_a_rollout_that_cannot_be_scored_fails_with_the_reason(
    failure: Any, cause: str, make_router: Any, fake: Any, make_rollout: MakeRollout
) -> None:
    fake.script.extend([failure] * 3)
    failed = await make_router(BOTH).score(make_rollout(reward=1.0))
    assert failed.status is Status.FAILED
    assert failed.cause == cause
    assert "teacher 'maths'" in failed.error_msg
    assert failed.teacher_logprobs is None
    assert failed.response_ids == (6, 7)


async def test_an_id_that_the_teacher_does_not_know_fails_that_rollout_only(
    make_router: Any, fake: Any, make_rollout: MakeRollout
) -> None:
    router = make_router(BOTH)
    bad = await router.score(make_rollout(response_ids=(6, 100)))
    good = await router.score(make_rollout())
    assert (bad.status, bad.cause) == (Status.FAILED, "bad_id")
    assert good.status is Status.COMPLETED
    assert len(fake.requests) == 1


async def test_a_teacher_that_is_away_blames_no_rollout(
    make_router: Any, fake: Any, make_rollout: MakeRollout
) -> None:
    fake.down.add("maths")
    with pytest.raises(TeacherAway, match="teacher 'maths'"):
        await make_router(BOTH, away_limit_s=0).score(make_rollout())


async def test_scores_that_have_arrived_are_not_asked_for_again(
    make_router: Any, fake: Any, make_rollout: MakeRollout
) -> None:
    router = make_router(BOTH)
    once = await router.score(make_rollout())
    assert await router.score(once) == once
    assert len(fake.requests) == 1


async def test_an_empty_response_is_scored_without_a_request(
    make_router: Any, fake: Any, make_rollout: MakeRollout
) -> None:
    scored = await make_router(BOTH).score(make_rollout(response_ids=(), rollout_logprobs=()))
    assert scored.status is Status.COMPLETED
    assert scored.teacher_logprobs == ()
    assert fake.requests == []


async def test_a_groups_rollouts_meet_on_one_replica(
    connect: Any, teacher_config: Any, fake: Any, make_rollout: MakeRollout
) -> None:
    two = {"replicas": [{"endpoint": "http://a"}, {"endpoint": "http://b"}]}
    opd = OPDConfig(teachers=[teacher_config(**two)], default_teacher="big")
    router = TeacherRouter(opd, {"big": connect(**two)})
    rollouts = [make_rollout(i, group_id=g) for g in (0, 1) for i in range(3)]
    await asyncio.gather(*map(router.score, rollouts))
    assert sorted(fake.hosts) == [*"aaabbb"]


async def test_connect_gives_each_teacher_its_own_facts_and_key(
    loopback: Any, teacher_config: Any, make_rollout: MakeRollout, make_prompt: Any
) -> None:
    await loopback.listen()
    opd = OPDConfig(
        teachers=[
            teacher_config(name="maths", endpoint=loopback.endpoint),
            teacher_config(name="prose", endpoint=loopback.endpoint),
        ],
        data_source_teacher_map=BOTH,
    )
    facts = {"maths": TeacherFacts(100), "prose": TeacherFacts(5)}
    async with TeacherRouter.connect(opd, facts, {"maths": "sk"}) as router:
        scored = await router.score(make_rollout())
        refused = await router.score(make_rollout(prompt=make_prompt(data_source="essays")))
    assert scored.teacher_logprobs is not None
    assert all(map(math.isfinite, scored.teacher_logprobs))
    assert refused.cause == "bad_id"
