"""One teacher's client: what it sends, what it never sends, and how much at a time."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd_core.config import OPDTeacherConfig
from opd_core.errors import ConfigError, ScoringError, TeacherAnswerError, TeacherRefused
from opd_core.scoring.client import TeacherLogprobClient
from opd_core.scoring.facts import TeacherFacts

TrueLogprobs = Callable[[Sequence[int], int], tuple[float, ...]]
PROMPT, RESPONSE = [3, 4, 5], [6, 7, 8, 9]


# ----------------------------------------------------------------------------------- one round trip


@pytest.mark.parametrize("backend", ["sglang", "lmdeploy", "embedded"])
async def test_scoring_starts_at_the_last_prompt_token_and_covers_the_response(
    backend: str, connect: Any, fake: Any, true_logprobs: TrueLogprobs
) -> None:
    fake.backend = backend
    score = await connect(backend=backend).score(PROMPT, RESPONSE)
    assert score.teacher_logprobs == true_logprobs([*PROMPT, *RESPONSE], 2)
    assert score.attempts == 1
    (request,), (body,) = fake.requests, fake.bodies
    assert str(request.url) == "http://one/generate"
    assert body["input_ids"] == [3, 4, 5, 6, 7, 8, 9]
    assert body["logprob_start_len"] == len(PROMPT) - 1


async def test_one_prompt_token_and_one_response_token_are_enough(
    connect: Any, true_logprobs: TrueLogprobs
) -> None:
    score = await connect().score((3,), (6,))
    assert score.teacher_logprobs == true_logprobs([3, 6], 0)


async def test_an_empty_response_needs_no_request(connect: Any, fake: Any) -> None:
    score = await connect().score(PROMPT, [])
    assert score.teacher_logprobs == ()
    assert score.attempts == 0
    assert fake.requests == []


async def test_scores_of_many_requests_are_not_mixed_up(
    connect: Any, fake: Any, true_logprobs: TrueLogprobs
) -> None:
    async def uneven() -> None:  # later requests are answered first
        for _ in range(60 - len(fake.requests)):
            await asyncio.sleep(0)

    fake.work = uneven
    client = connect()
    scores = await asyncio.gather(*(client.score(PROMPT, [i, i + 1]) for i in range(50)))
    expected = [true_logprobs([*PROMPT, i, i + 1], 2) for i in range(50)]
    assert [score.teacher_logprobs for score in scores] == expected


# ------------------------------------------------------------------------------- what is never sent


@pytest.mark.parametrize("bad", [-1, 100, 151_936, 2**70])
@pytest.mark.parametrize("place", ["prompt", "response"])
async def test_an_id_outside_the_vocabulary_is_never_sent(
    bad: int, place: str, connect: Any, fake: Any
) -> None:
    prompt, response = ([bad, *PROMPT], RESPONSE) if place == "prompt" else (PROMPT, [bad])
    with pytest.raises(TeacherRefused, match=f"id {bad} is outside .* vocabulary of 100") as caught:
        await connect().score(prompt, response)
    assert caught.value.cause == "bad_id"
    assert fake.requests == []


@pytest.mark.parametrize(("backend", "margin"), [("sglang", 7), ("embedded", 7), ("lmdeploy", 1)])
async def test_a_sequence_over_the_servers_limit_is_never_sent(
    backend: str, margin: int, connect: Any, fake: Any
) -> None:
    fake.backend = backend
    client = connect(backend=backend, context_length=20)
    await client.score(PROMPT, [6] * (20 - margin - 3))
    with pytest.raises(
        TeacherRefused, match=f"over the teacher's limit of {20 - margin}"
    ) as caught:
        await client.score(PROMPT, [6] * (20 - margin - 2))
    assert caught.value.cause == "too_long"
    assert len(fake.requests) == 1


async def test_the_strictest_replica_sets_the_limit(connect: Any, fake: Any) -> None:
    replicas = [
        {"endpoint": "http://one", "backend": "lmdeploy"},
        {"endpoint": "http://two", "backend": "sglang"},
    ]
    with pytest.raises(TeacherRefused, match="limit of 13"):
        await connect(replicas=replicas, context_length=20).score(PROMPT, [6] * 12)
    assert fake.requests == []


async def test_an_unknown_context_length_limits_nothing(connect: Any) -> None:
    assert len((await connect(context_length=0).score(PROMPT, [6] * 5000)).teacher_logprobs) == 5000


async def test_a_response_without_a_prompt_is_never_sent(connect: Any, fake: Any) -> None:
    with pytest.raises(TeacherRefused) as caught:
        await connect().score([], RESPONSE)
    assert caught.value.cause == "start"
    assert fake.requests == []


@pytest.mark.parametrize("start", [-1, 6, 7, 100])
async def test_a_start_that_leaves_nothing_to_score_is_never_sent(
    start: int, connect: Any, fake: Any
) -> None:
    with pytest.raises(TeacherRefused, match="nothing to score"):
        await connect().score_from([*PROMPT, *RESPONSE], start)
    assert fake.requests == []


# ---------------------------------------------------------------------------------- key and proxies


async def test_the_key_travels_in_the_header_only(connect: Any, fake: Any) -> None:
    client = connect(api_key="sk-very-secret")
    await client.score(PROMPT, RESPONSE)
    (request,) = fake.requests
    assert request.headers["authorization"] == "Bearer sk-very-secret"
    assert "secret" not in str(request.url)
    assert b"secret" not in request.content
    fake.script.extend([401])
    with pytest.raises(TeacherRefused) as caught:
        await client.score(PROMPT, RESPONSE)
    assert "secret" not in str(caught.value)


async def test_without_a_key_there_is_no_such_header(connect: Any, fake: Any) -> None:
    await connect().score(PROMPT, RESPONSE)
    assert "authorization" not in fake.requests[0].headers


@pytest.mark.parametrize("key", ["sk-secret\n", "sk-secret\r\nx: y", "sk-sécret", "sk-\0secret"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(
    key: str, teacher_config: Any
) -> None:
    with pytest.raises(ConfigError, match="teacher 'big': its api_key holds") as caught:
        TeacherLogprobClient(teacher_config(), TeacherFacts(100), api_key=key)
    assert "sk-" not in str(caught.value)


async def test_proxies_of_the_environment_are_ignored(
    connect: Any, loopback: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    await loopback.listen()
    client = connect(endpoint=loopback.endpoint, transport=None, away_limit_s=0)
    assert len((await client.score(PROMPT, RESPONSE)).teacher_logprobs) == 4


# --------------------------------------------------------------------------------- how much at once


async def test_no_more_requests_are_in_flight_than_the_limit(connect: Any, fake: Any) -> None:
    async def some_work() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    fake.work = some_work
    client = connect(max_concurrency=4)
    await asyncio.gather(*(client.score(PROMPT, [i]) for i in range(40)))
    assert len(fake.requests) == 40
    assert fake.most_in_flight == 4


async def test_200_requests_share_128_connections(
    connect: Any, loopback: Any, true_logprobs: TrueLogprobs
) -> None:
    busy, all_busy = 0, asyncio.Event()

    async def until_128_are_busy() -> None:
        nonlocal busy
        busy += 1
        if busy == 128:
            all_busy.set()
        await all_busy.wait()

    loopback.work = until_128_are_busy
    await loopback.listen()
    client = connect(endpoint=loopback.endpoint, transport=None, max_concurrency=128)
    async with asyncio.timeout(40):
        scores = await asyncio.gather(*(client.score(PROMPT, [i % 100]) for i in range(200)))
    assert [s.teacher_logprobs for s in scores] == [
        true_logprobs([*PROMPT, i % 100], 2) for i in range(200)
    ]
    assert {s.attempts for s in scores} == {1}


async def test_the_time_limit_is_for_the_attempt_not_for_the_wait_for_a_slot(
    connect: Any, fake: Any
) -> None:
    fake.work = lambda: asyncio.sleep(0.1)
    client = connect(max_concurrency=1, request_timeout_s=0.6, max_retry_per_sample=0)
    scores = await asyncio.gather(*(client.score(PROMPT, [i]) for i in range(9)))
    assert max(s.queue_s for s in scores) > 0.6
    assert all(s.latency_s < 0.6 for s in scores)


async def test_a_failed_request_gives_its_slot_back(connect: Any, fake: Any) -> None:
    fake.script.extend([400, 400, 400])
    client = connect(max_concurrency=1)
    for _ in range(3):
        with pytest.raises(TeacherRefused):
            await client.score(PROMPT, RESPONSE)
    async with asyncio.timeout(10):
        await client.score(PROMPT, RESPONSE)


async def test_a_cancelled_request_gives_its_slot_back(connect: Any, fake: Any) -> None:
    arrived = asyncio.Event()

    async def hang() -> None:
        arrived.set()
        await asyncio.Event().wait()

    fake.work = hang
    client = connect(max_concurrency=1)
    task = asyncio.create_task(client.score(PROMPT, RESPONSE))
    await arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    fake.work = lambda: asyncio.sleep(0)
    async with asyncio.timeout(10):
        await client.score(PROMPT, RESPONSE)


# --------------------------------------------------------------------------------------------- fuzz


@settings(max_examples=60, deadline=None)
@given(
    status=st.sampled_from([200, 200, 201, 204, 302, 400, 429, 503]), body=st.binary(max_size=80)
)
async def test_no_answer_of_any_kind_raises_anything_but_a_scoring_error(
    status: int, body: bytes
) -> None:
    async def no_sleep(_: float) -> None: ...

    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=body))
    teacher = OPDTeacherConfig(name="big", endpoint="http://one")
    client = TeacherLogprobClient(teacher, TeacherFacts(100), transport=transport, sleep=no_sleep)
    async with client:
        with pytest.raises(ScoringError, match="teacher 'big'"):
            await client.score(PROMPT, RESPONSE)


async def test_a_uniform_answer_does_not_become_scores(
    connect: Any, fake: Any, honest_answer: Any
) -> None:
    def lost_weights(body: dict[str, Any]) -> httpx.Response:
        answer = honest_answer("sglang", body["input_ids"], body["logprob_start_len"])
        for row in answer["meta_info"]["input_token_logprobs"][1:]:
            row[0] = -math.log(100)
        return httpx.Response(200, content=json.dumps(answer))

    fake.script.append(lost_weights)
    with pytest.raises(TeacherAnswerError, match="lost its weights"):
        await connect().score(PROMPT, RESPONSE)
