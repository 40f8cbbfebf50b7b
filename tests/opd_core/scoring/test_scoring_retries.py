"""Which failures are worth another attempt, how many there are, and when it is over."""

from __future__ import annotations

import asyncio
import pickle
import time
from typing import Any

import httpx
import pytest

from opd_core.errors import (
    ScoringError,
    TeacherAnswerError,
    TeacherAway,
    TeacherRefused,
    TeacherTransient,
)
from opd_core.scoring.client import POISON

PROMPT, RESPONSE = [3, 4, 5], [6, 7, 8, 9]


# ---------------------------------------------------------------------------------- what is retried


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413])
async def test_a_refusal_is_not_retried(status: int, connect: Any, fake: Any, naps: Any) -> None:
    fake.script.append(status)
    with pytest.raises(TeacherRefused, match=f"teacher 'big': HTTP {status}") as caught:
        await connect().score(PROMPT, RESPONSE)
    assert caught.value.cause == f"http_{status}"
    assert len(fake.requests) == 1
    assert naps == []


async def test_an_answer_that_fails_a_check_is_not_retried(connect: Any, fake: Any) -> None:
    fake.backend = "lmdeploy"  # but asked as SGLang: one row less
    with pytest.raises(TeacherAnswerError, match="teacher 'big': expected 5 rows") as caught:
        await connect().score(PROMPT, RESPONSE)
    assert caught.value.cause == "row_count"
    assert len(fake.requests) == 1


TRANSIENT: dict[str, tuple[Any, str]] = {
    "429": (429, "http_429"),
    "500": (500, "http_500"),
    "503": (503, "http_503"),
    "read time-out": (httpx.ReadTimeout("slow"), "connection"),
    "cut while reading": (httpx.ReadError(""), "connection"),
    "cut while writing": (httpx.WriteError(""), "connection"),
    "closed without an answer": (httpx.RemoteProtocolError("disconnected"), "connection"),
    "garbled encoding": (httpx.DecodingError("incorrect header check"), "connection"),
    "abort in HTTP 200": (
        httpx.Response(200, json={"meta_info": {"finish_reason": {"type": "abort"}}}),
        "abort",
    ),
}


@pytest.mark.parametrize("name", TRANSIENT)
async def test_a_passing_failure_is_tried_again_and_scored(
    name: str, connect: Any, fake: Any, naps: Any
) -> None:
    fake.script.append(TRANSIENT[name][0])
    score = await connect().score(PROMPT, RESPONSE)
    assert len(score.teacher_logprobs) == 4
    assert score.attempts == 2
    assert len(naps) == 1


@pytest.mark.parametrize("name", TRANSIENT)
@pytest.mark.parametrize("max_retry", [0, 2])
async def test_attempts_are_bounded_and_the_last_reason_is_kept(
    name: str, max_retry: int, connect: Any, fake: Any
) -> None:
    failure, cause = TRANSIENT[name]
    fake.script.extend([failure] * 10)
    client = connect(max_retry_per_sample=max_retry)
    with pytest.raises(TeacherTransient, match="teacher 'big'") as caught:
        await client.score(PROMPT, RESPONSE)
    assert len(fake.requests) == 1 + max_retry
    last = max_retry == 2 and cause == "connection"  # it was alone with the server by then
    assert caught.value.cause == (POISON if last else cause)
    assert f"given up after {1 + max_retry} attempts" in str(caught.value)


async def test_a_request_that_broke_two_connections_goes_alone(connect: Any, fake: Any) -> None:
    ends_servers, in_flight = [9, 8, 7], []

    def answer(body: Any) -> Any:
        if body["input_ids"][-3:] == ends_servers:
            in_flight.append(fake.in_flight)
            return httpx.ReadError("reset by peer")
        return 200

    fake.script.extend([answer] * 100)
    fake.work = lambda: asyncio.sleep(0.001)
    client = connect(max_retry_per_sample=2)
    innocent = [client.score(PROMPT, RESPONSE) for _ in range(40)]
    results = await asyncio.gather(
        client.score(PROMPT, ends_servers), *innocent, return_exceptions=True
    )
    assert isinstance(results[0], TeacherTransient)
    assert results[0].cause == POISON
    assert not any(isinstance(result, Exception) for result in results[1:])
    assert in_flight[0] > 1
    assert in_flight[2] == 1


