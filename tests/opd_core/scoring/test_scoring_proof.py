"""The round trip that decides whether an endpoint is ready."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from opd_core.errors import ServingError
from opd_core.scoring.proof import is_uniform, prove_scoring

SEQUENCES = [[3, 4, 5, 6, 7, 8], [9, 8, 7]]
LONG = [[*range(3, 27)]]
TWO = [{"endpoint": "http://a"}, {"endpoint": "http://b"}]
ONE_REPLICA = 4 + 3 + 2 + 4 + 8
"""Two sequences: whole twice each, from the middle each, from the end where that is not the middle
(once), then in batches of 2, 4 and 8."""


class Liar:
    """Plays ``shift(request, in_flight, number)`` nats onto every logprob of a fake's answers."""

    def __init__(self, fake: Any, honest_answer: Any, shift: Callable[..., float]) -> None:
        self._fake, self._honest, self._shift = fake, honest_answer, shift
        self._number = 0
        fake.script.extend([self._answer] * 200)

    async def _answer(self, body: dict[str, Any]) -> httpx.Response:
        self._number += 1
        number = self._number
        await asyncio.sleep(0)  # let the company arrive
        answer = self._honest("sglang", body["input_ids"], body["logprob_start_len"])
        for row in answer["meta_info"]["input_token_logprobs"][1:]:
            row[0] += self._shift(body, self._fake.in_flight, number)
        return httpx.Response(200, content=json.dumps(answer))


@pytest.fixture
def lie(fake: Any, honest_answer: Any) -> Callable[[Callable[..., float]], Liar]:
    """``lie(shift)``: the fake's answers are shifted from now on."""
    return lambda shift: Liar(fake, honest_answer, shift)


@pytest.mark.parametrize("backend", ["sglang", "lmdeploy", "embedded"])
async def test_an_honest_server_passes(
    backend: str, connect: Any, fake: Any, true_logprobs: Any
) -> None:
    fake.backend = backend
    proof = await prove_scoring(connect(backend=backend), SEQUENCES, "float32")
    everything = [x for ids in SEQUENCES for x in true_logprobs(ids, 0)]
    assert proof.tokens == len(everything) == 7
    assert proof.mean_logprob == pytest.approx(sum(everything) / 7)
    assert (proof.spread, proof.tolerance) == (0, 1e-3)
    assert proof.latency_s > 0


async def test_each_sequence_is_scored_twice_from_later_starts_and_in_company(
    connect: Any, fake: Any
) -> None:
    await prove_scoring(connect(), SEQUENCES, "float32")
    assert [body["logprob_start_len"] for body in fake.bodies[:7]] == [0, 0, 3, 4, 0, 0, 1]
    assert [len(body["input_ids"]) for body in fake.bodies[7:13]] == [6, 3, 3, 6, 3, 6]
    assert len(fake.bodies) == ONE_REPLICA
    assert fake.most_in_flight == 8


async def test_the_first_scores_of_each_replica_are_kept_as_canaries(
    connect: Any, true_logprobs: Any
) -> None:
    proof = await prove_scoring(connect(replicas=TWO), SEQUENCES, "float32")
    assert [list(canary.token_ids) for canary in proof.canaries] == SEQUENCES
    for canary in proof.canaries:
        assert canary.logprobs == (true_logprobs(canary.token_ids, 0),) * 2


@pytest.mark.parametrize(
    ("shift", "told"),
    [
        (
            lambda body, in_flight, number: -0.01 * body["logprob_start_len"],
            "scored from 0 and from 4",
        ),
        (lambda body, in_flight, number: -0.04 * (number == 2), "scored twice"),
        (lambda body, in_flight, number: -0.04 * (in_flight > 1), "scored alone and among 2"),
        (lambda body, in_flight, number: -0.04 * (in_flight > 4), "scored alone and among 8"),
    ],
)
async def test_scores_that_depend_on_how_they_are_asked_for_are_refused(
    shift: Callable[..., float], told: str, connect: Any, lie: Any
) -> None:
    lie(shift)
    with pytest.raises(
        ServingError, match=rf"'big', replica 0: sequence \d {told} differs by 0\.04 nats"
    ):
        await prove_scoring(connect(), SEQUENCES, "float32")


async def test_noise_that_half_precision_explains_widens_the_tolerance(
    connect: Any, lie: Any
) -> None:
    lie(lambda body, in_flight, number: -0.01 * body["logprob_start_len"])
    proof = await prove_scoring(connect(), SEQUENCES, "bfloat16")
    assert proof.spread == pytest.approx(0.04)
    assert proof.tolerance == pytest.approx(0.12)


