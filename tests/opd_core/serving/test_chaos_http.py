"""Each fault over a real socket, and that a client's checks see it."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from transformers import AutoModelForCausalLM

from opd_core.errors import ScoringError
from opd_core.scoring.wire import parse_answer
from opd_core.serving.embedded.app import create_app
from opd_core.serving.embedded.batching import BatchingScorer
from opd_core.serving.embedded.chaos import add_chaos
from opd_core.serving.embedded.chaos_script import request_digest

pytestmark = pytest.mark.slow

VOCAB_SIZE = 97
KEY = "a-key"
IDS = [(7 * i) % 97 for i in range(1, 30)]
START = 9


def _body(input_ids: object, start: int) -> dict[str, object]:
    body = {"input_ids": input_ids, "return_logprob": True, "logprob_start_len": start}
    return body | {"sampling_params": {"max_new_tokens": 0}}


class Teacher:
    """A running server with an empty script, and what a test does to it."""

    def __init__(self, client: httpx.AsyncClient, folder: Path) -> None:
        self.client = client
        self.folder = folder

    async def script(self, *faults: dict[str, object], **fields: object) -> None:
        answer = await self.client.put("/chaos", json={"faults": faults} | fields)
        assert answer.status_code == 200, answer.text

    async def score(self, ids: list[int] = IDS, start: int = START) -> httpx.Response:
        return await self.client.post("/generate", json=_body(ids, start))

    async def rows(self, fault: dict[str, object]) -> tuple[list[Any], list[Any]]:
        """The rows of the true answer, and those with the fault."""
        await self.script({"first": 2} | fault)
        answers = [json.loads((await self.score()).text) for _ in range(2)]
        volatile = dict.fromkeys(("id", "e2e_latency", "response_sent_to_client_ts"))
        true, wrong = (answer["meta_info"] | volatile for answer in answers)
        rows = true.pop("input_token_logprobs"), wrong.pop("input_token_logprobs")
        assert wrong == true
        return rows

    async def applied(self) -> list[int]:
        counts: list[int] = (await self.client.get("/chaos")).json()["applied"]
        return counts


@pytest.fixture
async def teacher(scorer: BatchingScorer, tmp_path: Path) -> AsyncIterator[Teacher]:
    (tmp_path / "script.json").write_text('{"faults": []}')
    app = create_app(scorer, api_key=KEY)
    add_chaos(app, tmp_path / "script.json", scorer)
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{listener.getsockname()[1]}",
            headers={"authorization": f"Bearer {KEY}"},
            trust_env=False,
            timeout=20,
        )
        async with client:
            yield Teacher(client, tmp_path)
        server.should_exit = True
        await serving


@pytest.mark.parametrize(
    "fault",
    [
        {"fault": "wrong_rows", "rows": -1},
        {"fault": "wrong_rows", "rows": 1},
        {"fault": "shifted"},
        {"fault": "nulls"},
        {"fault": "nan"},
        {"fault": "infinite"},
        {"fault": "positive"},
        {"fault": "other_ids"},
        {"fault": "raw_logits"},
        {"fault": "uniform"},
        {"fault": "error_200"},
    ],
    ids=lambda fault: "_".join(map(str, fault.values())),
)
async def test_a_wrong_answer_is_a_200_that_the_client_refuses(
    teacher: Teacher, fault: dict[str, object]
) -> None:
    await teacher.script(fault)

    answer = await teacher.score()

    assert answer.status_code == 200
    with pytest.raises(ScoringError):
        parse_answer("embedded", answer.content, IDS, START, VOCAB_SIZE)


async def test_stale_answers_pass_every_check_of_one_answer(teacher: Teacher) -> None:
    true, wrong = await teacher.rows({"fault": "stale"})
    answer = await teacher.score()

    parse_answer("embedded", answer.content, IDS, START, VOCAB_SIZE)
    drift = [t[0] - w[0] for t, w in zip(true[1:], wrong[1:], strict=True)]
    places = range(START + 1, len(IDS))
    np.testing.assert_allclose(drift, [0.1 * (place % 7) for place in places], atol=1e-6)


async def test_rows_are_lost_or_repeated(teacher: Teacher) -> None:
    true, fewer = await teacher.rows({"fault": "wrong_rows", "rows": -2})
    _, more = await teacher.rows({"fault": "wrong_rows", "rows": 2})

    assert fewer == true[:-2]
    assert more == [*true, true[-1], true[-1]]


async def test_shifted_rows_come_one_place_late(teacher: Teacher) -> None:
    true, wrong = await teacher.rows({"fault": "shifted"})

    assert wrong[1:] == true[:-1]
    assert len(wrong) == len(true)


async def test_other_ids_keep_their_logprobs(teacher: Teacher) -> None:
    true, wrong = await teacher.rows({"fault": "other_ids"})

    assert [row[0] for row in wrong] == [row[0] for row in true]
    assert all(w[1] != t[1] for w, t in zip(wrong, true, strict=True))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nulls", lambda true: [None] * len(true)),
        ("infinite", lambda true: [*true[:-1], -math.inf]),
        ("positive", lambda true: [*true[:-1], 0.5]),
        ("uniform", lambda true: [-math.log(VOCAB_SIZE)] * len(true)),
    ],
)
async def test_only_the_logprobs_are_wrong(
    teacher: Teacher, name: str, expected: Callable[[list[float]], list[float | None]]
) -> None:
    true, wrong = await teacher.rows({"fault": name})

    assert [row[0] for row in wrong[1:]] == expected([row[0] for row in true[1:]])
    assert [row[1:] for row in wrong] == [row[1:] for row in true]


async def test_nan_is_written_as_javascript_writes_it(teacher: Teacher) -> None:
    await teacher.script({"fault": "nan"}, {"fault": "infinite"})

    assert f"[NaN, {IDS[-1]}, null]" in (await teacher.score()).text


async def test_raw_logits_are_those_of_the_model(teacher: Teacher, tiny_model_dir: Path) -> None:
    _, wrong = await teacher.rows({"fault": "raw_logits"})
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([IDS])).logits[0]

    expected = [logits[i - 1, IDS[i]].item() for i in range(START + 1, len(IDS))]
    np.testing.assert_allclose([row[0] for row in wrong[1:]], expected, rtol=0, atol=1e-4)


async def test_an_aborted_request_says_so_under_200(teacher: Teacher) -> None:
    await teacher.script({"fault": "error_200"})

    meta = (await teacher.score()).json()["meta_info"]

    assert meta["finish_reason"]["type"] == "abort"
    assert {row[0] for row in meta["input_token_logprobs"]} == {None}


async def test_every_sequence_of_a_request_gets_the_fault(teacher: Teacher) -> None:
    await teacher.script({"fault": "nulls", "containing": [7, 8]})
    body = _body([[5, 6], [7, 8, 9]], 0)

    answers = (await teacher.client.post("/generate", json=body)).json()

    rows = [answer["meta_info"]["input_token_logprobs"] for answer in answers]
    assert [[row[0] for row in some] for some in rows] == [[None] * 2, [None] * 3]


@pytest.mark.parametrize("retry_after", [7, "Wed, 21 Oct 2026 07:28:00 GMT", None])
async def test_statuses_come_with_their_retry_after(teacher: Teacher, retry_after: object) -> None:
    await teacher.script({"fault": "status", "status": 429, "retry_after": retry_after})

    answer = await teacher.score()

    assert answer.status_code == 429
    expected = None if retry_after is None else str(retry_after)
    assert answer.headers.get("retry-after") == expected


async def test_a_slow_answer_is_true_and_late(teacher: Teacher) -> None:
    await teacher.script({"fault": "slow", "delay_s": 0.2}, record="answered")
    clock = asyncio.get_running_loop().time
    began = clock()

    answer = await teacher.score()

    assert clock() - began >= 0.2
    parse_answer("embedded", answer.content, IDS, START, VOCAB_SIZE)
    assert (teacher.folder / "answered").read_text() == f"{request_digest(IDS, START)}\n"


async def test_a_hanging_request_holds_up_no_other(teacher: Teacher) -> None:
    await teacher.script({"fault": "hang", "count": 1})
    hanging = asyncio.create_task(teacher.score())
    while await teacher.applied() != [1]:
        pass

    answer = await teacher.score()

    assert answer.status_code == 200
    assert not hanging.done()
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging


async def test_a_cut_answer_stops_in_the_middle(teacher: Teacher) -> None:
    await teacher.script({"fault": "cut", "count": 1})
    request = teacher.client.build_request("POST", "/generate", json=_body(IDS, START))
    answer = await teacher.client.send(request, stream=True)
    parts = answer.aiter_raw()
    received = await anext(parts)

    with pytest.raises(httpx.RemoteProtocolError):
        await anext(parts)

    assert answer.status_code == 200
    assert len(received) == int(answer.headers["content-length"]) // 2
    assert (await teacher.score()).status_code == 200


@pytest.mark.parametrize(("lie", "status"), [("ok", 200), ("bad", 503)])
async def test_health_lies_from_its_request_on(
    teacher: Teacher, scorer: BatchingScorer, lie: str, status: int
) -> None:
    await teacher.script({"fault": "health", "answer": lie, "first": 2})
    before = (await teacher.client.get("/health")).status_code
    await teacher.score()
    batches = scorer.stats().batches

    statuses = [
        (await teacher.client.get(path)).status_code for path in ("/health", "/health_generate")
    ]

    assert before == 200
    assert statuses == [status] * 2
    assert scorer.stats().batches == batches
    assert (await teacher.client.get("/chaos")).json()["requests"] == 1


async def test_health_can_hang_while_scores_flow(teacher: Teacher) -> None:
    await teacher.script({"fault": "health", "answer": "hang"})
    hanging = asyncio.create_task(teacher.client.get("/health"))
    while await teacher.applied() != [1]:
        pass

    assert (await teacher.score()).status_code == 200
    assert not hanging.done()
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging


async def test_only_true_complete_answers_are_recorded(teacher: Teacher) -> None:
    faults: list[dict[str, object]] = [
        {"fault": "stale", "containing": [1]},
        {"fault": "status", "status": 500, "containing": [2]},
        {"fault": "cut", "containing": [3]},
    ]
    await teacher.script(*faults, record="answered")
    for ids in ([1, 9], [2, 9], [9, 9], [9, 97]):
        await teacher.score(ids, 0)
    with pytest.raises(httpx.RemoteProtocolError):
        await teacher.score([3, 9], 0)
    both = _body([[9, 4], [9, 5]], 0)
    await teacher.client.post("/generate", json=both)

    lines = (teacher.folder / "answered").read_text().splitlines()
    assert lines == [request_digest(ids, 0) for ids in ([9, 9], [9, 4], [9, 5])]


async def test_what_the_server_refuses_stays_refused_under_a_fault(teacher: Teacher) -> None:
    await teacher.script({"fault": "nulls"})

    refused = [
        await teacher.score([5, 97], 0),
        await teacher.client.post("/generate", content=b"{broken"),
    ]

    assert [answer.status_code for answer in refused] == [400, 400]
    assert await teacher.applied() == [2]


async def test_a_new_script_counts_anew_and_a_wrong_one_changes_nothing(teacher: Teacher) -> None:
    await teacher.script({"fault": "nulls", "first": 2})
    await teacher.score()
    wrong = await teacher.client.put("/chaos", json={"faults": [{"fault": "sleepy"}]})
    kept = (await teacher.client.get("/chaos")).json()
    await teacher.script({"fault": "hang", "first": 99})

    assert wrong.status_code == 400
    assert "known are: cut, die" in wrong.json()["error"]["message"]
    expected = {"script": {"faults": [{"fault": "nulls", "first": 2}]}}
    assert kept == expected | {"requests": 1, "applied": [0]}
    assert (await teacher.client.get("/chaos")).json()["requests"] == 0
    assert (await teacher.client.delete("/chaos")).status_code == 405


async def test_control_is_behind_the_key(teacher: Teacher) -> None:
    headers = {"authorization": "Bearer other"}

    answers = [
        await teacher.client.get("/chaos", headers=headers),
        await teacher.client.put("/chaos", headers=headers, json={"faults": []}),
    ]

    assert [answer.status_code for answer in answers] == [401, 401]


async def test_nothing_is_counted_until_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text('{"faults": [{"fault": "health", "answer": "ok"}]}')
    loading = BatchingScorer()
    app = create_app(loading)
    add_chaos(app, tmp_path / "script.json", loading)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://teacher") as client:
        health = await client.get("/health")
        score = await client.post("/generate", json=_body(IDS, START))
        facts = (await client.get("/chaos")).json()

    assert (health.status_code, score.status_code) == (503, 503)
    assert (facts["requests"], facts["applied"]) == (0, [0])


async def test_the_clock_of_a_script_starts_with_the_first_question(
    scorer: BatchingScorer, tmp_path: Path
) -> None:
    script = {"faults": [{"fault": "health", "answer": "bad", "from_s": 1e-9}]}
    (tmp_path / "script.json").write_text(json.dumps(script))
    app = create_app(scorer)
    add_chaos(app, tmp_path / "script.json", scorer)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://teacher") as client:
        await client.get("/model_info")
        health = await client.get("/health")

    assert health.status_code == 503


async def test_without_a_script_there_is_no_control(scorer: BatchingScorer) -> None:
    transport = httpx.ASGITransport(app=create_app(scorer))
    async with httpx.AsyncClient(transport=transport, base_url="http://teacher") as client:
        assert (await client.get("/chaos")).status_code == 404