async def test_a_refusal_after_a_passing_failure_ends_it(connect: Any, fake: Any) -> None:
    fake.script.extend([503, 404])
    with pytest.raises(TeacherRefused):
        await connect(max_retry_per_sample=5).score(PROMPT, RESPONSE)
    assert len(fake.requests) == 2


async def test_a_real_connection_that_is_cut_in_mid_answer_is_tried_again(
    connect: Any, loopback: Any
) -> None:
    loopback.cut_next = 2
    await loopback.listen()
    client = connect(endpoint=loopback.endpoint, transport=None)
    score = await client.score(PROMPT, RESPONSE)
    assert score.attempts == 3
    assert len(score.teacher_logprobs) == 4


# -------------------------------------------------------------------------------- how long it waits


async def test_back_off_doubles_with_jitter_up_to_a_limit(
    connect: Any, fake: Any, naps: Any
) -> None:
    fake.script.extend([429] * 10)
    await connect(max_retry_per_sample=10).score(PROMPT, RESPONSE)
    middles = [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]
    for nap, middle in zip(naps, middles, strict=True):
        assert 0.5 * middle <= nap <= 1.5 * middle
    assert len({nap / middle for nap, middle in zip(naps, middles, strict=True)}) == 10


async def test_retry_after_is_honoured(connect: Any, fake: Any, naps: Any) -> None:
    busy = httpx.Response(429, headers={"retry-after": "7"})
    fake.script.extend([busy, busy])
    await connect().score(PROMPT, RESPONSE)
    assert naps == [7.0, 7.0]


async def test_a_retry_after_beyond_the_total_deadline_is_given_up_at_once(
    connect: Any, fake: Any, naps: Any
) -> None:
    fake.script.append(httpx.Response(503, headers={"retry-after": "3600"}))
    client = connect(request_timeout_s=10, max_retry_per_sample=2)
    with pytest.raises(TeacherTransient, match="given up after 1 attempts"):
        await client.score(PROMPT, RESPONSE)
    assert naps == []


async def test_an_attempt_is_bounded_from_send_to_last_byte(connect: Any, fake: Any) -> None:
    fake.work = lambda: asyncio.Event().wait()
    client = connect(request_timeout_s=0.05, max_retry_per_sample=2)
    started = time.monotonic()
    with pytest.raises(TeacherTransient, match=r"no whole answer within 0\.05 s") as caught:
        await client.score(PROMPT, RESPONSE)
    assert caught.value.cause == "timeout"
    assert len(fake.requests) == 3
    assert time.monotonic() - started >= 0.14


async def test_the_last_attempt_ends_with_the_total_deadline(connect: Any, fake: Any) -> None:
    hung_s = []

    async def hang(_: object) -> None:
        started = time.monotonic()
        try:
            await asyncio.Event().wait()
        finally:
            hung_s.append(time.monotonic() - started)

    # One retry: 2 x 0.6 s for the attempts and at most 0.75 s for the pause, 1.95 s in all.
    fake.script.extend([httpx.Response(503, headers={"retry-after": "1.9"}), hang])
    client = connect(request_timeout_s=0.6, max_retry_per_sample=1, sleep=asyncio.sleep)
    with pytest.raises(TeacherTransient):
        await client.score(PROMPT, RESPONSE)
    assert sum(hung_s) < 0.5


async def test_a_huge_number_of_retries_is_no_overflow(connect: Any) -> None:
    score = await connect(max_retry_per_sample=5000).score(PROMPT, RESPONSE)
    assert score.attempts == 1


# ------------------------------------------------------------------------------------- teacher away


