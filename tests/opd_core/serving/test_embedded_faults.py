"""Over HTTP: full queues, failing forwards, vanishing clients, health under load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np

from opd_core.serving.embedded.app import create_app
from opd_core.serving.embedded.batching import BatchingScorer
from opd_core.serving.embedded.requests import ScoreRequest

Start = Callable[..., BatchingScorer]
WAIT_S = 10


def _body(input_ids: object, **fields: object) -> dict[str, object]:
    sampling = {"max_new_tokens": 0}
    return {"input_ids": input_ids, "return_logprob": True, "sampling_params": sampling} | fields


def _client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://teacher")


async def _until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until `condition` holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_full_queue_is_503_and_the_others_are_served(
    start_scorer: Start, gated_model: Any
) -> None:
    scorer = start_scorer(max_queued_requests=2)
    async with _client(create_app(scorer)) as client:
        running = asyncio.create_task(client.post("/generate", json=_body([1, 2])))
        await asyncio.to_thread(gated_model.running)
        waiting = asyncio.create_task(client.post("/generate", json=_body([[1, 2], [3]])))
        await _until(lambda: scorer.stats().waiting == 2)

        refused = await client.post("/generate", json=_body([1]))
        gated_model.gate.set()
        served = await asyncio.gather(running, waiting)

    assert refused.status_code == 503
    expected = {"object": "error", "message": "The request queue is full."}
    assert refused.json() == expected | {"type": "503", "code": 503}
    assert [answer.status_code for answer in served] == [200, 200]


async def test_failing_forward_is_500_with_the_reason_and_the_server_lives(
    start_scorer: Start, gated_model: Any
) -> None:
    gated_model.gate.set()
    async with _client(create_app(start_scorer())) as client:
        failed = await client.post("/generate", json=_body([gated_model.POISON]))
        fine = await client.post("/generate", json=_body([1, 2]))

    assert failed.status_code == 500
    assert "out of memory on this device" in failed.json()["message"]
    assert fine.status_code == 200


async def test_a_score_that_is_not_finite_is_500_for_its_sequence_only(
    start_scorer: Start, gated_model: Any
) -> None:
    scorer = start_scorer()
    async with _client(create_app(scorer)) as client:
        first = asyncio.create_task(client.post("/generate", json=_body([1])))
        await asyncio.to_thread(gated_model.running)
        bodies = [
            _body([gated_model.NAN, 1], logprob_start_len=0),
            _body([1, 1], logprob_start_len=0),
        ]
        posts = [asyncio.create_task(client.post("/generate", json=body)) for body in bodies]
        await _until(lambda: scorer.stats().waiting == 2)
        gated_model.gate.set()
        broken, fine = await asyncio.gather(*posts)
        await first

    assert gated_model.batches == [[1], [2, 2]]
    assert (broken.status_code, fine.status_code) == (500, 200)
    assert "not finite" in broken.json()["message"]


async def test_texts_without_a_tokenizer_are_refused(start_scorer: Start) -> None:
    async with _client(create_app(start_scorer())) as client:
        answer = await client.post("/generate", json=_body([1], return_text_in_logprobs=True))

    assert answer.status_code == 400
    assert "needs a tokenizer" in answer.json()["error"]["message"]


async def test_a_client_that_goes_away_takes_its_waiting_work_along(
    start_scorer: Start, gated_model: Any
) -> None:
    scorer = start_scorer()
    scorer.submit([ScoreRequest(np.ones(5, np.int64), start=0)])
    await asyncio.to_thread(gated_model.running)
    gone = asyncio.Event()
    body = json.dumps(_body([[1] * 20, [1] * 21])).encode()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, object]:
        for message in messages:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
    served = asyncio.ensure_future(create_app(scorer)(scope, receive, send))
    await _until(lambda: scorer.stats().waiting == 2)
    gone.set()
    await asyncio.wait_for(served, WAIT_S)
    (mate,) = scorer.submit([ScoreRequest(np.ones(22, np.int64), start=0)])
    gated_model.gate.set()

    await asyncio.wrap_future(mate)
    assert gated_model.batches == [[5], [22]]


async def test_loading_is_503_everywhere_and_health_has_no_body() -> None:
    app = create_app(BatchingScorer())
    async with _client(app) as client:
        health = await client.get("/health")
        info = await client.get("/model_info")
        score = await client.post("/generate", json=_body([1]))

    assert (health.status_code, health.content) == (503, b"")
    assert (info.status_code, score.status_code) == (503, 503)
    assert score.json()["message"] == "The model is loading."


async def test_many_health_checks_share_one_probe(start_scorer: Start, gated_model: Any) -> None:
    scorer = start_scorer()
    async with _client(create_app(scorer)) as client:
        checks = [asyncio.create_task(client.get("/health")) for _ in range(30)]
        await asyncio.to_thread(gated_model.running)
        checks += [asyncio.create_task(client.get("/health_generate")) for _ in range(30)]
        await asyncio.sleep(0)
        gated_model.gate.set()
        answers = await asyncio.gather(*checks)

    assert [answer.status_code for answer in answers] == [200] * 60
    assert gated_model.batches == [[2]]


async def test_a_probe_that_times_out_is_unhealthy_and_does_not_pile_up(
    start_scorer: Start, gated_model: Any
) -> None:
    scorer = start_scorer()
    async with _client(create_app(scorer, health_timeout_s=0.02)) as client:
        stuck = [(await client.get("/health")).status_code for _ in range(3)]
        gated_model.gate.set()
        await _until(lambda: scorer.stats().batches == 1)
        recovered = await client.get("/health")

    assert stuck == [503] * 3
    assert recovered.status_code == 200
    assert gated_model.batches == [[2]]


async def test_a_batch_that_finished_lately_is_life_enough(
    start_scorer: Start, gated_model: Any
) -> None:
    gated_model.gate.set()
    scorer = start_scorer()
    async with _client(create_app(scorer, health_recent_s=1e9)) as client:
        await client.post("/generate", json=_body([1, 2, 3]))
        answer = await client.get("/health")

    assert answer.status_code == 200
    assert gated_model.batches == [[3]]


async def test_an_old_batch_is_not_and_the_probe_passes_a_full_queue(
    start_scorer: Start, gated_model: Any
) -> None:
    scorer = start_scorer(max_queued_requests=1)
    app = create_app(scorer, health_timeout_s=WAIT_S, health_recent_s=0.0)
    async with _client(app) as client:
        running = asyncio.create_task(client.post("/generate", json=_body([1])))
        await asyncio.to_thread(gated_model.running)
        waiting = asyncio.create_task(client.post("/generate", json=_body([1] * 900)))
        await _until(lambda: scorer.stats().waiting == 1)
        health = asyncio.create_task(client.get("/health"))
        await _until(lambda: scorer.stats().waiting == 2)
        gated_model.gate.set()
        answers = await asyncio.gather(running, waiting, health)

    assert [answer.status_code for answer in answers] == [200] * 3
    assert gated_model.batches == [[1], [2], [900]]


async def test_a_failed_batch_is_no_sign_of_life(start_scorer: Start, gated_model: Any) -> None:
    gated_model.gate.set()
    scorer = start_scorer()
    async with _client(create_app(scorer, health_recent_s=1e9)) as client:
        await client.post("/generate", json=_body([1]))
        await client.post("/generate", json=_body([gated_model.POISON]))
        answer = await client.get("/health")

    assert answer.status_code == 200
    assert gated_model.batches == [[1], [1], [2]]


async def test_a_stopping_server_is_unhealthy_and_refuses_work(start_scorer: Start) -> None:
    scorer = start_scorer()
    scorer.close()
    async with _client(create_app(scorer)) as client:
        health = await client.get("/health")
        score = await client.post("/generate", json=_body([1]))

    assert (health.status_code, score.status_code) == (503, 503)
    assert score.json()["message"] == "The server is stopping."
