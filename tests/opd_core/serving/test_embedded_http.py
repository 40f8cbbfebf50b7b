"""SGLang's protocol over the real tiny model, in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from opd_core.serving.embedded.app import create_app
from opd_core.serving.embedded.batching import BatchingScorer

OwnLogprobs = Callable[[Sequence[int]], torch.Tensor]
IDS = [5, 6, 7, 8, 9, 10]
ONLY_SCORE = {"max_new_tokens": 0, "temperature": 0, "skip_special_tokens": False}


def _body(input_ids: object, **fields: object) -> dict[str, object]:
    body = {"input_ids": input_ids, "return_logprob": True, "logprob_start_len": 0}
    return body | {"sampling_params": ONLY_SCORE, "stream": False} | fields


def _client(app: Any, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://teacher", **options)


@pytest.fixture
async def client(scorer: BatchingScorer) -> AsyncIterator[httpx.AsyncClient]:
    async with _client(create_app(scorer)) as client:
        yield client


async def _meta(client: httpx.AsyncClient, **body: object) -> dict[str, Any]:
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    meta: dict[str, Any] = answer.json()["meta_info"]
    return meta


async def test_answer_has_the_shape_of_sglang(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/generate", json=_body([IDS], top_logprobs_num=2))).json()

    assert isinstance(answer, list)
    meta = answer[0].pop("meta_info")
    assert answer == [{"text": "", "output_ids": []}]
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    expected = {"prompt_tokens": 6, "completion_tokens": 0, "cached_tokens": 0}
    assert meta.items() >= expected.items()
    assert meta["weight_version"] == "default"
    assert len(meta["id"]) == 32
    assert meta["e2e_latency"] > 0
    assert meta["output_token_logprobs"] == meta["output_top_logprobs"] == []
    assert meta["input_token_logprobs"][0] == [None, 5, None]
    assert [row[1:] for row in meta["input_token_logprobs"]] == [[i, None] for i in IDS]
    assert meta["input_top_logprobs"][0] is None
    assert [len(row) for row in meta["input_top_logprobs"][1:]] == [2] * 5


@pytest.mark.parametrize("start", [0, 1, 3, 5])
async def test_rows_begin_at_the_start_and_the_first_has_no_score(
    client: httpx.AsyncClient, own_logprobs: OwnLogprobs, start: int
) -> None:
    meta = await _meta(client, **_body(IDS, logprob_start_len=start))

    rows = meta["input_token_logprobs"]
    assert [row[1] for row in rows] == IDS[start:]
    assert rows[0][0] is None
    expected = [own_logprobs(IDS)[i - 1, IDS[i]].item() for i in range(start + 1, 6)]
    np.testing.assert_allclose([row[0] for row in rows[1:]], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("start", [-1, 6, None])
async def test_no_rows_without_a_start_or_with_the_start_at_the_end(
    client: httpx.AsyncClient, start: int | None
) -> None:
    meta = await _meta(client, **_body(IDS, logprob_start_len=start, top_logprobs_num=1))

    assert meta["input_token_logprobs"] == meta["input_top_logprobs"] == []
    assert meta["prompt_tokens"] == 6


async def test_without_return_logprob_no_scores_are_sent(client: httpx.AsyncClient) -> None:
    meta = await _meta(client, input_ids=IDS, sampling_params=ONLY_SCORE, logprob_start_len=0)

    assert "input_token_logprobs" not in meta


async def test_list_of_lists_answers_in_the_same_order(
    client: httpx.AsyncClient, own_logprobs: OwnLogprobs
) -> None:
    sequences = [[(7 * i + j) % 97 for j in range(2 + 31 * (i % 5))] for i in range(20)]

    answers = (await client.post("/generate", json=_body(sequences))).json()

    assert len(answers) == 20
    for ids, answer in zip(sequences, answers, strict=True):
        rows = answer["meta_info"]["input_token_logprobs"]
        assert [row[1] for row in rows] == ids
        expected = own_logprobs(ids).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
        np.testing.assert_allclose([row[0] for row in rows[1:]], expected, rtol=0, atol=1e-4)


async def test_each_sequence_may_have_its_own_start_and_id(client: httpx.AsyncClient) -> None:
    body = _body([IDS, IDS], logprob_start_len=[4, 0], rid=["one", "two"])

    answers = (await client.post("/generate", json=body)).json()

    metas = [answer["meta_info"] for answer in answers]
    assert [meta["id"] for meta in metas] == ["one", "two"]
    assert [len(meta["input_token_logprobs"]) for meta in metas] == [2, 6]


async def test_top_logprobs_are_those_of_topk(
    client: httpx.AsyncClient, own_logprobs: OwnLogprobs
) -> None:
    meta = await _meta(client, **_body(IDS, logprob_start_len=2, top_logprobs_num=4))

    expected = own_logprobs(IDS)[2:].topk(4)
    rows = meta["input_top_logprobs"]
    assert rows[0] is None
    assert [[entry[1] for entry in row] for row in rows[1:]] == expected.indices.tolist()
    values = [[entry[0] for entry in row] for row in rows[1:]]
    np.testing.assert_allclose(values, expected.values.numpy(), rtol=0, atol=1e-4)


async def test_token_ids_logprob_scores_these_ids_everywhere(
    client: httpx.AsyncClient, own_logprobs: OwnLogprobs
) -> None:
    meta = await _meta(client, **_body(IDS, token_ids_logprob=[96, 0]))

    rows = meta["input_token_ids_logprobs"]
    assert rows[0] is None
    assert [[entry[1] for entry in row] for row in rows[1:]] == [[96, 0]] * 5
    values = [[entry[0] for entry in row] for row in rows[1:]]
    np.testing.assert_allclose(values, own_logprobs(IDS)[:, [96, 0]].numpy(), rtol=0, atol=1e-4)


async def test_texts_fill_the_third_field(client: httpx.AsyncClient) -> None:
    body = _body([5, 6], return_text_in_logprobs=True, token_ids_logprob=[9])

    meta = await _meta(client, **body)

    assert [row[1:] for row in meta["input_token_logprobs"]] == [[5, "w5"], [6, "w6"]]
    assert meta["input_token_ids_logprobs"][1][0][1:] == [9, "w9"]


async def test_longest_allowed_sequence_is_scored_and_one_more_is_not(
    client: httpx.AsyncClient,
) -> None:
    meta = await _meta(client, **_body([3] * 2041, logprob_start_len=2039))
    answer = await client.post("/generate", json=_body([3] * 2042))

    assert len(meta["input_token_logprobs"]) == 2
    assert answer.status_code == 400
    assert "exceeds the maximum allowed length (2041 tokens)" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_body([]), "input_ids cannot be empty."),
        (_body([[5, 6], []]), "row 1 has no ids"),
        (_body([5, 97]), "id 97, ids of this model are 0 to 96"),
        (_body([[5], [5, -1]]), "row 1: input_ids has the id -1"),
        (_body([5, 2**63]), "beyond 64 bits"),
        (_body([5, 6], logprob_start_len=9), "logprob_start_len=9 is higher than the number"),
        (_body([5, 6], logprob_start_len=-2), "logprob_start_len=-2 in row 0 is negative"),
        (_body([[5], [6]], logprob_start_len=[0]), "1 entries for 2 sequences"),
        (_body([[5], [6]], sampling_params=[ONLY_SCORE]), "1 entries for 2 sequences"),
        (_body([5], top_logprobs_num=98), "not between 0 and 97"),
        (_body([5], token_ids_logprob=[97]), "token_ids_logprob has the id 97"),
        (_body([5], token_ids_logprob=[1] * 1025), "at most 1024"),
        (_body([5], stream=True), "does not stream"),
        (_body([5], sampling_params={"max_new_tokens": 1}), "this server only scores"),
        (_body([5], sampling_params={"max_new_tokens": False}), "this server only scores"),
        (_body([5], sampling_params={}), "128 by default"),
        (_body([5], sampling_params=None), "128 by default"),
        (_body([5], sampling_params=ONLY_SCORE | {"n": 2}), "n=2"),
        (_body([5], sampling_params=ONLY_SCORE | {"heat": 1}), "unknown sampling parameters"),
        (_body([5], lora_path="other"), "lora_path is not supported"),
        (_body(None, text="hello"), "text is not supported"),
    ],
)
async def test_what_cannot_be_scored_is_refused_with_the_reason(
    client: httpx.AsyncClient, body: dict[str, object], message: str
) -> None:
    answer = await client.post("/generate", json=body)

    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"{broken",
        b"[]",
        b"",
        json.dumps(_body(None)).encode(),
        json.dumps(_body("5 6")).encode(),
        json.dumps(_body([5, "6"])).encode(),
        json.dumps(_body([5, 6.5])).encode(),
        json.dumps(_body([5, True])).encode(),
        json.dumps(_body([5, [6]])).encode(),
        json.dumps(_body([[5], 6])).encode(),
        json.dumps(_body([5], logprob_start_len="0")).encode(),
        json.dumps(_body([5], logprob_start_len=True)).encode(),
        json.dumps(_body([5], return_logprob=1)).encode(),
        json.dumps(_body([5], token_ids_logprob=7)).encode(),
        json.dumps(_body([5], sampling_params="none")).encode(),
    ],
)
async def test_broken_json_and_wrong_types_are_malformed(
    client: httpx.AsyncClient, content: bytes
) -> None:
    answer = await client.post("/generate", content=content)

    assert answer.status_code == 400
    error = answer.json()
    assert error.pop("message").startswith("1 validation error")
    assert error == {"object": "error", "type": "Bad Request", "code": 400}


async def test_unknown_top_level_fields_are_ignored(client: httpx.AsyncClient) -> None:
    meta = await _meta(client, **_body(IDS, routed_by="nobody", log_metrics=True))

    assert len(meta["input_token_logprobs"]) == 6


async def test_bad_requests_among_good_ones_leave_them_right(
    client: httpx.AsyncClient, own_logprobs: OwnLogprobs
) -> None:
    good = [[(11 * i + 3 * j) % 97 for j in range(5 + i)] for i in range(16)]
    bad: list[object] = [[5, 97], [[5, 6], []], [-1], []]
    posts = [_body(ids) for pair in zip(good, bad * 4, strict=True) for ids in pair]

    answers = await asyncio.gather(*(client.post("/generate", json=body) for body in posts))

    assert [answer.status_code for answer in answers] == [200, 400] * 16
    for ids, answer in zip(good, answers[::2], strict=True):
        rows = answer.json()["meta_info"]["input_token_logprobs"]
        expected = own_logprobs(ids).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
        np.testing.assert_allclose([row[0] for row in rows[1:]], expected, rtol=0, atol=1e-4)
    assert (await client.get("/health")).status_code == 200


async def test_health_is_an_empty_200_and_scores_one_token(
    client: httpx.AsyncClient, scorer: BatchingScorer
) -> None:
    for path in ("/health", "/health_generate"):
        answer = await client.get(path)
        assert (answer.status_code, answer.content) == (200, b"")

    # The second check saw the first one's batch and needed none of its own.
    assert scorer.stats().sequences == 1


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info", "/server_info"])
async def test_info_names_the_model_and_its_limits(client: httpx.AsyncClient, path: str) -> None:
    info = (await client.get(path)).json()

    expected = {"served_model_name": "teacher", "vocab_size": 97, "context_length": 2048}
    assert info.items() >= expected.items()
    assert info["max_req_input_len"] == 2041
    assert info["dtype"] == "float32"
    assert info["is_generation"] is True
    assert info["weight_version"] == "default"
    assert info["model_path"]


async def test_models_are_listed_as_openai_does(scorer: BatchingScorer) -> None:
    async with _client(create_app(scorer, served_model_name="qwen")) as client:
        models = (await client.get("/v1/models")).json()

    assert models["object"] == "list"
    assert [(card["id"], card["max_model_len"]) for card in models["data"]] == [("qwen", 2048)]


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer ", "secret", "Bearer sécret"])
async def test_wrong_key_is_unauthorised_everywhere_but_on_health(
    scorer: BatchingScorer, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    async with _client(create_app(scorer, api_key="secret"), headers=headers) as client:
        refused = [
            await client.post("/generate", json=_body(IDS)),
            *[await client.get(p) for p in ("/model_info", "/server_info", "/v1/models", "/no")],
        ]
        health = [await client.get(path) for path in ("/health", "/health_generate")]

    assert [(answer.status_code, answer.json()) for answer in refused] == [
        (401, {"error": "Unauthorized"})
    ] * 5
    assert [answer.status_code for answer in health] == [200, 200]


async def test_right_key_is_let_in(scorer: BatchingScorer) -> None:
    headers = {"Authorization": "Bearer secret"}
    async with _client(create_app(scorer, api_key="secret"), headers=headers) as client:
        answers = [await client.get("/model_info"), await client.post("/generate", json=_body(IDS))]

    assert [answer.status_code for answer in answers] == [200, 200]
