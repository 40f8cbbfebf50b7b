"""What every teacher server must do for the scoring client: the same tests for all three.

The tests of one server run in this order; the last but one ends it. What a test measures goes to
the report.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import orjson
import pytest
import torch

from opd_core.config import CONTEXT_MARGIN
from opd_core.errors import TeacherRefused
from opd_core.lifecycle.ports import port_is_free
from opd_core.scoring.client import Score, TeacherLogprobClient
from opd_core.scoring.proof import TOLERANCE
from opd_core.scoring.wire import request_body
from opd_core.serving.readiness import HEALTH_PATH, context_length, read_model_info

from .conftest import KEY, STARTUP_LIMIT_S, Measure, Server

pytestmark = pytest.mark.timeout(2 * STARTUP_LIMIT_S)
REQUEST_LIMIT_S = 120.0
VOCAB_SIZE = 32
Logprobs = Callable[[Sequence[int]], torch.Tensor]


def sequence(length: int, seed: int) -> list[int]:
    """Random ids; the last of the vocabulary, which SGLang echoes as 0, is left out."""
    draw = random.Random(seed)
    return [draw.randrange(2, VOCAB_SIZE - 1) for _ in range(length)]


def expected(logprobs: Logprobs, ids: Sequence[int], start: int) -> torch.Tensor:
    """[N - 1 - start]: what transformers gives for ``ids[start + 1:]``."""
    following = torch.tensor(ids[start + 1 :])
    return logprobs(ids)[start:].gather(-1, following.unsqueeze(-1)).squeeze(-1)


def largest_gap(score: Score, reference: torch.Tensor) -> float:
    assert len(score.teacher_logprobs) == len(reference)
    return float((torch.tensor(score.teacher_logprobs) - reference).abs().max())


def post(server: Server, body: bytes, key: str | None = KEY) -> httpx.Response:
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    url = server.endpoint + "/generate"
    with httpx.Client(trust_env=False, timeout=REQUEST_LIMIT_S, headers=headers) as http:
        return http.post(url, content=body)


def ask(server: Server, ids: Sequence[int], start: int, **more: Any) -> dict[str, Any]:
    """The whole ``meta_info`` of a scoring request, with further fields in the request."""
    body = orjson.loads(request_body(server.backend, ids, start)) | more
    response = post(server, orjson.dumps(body))
    assert response.status_code == 200, response.text
    meta: dict[str, Any] = response.json()["meta_info"]
    return meta


# ------------------------------------------------------------------ what it says of itself


def test_it_is_healthy_without_a_key_and_names_its_model_with_one(
    server: Server, measured: Measure
) -> None:
    health = httpx.get(server.endpoint + HEALTH_PATH[server.backend], trust_env=False, timeout=60)
    assert health.status_code == 200
    info = read_model_info(server.endpoint, server.backend, KEY)
    assert "teacher" in (info.get("id"), info.get("served_model_name"))
    assert context_length(info) in (0, server.facts.context_length)
    measured("context length it tells", context_length(info) or "none")
    measured("vocabulary it tells", info.get("vocab_size") or "none")


def test_its_key_stands_in_no_command_line_and_in_no_log(server: Server) -> None:
    processes = server.processes()
    assert processes
    for process in processes:
        assert KEY.encode() not in (process / "cmdline").read_bytes()
    assert KEY not in server.spec.log.read_text(encoding="utf-8", errors="replace")


# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize(("length", "start"), [(40, 0), (40, 17), (40, 38), (2, 0), (200, 99)])
async def test_any_start_gives_the_rows_after_it_as_transformers_does(
    server: Server, transformers_logprobs: Logprobs, length: int, start: int
) -> None:
    ids = sequence(length, seed=length + start)
    async with server.client() as client:
        score = await client.score_from(ids, start)
    gap = largest_gap(score, expected(transformers_logprobs, ids, start))
    assert gap <= TOLERANCE["float32"]


def test_the_boundary_row_is_there_or_not_as_the_client_expects(server: Server) -> None:
    ids = sequence(12, seed=1)
    rows = ask(server, ids, 4)["input_token_logprobs"]
    if server.backend == "lmdeploy":
        assert [row[1] for row in rows] == ids[5:]
    else:
        assert [row[1] for row in rows] == ids[4:]
        assert rows[0][0] is None


async def test_the_last_id_of_the_vocabulary_is_scored_too(
    server: Server, transformers_logprobs: Logprobs
) -> None:
    ids = [5, 6, VOCAB_SIZE - 1, 7, VOCAB_SIZE - 1]
    async with server.client() as client:
        score = await client.score_from(ids, 1)
    gap = largest_gap(score, expected(transformers_logprobs, ids, 1))
    assert gap <= TOLERANCE["float32"]


async def test_many_requests_at_once_in_any_order_give_transformers_numbers(
    server: Server, transformers_logprobs: Logprobs, measured: Measure
) -> None:
    draw = random.Random(7)
    asked = [(sequence(n, seed=n), draw.randrange(n - 1)) for n in range(2, 242, 5)]
    references = [expected(transformers_logprobs, ids, start) for ids, start in asked]
    rounds = []
    async with server.client() as client:
        for order in (list(range(len(asked))), draw.sample(range(len(asked)), len(asked))):
            scores = await asyncio.gather(*(client.score_from(*asked[i]) for i in order))
            rounds.append(dict(zip(order, scores, strict=True)))
    gaps = [largest_gap(done[i], ref) for done in rounds for i, ref in enumerate(references)]
    assert max(gaps) <= TOLERANCE["float32"]
    first, second = rounds
    between = max(
        largest_gap(first[i], torch.tensor(second[i].teacher_logprobs)) for i in range(len(asked))
    )
    assert between <= TOLERANCE["float32"]
    measured("largest difference from transformers (nats)", max(gaps))
    measured("largest difference between two orders (nats)", between)
    measured("logprobs compared", 2 * sum(map(len, references)))


def test_the_best_ids_at_each_place_are_transformers_own(
    server: Server, transformers_logprobs: Logprobs, measured: Measure
) -> None:
    ids, start, k = sequence(24, seed=3), 9, 4
    rows = ask(server, ids, start, top_logprobs_num=k)["input_top_logprobs"]
    if server.backend != "lmdeploy":
        assert rows[0] is None
        rows = rows[1:]
    best = transformers_logprobs(ids)[start:].topk(k)
    assert [[entry[1] for entry in row] for row in rows] == best.indices.tolist()
    values = torch.tensor([[entry[0] for entry in row] for row in rows])
    gap = float((values - best.values).abs().max())
    assert gap <= TOLERANCE["float32"]
    measured("largest difference of top logprobs (nats)", gap)


# ------------------------------------------------------------------ shared prompts


@pytest.mark.parametrize("size", [4, 8])
async def test_siblings_after_the_first_compute_only_what_they_do_not_share(
    server: Server, transformers_logprobs: Logprobs, measured: Measure, size: int
) -> None:
    prompt = sequence(150, seed=100 + size)
    responses = [sequence(30, seed=200 + 10 * size + i) for i in range(size)]
    async with server.client() as client:
        first = await client.score(prompt, responses[0])
        rest = await asyncio.gather(*(client.score(prompt, r) for r in responses[1:]))
    cached = [score.cached_tokens for score in (first, *rest)]
    if server.backend == "sglang":
        assert_shared(cached, prompt)
    for response, score in zip(responses, (first, *rest), strict=True):
        reference = expected(transformers_logprobs, [*prompt, *response], len(prompt) - 1)
        assert largest_gap(score, reference) <= TOLERANCE["float32"]
    measured(f"group of {size}, first alone", _rows(prompt, responses, cached))


@pytest.mark.parametrize("size", [4, 8])
async def test_siblings_at_once_share_as_well_because_one_goes_ahead(
    server: Server, transformers_logprobs: Logprobs, measured: Measure, size: int
) -> None:
    prompt = sequence(150, seed=300 + size)
    responses = [sequence(30, seed=400 + 10 * size + i) for i in range(size)]
    async with server.client() as client:
        scores = await asyncio.gather(*(client.score(prompt, r) for r in responses))
    cached = [score.cached_tokens for score in scores]
    if server.backend == "sglang":
        assert_shared(cached, prompt)
    for response, score in zip(responses, scores, strict=True):
        reference = expected(transformers_logprobs, [*prompt, *response], len(prompt) - 1)
        assert largest_gap(score, reference) <= TOLERANCE["float32"]
    measured(f"group of {size}, all at once", _rows(prompt, responses, cached))


def test_a_start_of_zero_reuses_nothing(server: Server, measured: Measure) -> None:
    ids = sequence(120, seed=5)
    ask(server, ids, 0)
    again = ask(server, ids, 0)
    assert again.get("cached_tokens", 0) == 0
    measured("tells cached tokens", "cached_tokens" in again)


def assert_shared(cached: list[int | None], prompt: list[int]) -> None:
    """All but the prompt's last token, whose row is asked for, came from the cache for all but the
    first."""
    first, *rest = cached
    assert first is not None
    assert first < 10  # by chance an earlier prompt began alike
    assert rest == [len(prompt) - 1] * len(rest)


def _rows(prompt: list[int], responses: list[list[int]], cached: list[int | None]) -> str:
    total = sum(len(prompt) + len(response) for response in responses)
    if None in cached:
        return f"{total} rows; how many were computed is not told"
    saved = sum(tokens or 0 for tokens in cached)
    return f"{total - saved} of {total} rows computed, cached tokens {cached}"


# ------------------------------------------------------------------ refusals


async def refusal(client: TeacherLogprobClient, ids: Sequence[int]) -> str:
    async with client:
        with pytest.raises(TeacherRefused) as caught:
            await client.score_from(ids, 0)
    return caught.value.cause


@pytest.mark.parametrize("bad", [-1, VOCAB_SIZE])
async def test_an_id_outside_the_vocabulary_is_never_sent(server: Server, bad: int) -> None:
    assert await refusal(server.client(), [5, bad, 6]) == "bad_id"


async def test_the_longest_sequence_that_the_client_sends_is_taken_and_no_longer_one(
    server: Server, measured: Measure
) -> None:
    limit = server.facts.context_length - CONTEXT_MARGIN[server.backend]
    fits, over = sequence(limit, seed=1), sequence(limit + 1, seed=1)
    async with server.client() as client:
        assert len((await client.score_from(fits, limit - 3)).teacher_logprobs) == 2
    assert await refusal(server.client(), over) == "too_long"
    assert await refusal(server.client(context_length=0), over) == "http_400"
    assert post(server, request_body(server.backend, over, 0)).status_code == 400
    measured("longest sequence it takes", f"{limit} of {server.facts.context_length}")


@pytest.mark.parametrize("key", ["sk-of-somebody-else", None])
async def test_a_wrong_key_is_refused(server: Server, key: str | None) -> None:
    assert await refusal(server.client(key=key), [5, 6, 7]) == "http_401"


@pytest.mark.parametrize(
    "body", [b'{"input_ids": [5, 6', b'{"input_ids": "five"}', b"{}", b'{"input_ids": []}']
)
def test_a_malformed_body_is_a_400_and_leaves_the_server_alive(server: Server, body: bytes) -> None:
    assert post(server, body).status_code == 400
    assert len(ask(server, [5, 6, 7], 1)["input_token_logprobs"]) in (1, 2)


# ------------------------------------------------------------------ the end


def test_its_stop_signal_ends_the_whole_tree_within_its_grace(
    server: Server, measured: Measure
) -> None:
    measured("processes", len(server.processes()))
    began = time.monotonic()
    server.supervisor.stop(server.spec.name)
    seconds = time.monotonic() - began
    (port,) = server.spec.ports
    assert port_is_free(port)
    assert server.processes() == []
    receipt = server.supervisor.end()
    assert receipt.clean
    (end,) = receipt.children
    assert end.how == server.spec.stop_signal  # and not SIGKILL
    assert seconds < server.spec.grace_s
    measured("seconds to stop", round(seconds, 1))


def test_stopped_while_it_loads_it_leaves_nothing(
    launch: Callable[[], Server], measured: Measure
) -> None:
    server = launch()
    needed = 1 if server.backend == "embedded" else 3  # main, resource tracker, engine
    deadline = time.monotonic() + STARTUP_LIMIT_S
    while not _loads(server, needed):
        server.still_alive()
        assert time.monotonic() < deadline
        time.sleep(0.1)  # the pace of a poll, not a wait for something
    began, count = time.monotonic(), len(server.processes())
    server.supervisor.stop(server.spec.name)
    seconds = round(time.monotonic() - began, 1)
    assert server.processes() == []
    receipt = server.supervisor.end()
    assert receipt.clean
    (end,) = receipt.children
    measured("stopped while loading", f"{count} processes gone in {seconds} s ({end.how})")


def _loads(server: Server, needed: int) -> bool:
    """Its processes are there, and torch is in one of them."""
    processes = server.processes()
    return len(processes) >= needed and any(_has_torch(process) for process in processes)


def _has_torch(process: Any) -> bool:
    try:
        return "libtorch_cpu" in (process / "maps").read_text()
    except OSError:
        return False
