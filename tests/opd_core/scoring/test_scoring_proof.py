"""The round trip that decides whether an endpoint is ready."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from opd_core.errors import ServingError
from opd_core.scoring.proof import prove_scoring

SEQUENCES = [[3, 4, 5, 6, 7, 8], [9, 8, 7]]
TWO = [{"endpoint": "http://a"}, {"endpoint": "http://b"}]


@pytest.mark.parametrize("backend", ["sglang", "lmdeploy", "embedded"])
async def test_an_honest_server_passes(
    backend: str, connect: Any, fake: Any, true_logprobs: Any
) -> None:
    fake.backend = backend
    proof = await prove_scoring(connect(backend=backend), SEQUENCES, 1e-3)
    everything = [x for ids in SEQUENCES for x in true_logprobs(ids, 0)]
    assert proof.tokens == len(everything) == 7
    assert proof.mean_logprob == pytest.approx(sum(everything) / 7)
    assert proof.largest_difference == 0
    assert proof.latency_s > 0
    assert [body["logprob_start_len"] for body in fake.bodies] == [0, 3, 0, 1]


async def test_scores_that_depend_on_where_they_start_are_refused(
    connect: Any, fake: Any, honest_answer: Any
) -> None:
    def forgets_the_prefix(body: dict[str, Any]) -> httpx.Response:
        start = body["logprob_start_len"]
        answer = honest_answer("sglang", body["input_ids"], start)
        for row in answer["meta_info"]["input_token_logprobs"][1:]:
            row[0] -= 0.01 * start
        return httpx.Response(200, content=json.dumps(answer))

    fake.script.extend([forgets_the_prefix] * 4)
    with pytest.raises(ServingError, match=r"from 0 and from 3 differs by 0\.03 nats"):
        await prove_scoring(connect(), SEQUENCES, 0.02)
    fake.script.clear()
    fake.script.extend([forgets_the_prefix] * 4)
    proof = await prove_scoring(connect(), SEQUENCES, 0.04)
    assert proof.largest_difference == pytest.approx(0.03)


@pytest.mark.parametrize("failure", [400, 503, httpx.ReadError("")])
async def test_a_server_that_answers_but_does_not_score_is_refused(
    failure: Any, connect: Any, fake: Any
) -> None:
    fake.script.extend([failure] * 3)
    with pytest.raises(ServingError, match="does not score: teacher 'big'"):
        await prove_scoring(connect(), SEQUENCES, 1e-3)


async def test_a_server_that_is_away_is_refused(connect: Any, fake: Any) -> None:
    fake.down.add("one")
    with pytest.raises(ServingError, match="does not score"):
        await prove_scoring(connect(away_limit_s=0), SEQUENCES, 1e-3)


async def test_every_replica_is_proven(connect: Any, fake: Any) -> None:
    proof = await prove_scoring(connect(replicas=TWO), SEQUENCES, 1e-3)
    assert fake.hosts == [*"aabbaabb"]
    assert proof.tokens == 14


@pytest.mark.parametrize("fault", ["down", "broken"])
async def test_a_bad_replica_is_not_hidden_by_a_good_one(
    fault: str, connect: Any, fake: Any
) -> None:
    getattr(fake, fault).add("b")
    with pytest.raises(ServingError, match="replica 1 does not score"):
        await prove_scoring(connect(replicas=TWO, away_limit_s=0), SEQUENCES, 1e-3)


async def test_nothing_is_not_a_proof(connect: Any) -> None:
    with pytest.raises(ValueError, match="at least one sequence"):
        await prove_scoring(connect(), [], 1e-3)


async def test_a_sequence_too_short_to_compare_is_refused(connect: Any) -> None:
    with pytest.raises(ServingError, match="nothing to score"):
        await prove_scoring(connect(), [[3, 4]], 1e-3)
