"""The full probe, before honest servers in memory and before servers that lie in one way each."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import pytest

from opd_core.config import Backend, OPDTeacherConfig
from opd_core.errors import ConfigError, ServingError
from opd_core.serving.probe import ProbeReport, probe
from opd_core.serving.probe.asking import Asker
from opd_core.serving.probe.connections import check_connections
from opd_core.serving.probe.load import check_refusal, check_throughput, measure_levels
from opd_core.serving.probe.text import SENTENCES, probe_text

LETTERS = ("<end>", *sorted(set(" ".join(SENTENCES))))
VOCAB_SIZE = len(LETTERS)
CONTEXT = 200
LONGEST = {"sglang": CONTEXT - 7, "embedded": CONTEXT - 7, "lmdeploy": CONTEXT - 1}
Body = dict[str, Any]


class Letters:
    """A tokenizer of letters; id 0 is special."""

    all_special_ids = (0,)

    def __init__(self, shift: int = 0) -> None:
        self._shift = shift

    def get_vocab(self) -> dict[str, int]:
        return {letter: id_ for id_, letter in enumerate(LETTERS)}

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [LETTERS.index(letter) for letter in text]
        return {"input_ids": [0] + [1 + (i - 1 + self._shift) % (VOCAB_SIZE - 1) for i in ids]}


def _bigram_model() -> list[list[float]]:
    """Log-probabilities [V, V] of a letter after a letter, counted in the text itself."""
    ids = [LETTERS.index(letter) for letter in " ".join(SENTENCES)]
    counts = Counter(pairwise(ids))
    rows = [[counts[a, b] + 0.01 for b in range(VOCAB_SIZE)] for a in range(VOCAB_SIZE)]
    return [[math.log(count / sum(row)) for count in row] for row in rows]


MODEL = _bigram_model()


def _likeliest(after: int, count: int) -> list[list[float]]:
    return sorted(([p, b] for b, p in enumerate(MODEL[after])), reverse=True)[:count]


class Server(httpx.AsyncBaseTransport):
    """Answers honestly, but for what ``lie(server, request body, answer)`` changes in an answer:
    in place, or by giving another response."""

    def __init__(self, backend: Backend = "sglang", lie: Callable[..., Any] | None = None) -> None:
        self.backend = backend
        self.form = backend
        self.lie = lie or (lambda server, body, answer: None)
        self.info: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "context_length": CONTEXT}
        self.health = 200
        self.key: str | None = None
        self.longest = LONGEST[backend]
        self.bodies: list[Body] = []
        self.in_flight = self.number = 0
        self.noise = random.Random(0)
        self._seen: set[tuple[int, ...]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.startswith("/health"):
            return httpx.Response(self.health)
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        if request.method == "GET":
            return httpx.Response(200, json=self.info)
        self.in_flight += 1
        try:
            await asyncio.sleep(0.002)
            return self._generate(json.loads(await request.aread()))
        finally:
            self.in_flight -= 1

    def _generate(self, body: Body) -> httpx.Response:
        self.bodies.append(body)
        self.number += 1
        ids, start, top = body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]
        if len(ids) > self.longest:
            return httpx.Response(400, json={"error": {"message": "too long"}})
        pairs = list(zip(ids[start:], ids[start + 1 :], strict=False))
        rows: list[Any] = [[MODEL[a][b], b] for a, b in pairs]
        tops: list[Any] = [_likeliest(a, top) for a, _ in pairs] if top else []
        if self.form != "lmdeploy":
            rows, tops = [[None, ids[start]], *rows], [None, *tops]
        meta: dict[str, Any] = {"finish_reason": {"type": "length"}, "input_token_logprobs": rows}
        if top:
            meta["input_top_logprobs"] = tops
        if self.form == "sglang":
            meta["cached_tokens"] = start if tuple(ids) in self._seen else 0
            self._seen.add(tuple(ids))
        answer = {"meta_info": meta}
        lied = self.lie(self, body, answer)
        if isinstance(lied, httpx.Response):
            return lied
        return httpx.Response(200, content=json.dumps(answer))  # json writes NaN, as servers do


def scored(answer: Body) -> list[Any]:
    """The rows of an answer in SGLang's form that have a logprob."""
    rows = answer["meta_info"]["input_token_logprobs"]
    return rows[1:]  # type: ignore[no-any-return]