async def test_noise_in_single_precision_does_not_widen_the_tolerance(
    connect: Any, lie: Any
) -> None:
    lie(lambda body, in_flight, number: -0.0009 * (in_flight > 1))
    proof = await prove_scoring(connect(), SEQUENCES, "float32")
    assert (proof.spread, proof.tolerance) == (pytest.approx(0.0009), 1e-3)


async def test_batches_of_half_precision_may_differ_by_more_than_other_scorings(
    connect: Any, lie: Any
) -> None:
    lie(lambda body, in_flight, number: -0.15 * (in_flight > 1))
    proof = await prove_scoring(connect(), SEQUENCES, "bfloat16")
    assert (proof.spread, proof.tolerance) == (pytest.approx(0.15), pytest.approx(0.45))


async def test_a_quiet_server_in_half_precision_has_the_smallest_tolerance(connect: Any) -> None:
    assert (await prove_scoring(connect(), SEQUENCES, "float16")).tolerance == 1e-3


@pytest.mark.parametrize("value", [0.0, -0.5, -4.7])
async def test_a_server_that_gives_all_tokens_the_same_logprob_is_refused(
    value: float, connect: Any, fake: Any, honest_answer: Any
) -> None:
    def uniform(body: dict[str, Any]) -> httpx.Response:
        answer = honest_answer("sglang", body["input_ids"], body["logprob_start_len"])
        for row in answer["meta_info"]["input_token_logprobs"][1:]:
            row[0] = value
        return httpx.Response(200, json=answer)

    fake.script.extend([uniform] * 100)
    with pytest.raises(ServingError, match="lost its weights"):
        await prove_scoring(connect(), LONG, "float32")


def test_few_tokens_or_one_token_repeated_may_score_alike() -> None:
    assert is_uniform(range(8), [-1.0] * 8)
    assert not is_uniform(range(7), [-1.0] * 7)
    assert not is_uniform([5] * 20, [-1.0] * 20)
    assert not is_uniform(range(8), [-1.0] * 7 + [-1.001])


@pytest.mark.parametrize("failure", [400, 503, httpx.ReadError("")])
async def test_a_server_that_answers_but_does_not_score_is_refused(
    failure: Any, connect: Any, fake: Any
) -> None:
    fake.script.extend([failure] * 3)
    with pytest.raises(ServingError, match="replica 0 does not score sequence 0: teacher 'big'"):
        await prove_scoring(connect(), SEQUENCES, "float32")


async def test_a_server_that_is_away_is_refused(connect: Any, fake: Any) -> None:
    fake.down.add("one")
    with pytest.raises(ServingError, match="does not score"):
        await prove_scoring(connect(away_limit_s=0), SEQUENCES, "float32")


async def test_replicas_are_proven_at_the_same_time(connect: Any, fake: Any) -> None:
    both_asked = asyncio.Barrier(2)

    async def meet() -> None:
        if len(fake.requests) <= 2:
            async with asyncio.timeout(10):
                await both_asked.wait()

    fake.work = meet
    proof = await prove_scoring(connect(replicas=TWO), SEQUENCES, "float32")
    assert sorted(fake.hosts) == [*"a" * ONE_REPLICA, *"b" * ONE_REPLICA]
    assert proof.tokens == 14


@pytest.mark.parametrize("fault", ["down", "broken"])
async def test_a_bad_replica_is_not_hidden_by_a_good_one(
    fault: str, connect: Any, fake: Any
) -> None:
    getattr(fake, fault).add("b")
    with pytest.raises(ServingError, match="replica 1 does not score sequence 0"):
        await prove_scoring(connect(replicas=TWO, away_limit_s=0), SEQUENCES, "float32")


async def test_replicas_that_serve_different_models_are_refused(
    connect: Any, fake: Any, honest_answer: Any
) -> None:
    class OtherModel(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.host == "a":
                return await fake.handle_async_request(request)  # type: ignore[no-any-return]
            body = json.loads(request.content)
            answer = honest_answer("sglang", body["input_ids"], body["logprob_start_len"])
            for row in answer["meta_info"]["input_token_logprobs"][1:]:
                row[0] -= 0.75
            return httpx.Response(200, json=answer)

    client = connect(replicas=TWO, transport=OtherModel())
    with pytest.raises(ServingError, match=r"replica 1: sequence 0 differs by 0\.75 nats from rep"):
        await prove_scoring(client, SEQUENCES, "bfloat16")


async def test_nothing_is_not_a_proof(connect: Any) -> None:
    with pytest.raises(ValueError, match="at least one sequence"):
        await prove_scoring(connect(), [], "float32")


async def test_a_sequence_too_short_to_compare_is_refused(connect: Any) -> None:
    with pytest.raises(ServingError, match="nothing to score"):
        await prove_scoring(connect(), [[3, 4]], "float32")