@pytest.mark.parametrize("nobody", [httpx.ConnectError("refused"), httpx.ConnectTimeout("slow")])
async def test_a_refused_connection_costs_no_attempt(
    nobody: Exception, connect: Any, fake: Any
) -> None:
    fake.script.extend([nobody] * 20)
    score = await connect(max_retry_per_sample=0).score(PROMPT, RESPONSE)
    assert score.attempts == 1
    asked = [body["input_ids"] for body in fake.bodies]
    assert asked.count(PROMPT + RESPONSE) == 2
    assert len(asked) == 22  # the others are knocks: 19 refused, one answered


async def test_attempts_before_and_after_an_absence_are_counted_together(
    connect: Any, fake: Any
) -> None:
    refused = httpx.ConnectError("refused")
    knock_answered = 200
    fake.script.extend([503, refused, refused, knock_answered, 503, refused, knock_answered, 503])
    with pytest.raises(TeacherTransient, match="given up after 3 attempts"):
        await connect(max_retry_per_sample=2).score(PROMPT, RESPONSE)
    assert len(fake.requests) == 8


async def test_the_score_arrives_when_a_real_teacher_comes_back(
    connect: Any, loopback: Any
) -> None:
    waits = 0

    async def come_back_at_the_third_wait(_: float) -> None:
        nonlocal waits
        waits += 1
        if waits == 3:
            await loopback.listen()

    client = connect(
        endpoint=loopback.endpoint,
        transport=None,
        sleep=come_back_at_the_third_wait,
        max_retry_per_sample=0,
    )
    score = await client.score(PROMPT, RESPONSE)
    assert waits == 3
    assert score.attempts == 1
    assert len(score.teacher_logprobs) == 4


async def test_an_absence_does_not_count_as_time(connect: Any, fake: Any) -> None:
    fake.script.append(httpx.ConnectError("refused"))
    client = connect(
        request_timeout_s=0.5, max_retry_per_sample=0, sleep=lambda _: asyncio.sleep(0.6)
    )
    assert (await client.score(PROMPT, RESPONSE)).attempts == 1


async def test_a_teacher_that_stays_away_is_reported_after_the_limit(
    connect: Any, fake: Any
) -> None:
    fake.down.add("one")
    client = connect(away_limit_s=0.2, sleep=lambda _: asyncio.sleep(0.02))
    started = time.monotonic()
    with pytest.raises(
        TeacherAway, match=r"teacher 'big': nobody could be asked for 0 s.*cannot connect"
    ) as caught:
        await client.score(PROMPT, RESPONSE)
    assert time.monotonic() - started >= 0.2
    assert caught.value.cause == "away"
    assert len(fake.requests) > 1


async def test_an_answer_ends_the_absence(connect: Any, fake: Any) -> None:
    refused = httpx.ConnectError("refused")
    fake.script.extend([refused, 200, 503, refused, 200, 503, refused, 200])
    client = connect(away_limit_s=0.3, sleep=lambda _: asyncio.sleep(0.11))  # 0.33 s away in all
    assert (await client.score(PROMPT, RESPONSE)).attempts == 3


# ------------------------------------------------------------------------------------ errors travel


@pytest.mark.parametrize(
    "error",
    [
        TeacherRefused("teacher 'big': HTTP 404: no", "http_404"),
        TeacherAnswerError("teacher 'big': expected 5 rows", "row_count"),
        TeacherTransient("teacher 'big': HTTP 429", "http_429", 7.0),
        TeacherAway("teacher 'big': cannot connect", "away"),
        ScoringError("plain"),
    ],
)
def test_an_error_crosses_processes_with_all_it_says(error: ScoringError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


async def test_an_exhausted_error_crosses_processes(connect: Any, fake: Any) -> None:
    fake.script.extend([httpx.Response(429, headers={"retry-after": "2"})] * 3)
    with pytest.raises(TeacherTransient) as caught:
        await connect().score(PROMPT, RESPONSE)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert (copy.cause, copy.retry_after_s) == ("http_429", 2.0)
    assert "teacher 'big'" in str(copy)
    assert "3 attempts" in str(copy)