async def look(server: Server, tokenizer: Any = None, **more: Any) -> ProbeReport:
    config = OPDTeacherConfig(name="big", endpoint="http://one", backend=server.backend)
    more = {"level_s": 0.02, "max_concurrency": 8} | more
    return await probe(config, tokenizer or Letters(), transport=server, **more)


def verdicts(report: ProbeReport) -> dict[str, str]:
    return {check.name: check.verdict for check in report.checks}


def found(report: ProbeReport, name: str) -> str:
    (check,) = [check for check in report.checks if check.name == name]
    return f"{check.found} → {check.advice}"


# ------------------------------------------------------------------ honest servers


@pytest.mark.parametrize("backend", ["sglang", "lmdeploy", "embedded"])
async def test_an_honest_server_is_usable(backend: Backend) -> None:
    report = await look(Server(backend))
    assert report.usable
    told = verdicts(report)
    assert told.pop("refusal") == "unknown"
    assert told.pop("prefix cache") == ("pass" if backend == "sglang" else "unknown")
    assert set(told.values()) == {"pass"}
    assert len(told) == 14


@pytest.mark.parametrize("backend", ["sglang", "lmdeploy", "embedded"])
async def test_nothing_is_sent_that_ends_a_server(backend: Backend) -> None:
    server = Server(backend)
    server.info["vocab_size"] = VOCAB_SIZE - 7
    await look(server)
    assert len(server.bodies) > 30
    for body in server.bodies:
        ids = body["input_ids"]
        assert 0 < len(ids) <= LONGEST[backend]
        assert 0 < min(ids) <= max(ids) < VOCAB_SIZE - 7
        assert body["logprob_start_len"] < len(ids)
        assert body["top_logprobs_num"] <= VOCAB_SIZE - 7


def test_an_unsendable_request_is_not_even_written() -> None:
    asker = Asker(httpx.AsyncClient(), "http://one", "sglang", 10)
    for ids, top in (([], 0), ([3, 10], 0), ([-1], 0), ([3], 11)):
        with pytest.raises(ValueError, match="can end a server"):
            asker.body(ids, 0, top)


async def test_the_longest_sequence_is_proven_at_its_exact_length() -> None:
    report = await look(server := Server())
    assert max(len(body["input_ids"]) for body in server.bodies) == LONGEST["sglang"]
    assert f"{LONGEST['sglang']} tokens are scored, the most" in found(report, "context")


async def test_no_longer_sequence_is_sent_than_was_allowed() -> None:
    report = await look(server := Server(), context_limit=150)
    assert max(len(body["input_ids"]) for body in server.bodies) == 150
    assert "150 tokens are scored; it says 200" in found(report, "context")


async def test_levels_grow_up_to_the_limit_and_tell_what_they_gave() -> None:
    report = await look(Server(), max_concurrency=4)
    assert [level.concurrency for level in report.levels] == [1, 2, 4]
    for level in report.levels:
        assert level.answers >= level.concurrency
        assert level.tokens_per_s == pytest.approx(128 * level.requests_per_s)
        assert 0.002 <= level.p50_s <= level.p95_s
    assert "requests/s" in found(report, "throughput")


async def test_the_report_is_json() -> None:
    report = await look(Server())
    told = json.loads(report.to_json())
    assert told["usable"] is True
    assert told["endpoint"] == "http://one"
    assert {"name": "ids", "verdict": "pass", "advice": ""}.items() <= told["checks"][4].items()
    assert told["levels"][0]["concurrency"] == 1


# ------------------------------------------------------------------ lying servers


def shifted(nats: Callable[[Server, Body], float]) -> Callable[..., None]:
    def lie(server: Server, body: Body, answer: Body) -> None:
        for row in scored(answer):
            row[0] -= nats(server, body)

    return lie


def every(value: Any) -> Callable[..., None]:
    def lie(server: Server, body: Body, answer: Body) -> None:
        for row in scored(answer):
            row[0] = value

    return lie


def drops_a_row(server: Server, body: Body, answer: Body) -> None:
    answer["meta_info"]["input_token_logprobs"].pop()


def fills_the_boundary(server: Server, body: Body, answer: Body) -> None:
    answer["meta_info"]["input_token_logprobs"][0][0] = -1.0


def scores_the_next_id(server: Server, body: Body, answer: Body) -> None:
    scored(answer)[-1][1] += 1


def says_not_a_number(server: Server, body: Body, answer: Body) -> None:
    scored(answer)[-1][0] = math.nan


def tempers(server: Server, body: Body, answer: Body) -> None:
    """Not normalised, yet every number is below 0."""
    meta = answer["meta_info"]
    for row in [
        *scored(answer),
        *(row for top in meta.get("input_top_logprobs", [])[1:] for row in top),
    ]:
        row[0] *= 0.3


def forgets_half_the_vocabulary(server: Server, body: Body, answer: Body) -> None:
    """All alternatives together have half the probability."""
    for top in answer["meta_info"].get("input_top_logprobs", [])[1:]:
        for row in top:
            row[0] -= math.log(2)
    for row in scored(answer):
        row[0] -= math.log(2)


def flatters_what_was_sent(server: Server, body: Body, answer: Body) -> None:
    for row in scored(answer):
        row[0] = min(row[0] + 5, -0.001 * row[1] - 0.0001)


def aborts(server: Server, body: Body, answer: Body) -> None:
    answer["meta_info"] = {"finish_reason": {"type": "abort"}, "input_token_logprobs": None}


LIES: list[tuple[Callable[..., Any], str, str, str]] = [
    (drops_a_row, "rows", "fail", "expected 64 rows, came 63"),
    (fills_the_boundary, "rows", "fail", "the first row must have no logprob"),
    (aborts, "rows", "fail", "finish_reason"),
    (lambda *_: httpx.Response(500, text="CUDA error"), "rows", "fail", "HTTP 500: CUDA error"),
    (lambda *_: httpx.Response(200, text="<html>"), "rows", "fail", "not a list"),
    (scores_the_next_id, "ids", "fail", "other tokens than were sent"),
    (says_not_a_number, "values", "fail", "nan"),
    (every(None), "values", "fail", "None"),
    (every(2.5), "values", "fail", "raw_logprobs"),
    (every(-0.7), "uniform", "fail", "lost its weights"),
    (every(-math.log(VOCAB_SIZE + 64)), "uniform", "fail", "lost its weights"),
    (shifted(lambda server, body: server.noise.uniform(0, 0.01)), "repeatable", "warn", "half"),
    (shifted(lambda server, body: server.noise.uniform(0, 9)), "repeatable", "fail", "within"),
    (shifted(lambda server, body: 0.3 * (server.in_flight > 1)), "order and batch", "warn", "half"),
    (shifted(lambda server, body: server.in_flight > 1), "order and batch", "fail", "among 2"),
    (shifted(lambda server, body: body["logprob_start_len"] > 0), "later starts", "fail", "from 0"),
    (tempers, "normalised", "fail", "raw_logprobs"),
    (forgets_half_the_vocabulary, "normalised", "fail", "sum to 0.5 to 0.5"),
    (flatters_what_was_sent, "normalised", "fail", "the likeliest token"),
    (
        lambda server, body, answer: answer["meta_info"].update(cached_tokens=0),
        "prefix cache",
        "warn",
        "none of 128 tokens",
    ),
]


@pytest.mark.parametrize(("lie", "name", "verdict", "told"), LIES)
async def test_a_lie_is_told_where_it_shows(
    lie: Callable[..., Any], name: str, verdict: str, told: str
) -> None:
    report = await look(Server(lie=lie))
    assert verdicts(report)[name] == verdict
    assert told in found(report, name)
    assert report.usable == (verdict == "warn")


async def test_the_wrong_backend_is_recognised_by_its_rows() -> None:
    server = Server("sglang")
    server.form = "lmdeploy"
    assert "try --backend lmdeploy" in found(await look(server), "rows")


async def test_a_tokenizer_whose_ids_mean_other_text_is_warned_of() -> None:
    report = await look(Server(), Letters(shift=17))
    assert verdicts(report)["tokenizer"] == "warn"
    assert "is it the tokenizer of its model?" in found(report, "tokenizer")


async def test_a_tokenizer_with_more_ids_than_the_model_fails() -> None:
    server = Server()
    server.info["vocab_size"] = VOCAB_SIZE - 1
    report = await look(server)
    assert verdicts(report)["model"] == "fail"
    assert not report.usable


async def test_a_server_that_tells_nothing_is_probed_as_far_as_it_goes() -> None:
    server = Server()
    server.info = {}
    report = await look(server)
    told = verdicts(report)
    assert (told["model"], told["context"]) == ("unknown", "warn")
    refused = f"256 tokens are refused (HTTP 400: too long), {LONGEST['sglang']} are scored"
    assert refused in found(report, "context")
    assert report.usable


async def test_a_context_that_is_shorter_than_told_is_measured() -> None:
    server = Server()
    server.longest = 171
    assert "(HTTP 400: too long), 171 are scored" in found(await look(server), "context")


async def test_load_grows_until_the_server_refuses_and_its_way_of_refusing_is_told() -> None:
    busy = httpx.Response(503, json={"message": "full"}, headers={"retry-after": "2"})
    server = Server(lie=lambda server, body, answer: busy if server.in_flight > 2 else None)
    async with httpx.AsyncClient(transport=server) as http:
        levels, failures = await measure_levels(
            Asker(http, "http://one", "sglang", VOCAB_SIZE),
            probe_text(Letters()),
            32,
            max_concurrency=64,
            level_s=0.02,
        )
    assert [level.concurrency for level in levels] == [1, 2, 4]
    assert [level.errors > 0 for level in levels] == [False, False, True]
    throughput = check_throughput(levels, failures)
    assert throughput.verdict == "warn"
    assert "at 4 at once" in throughput.found
    assert "(HTTP 503: full)" in throughput.found
    assert check_refusal(failures, 4).found == "HTTP 503 with Retry-After: 2"


async def test_load_grows_no_further_when_it_brings_nothing_more() -> None:
    one_at_a_time = asyncio.Lock()

    class Narrow(Server):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            async with one_at_a_time:
                return await super().handle_async_request(request)

    report = await look(Narrow(), max_concurrency=2**20, level_s=0.2)
    assert 3 <= len(report.levels) < 10


# ------------------------------------------------------------------ keys, health, reach


async def test_a_key_that_guards_the_server_passes() -> None:
    server = Server()
    server.key = "sk-1"
    report = await look(server, api_key="sk-1")
    assert report.usable
    assert "a wrong one is refused (401)" in found(report, "key")


async def test_a_key_that_nobody_checks_is_warned_of() -> None:
    report = await look(Server(), api_key="sk-1")
    assert verdicts(report)["key"] == "warn"
    assert report.usable


@pytest.mark.parametrize(("key", "told"), [(None, "--key env:NAME"), ("other", "is refused")])
async def test_without_the_right_key_nothing_else_is_tried(key: str | None, told: str) -> None:
    server = Server()
    server.key = "sk-1"
    report = await look(server, api_key=key)
    assert told in found(report, "key")
    assert [*verdicts(report)] == ["health", "key"]
    assert not report.usable
    assert "sk-1" not in report.to_json()


@pytest.mark.parametrize(
    ("status", "told"), [(503, "look at its log"), (404, "is --backend right")]
)
async def test_an_unhealthy_server_is_not_probed_further(status: int, told: str) -> None:
    server = Server()
    server.health = status
    report = await look(server)
    assert told in found(report, "health")
    assert "rows" not in verdicts(report)


async def test_nobody_there_is_no_report() -> None:
    class Nobody(Server):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("connection refused")

    with pytest.raises(ServingError, match=r"nobody answers at http://one .*refused"):
        await look(Nobody())


# ------------------------------------------------------------------ what is sent


def test_the_text_has_no_special_tokens_and_none_beyond_the_vocabulary() -> None:
    text = probe_text(Letters(), 40)
    assert text.english
    assert text.tokenizer_size == VOCAB_SIZE
    assert 0 < min(text.ids) <= max(text.ids) < 40
    assert text.piece(5, len(text.ids) - 2) == [*text.ids[-2:], *text.ids[:3]]


class Digits(Letters):
    """Knows no letters, as a tokenizer of sums."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        raise ValueError("missing [UNK] token")


async def test_a_tokenizer_without_english_leaves_its_meaning_open() -> None:
    report = await look(Server(), Digits())
    assert verdicts(report)["tokenizer"] == "unknown"
    assert report.usable


def test_a_tokenizer_without_ordinary_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 6 ordinary tokens"):
        probe_text(Digits(), 7)


# ------------------------------------------------------------------ connections


@pytest.mark.parametrize("closes", [True, False])
async def test_what_happens_to_connections_is_told(closes: bool) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST"):
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            if not closes:
                assert json.loads(await reader.readexactly(length)) == {"input_ids": [1]}
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            if not closes:
                await reader.read()  # until the client goes
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        idle, slow = await check_connections(
            f"http://127.0.0.1:{port}",
            "/health",
            {"authorization": "Bearer k"},
            b'{"input_ids": [1]}',
            idle_limit_s=0.3,
            slow_s=0.05,
        )
    assert idle.found.startswith("closed by the server after 0.0 s" if closes else "still open")
    assert slow.verdict == ("warn" if closes else "pass")
