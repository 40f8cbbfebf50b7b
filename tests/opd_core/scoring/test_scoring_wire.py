"""Both wire formats: what is asked, what an honest answer means, and that nothing else passes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from opd_core.errors import TeacherAnswerError, TeacherRefused, TeacherTransient
from opd_core.scoring.wire import Answer, error_of_status, parse_answer, request_body

BACKENDS = ["sglang", "lmdeploy", "embedded"]
Honest = Callable[[str, Sequence[int], int], dict[str, Any]]
TrueLogprobs = Callable[[Sequence[int], int], tuple[float, ...]]

IDS = [11, 12, 13, 14, 15, 16, 17]
START = 2  # P = 3, R = 4


@pytest.fixture
def judge_answer(vocab_size: int) -> Callable[..., tuple[float, ...]]:
    """``judge_answer(backend, answer, ids, start)`` of an answer as data."""

    def judge(
        backend: Any, answer: Any, ids: Sequence[int] = IDS, start: int = START
    ) -> tuple[float, ...]:
        body = json.dumps(answer).encode()
        return parse_answer(backend, body, ids, start, vocab_size).logprobs

    return judge


# -------------------------------------------------------------------------------------- the request


def test_sglang_is_asked_in_its_own_words() -> None:
    assert json.loads(request_body("sglang", (1, 2, 3), 1)) == {
        "input_ids": [1, 2, 3],
        "return_logprob": True,
        "logprob_start_len": 1,
        "top_logprobs_num": 0,
        "stream": False,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0, "skip_special_tokens": False},
    }


def test_the_embedded_server_is_asked_like_sglang() -> None:
    assert request_body("embedded", [1, 2], 0) == request_body("sglang", [1, 2], 0)


def test_lmdeploy_is_asked_for_zero_tokens_at_the_top_level() -> None:
    assert json.loads(request_body("lmdeploy", (1, 2, 3), 1)) == {
        "input_ids": [1, 2, 3],
        "return_logprob": True,
        "logprob_start_len": 1,
        "top_logprobs_num": 0,
        "stream": False,
        "max_tokens": 0,
    }


# ---------------------------------------------------------------------------- an answer that is one


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("start", [0, 2, 5])
def test_an_honest_answer_gives_the_logprobs_after_start(
    backend: str, start: int, honest_answer: Honest, true_logprobs: TrueLogprobs, judge_answer: Any
) -> None:
    answer = honest_answer(backend, IDS, start)
    assert judge_answer(backend, answer, IDS, start) == true_logprobs(IDS, start)


def test_the_captured_sglang_answer_is_read(vocab_size: int) -> None:
    body = b"""{"text":"","output_ids":[],"meta_info":{"id":"5ffc","finish_reason":{"type":"length",
        "length":0},"prompt_tokens":4,"cached_tokens":1,"input_token_logprobs":[[null,6,null],
        [-8.778090476989746,7,null],[-5.152050018310547,8,null]],"output_token_logprobs":[]}}"""
    answer = parse_answer("sglang", body, [5, 6, 7, 8], 1, vocab_size)
    assert answer == Answer((-8.778090476989746, -5.152050018310547), cached_tokens=1)


def test_the_captured_lmdeploy_answer_is_read(vocab_size: int) -> None:
    body = b"""{"text":"","output_ids":[],"meta_info":{"prompt_tokens":4,"completion_tokens":0,
        "finish_reason":{"type":"length"},"output_token_logprobs":null,"input_token_logprobs":
        [[-8.778090476989746,7],[-5.152050018310547,8]],"routed_experts":null}}"""
    answer = parse_answer("lmdeploy", body, [5, 6, 7, 8], 1, vocab_size)
    assert answer == Answer((-8.778090476989746, -5.152050018310547), cached_tokens=None)


def test_an_answer_of_the_other_server_is_a_wrong_row_count(
    honest_answer: Honest, judge_answer: Any
) -> None:
    for backend, other in [("sglang", "lmdeploy"), ("lmdeploy", "sglang")]:
        with pytest.raises(TeacherAnswerError, match=r"expected \d rows") as caught:
            judge_answer(backend, honest_answer(other, IDS, START))
        assert caught.value.cause == "row_count"


def test_sglang_may_echo_the_last_id_as_0_and_no_other_server_may(
    honest_answer: Honest, true_logprobs: TrueLogprobs, judge_answer: Any, vocab_size: int
) -> None:
    ids = [1, 2, vocab_size - 1, 4]
    quirky = honest_answer("sglang", ids, 0)
    assert quirky["meta_info"]["input_token_logprobs"][2][1] == 0
    assert judge_answer("sglang", quirky, ids, 0) == true_logprobs(ids, 0)
    with pytest.raises(TeacherAnswerError, match="of id 0, sent was 99"):
        judge_answer("embedded", quirky, ids, 0)
    plain = honest_answer("lmdeploy", ids, 0)
    plain["meta_info"]["input_token_logprobs"][1][1] = 0
    with pytest.raises(TeacherAnswerError, match="of id 0, sent was 99"):
        judge_answer("lmdeploy", plain, ids, 0)


def test_sglang_may_echo_no_other_id_as_0(honest_answer: Honest, judge_answer: Any) -> None:
    answer = honest_answer("sglang", IDS, START)
    answer["meta_info"]["input_token_logprobs"][1][1] = 0
    with pytest.raises(TeacherAnswerError, match="of id 0, sent was 14"):
        judge_answer("sglang", answer)


def test_a_logprob_that_was_rounded_just_above_0_is_accepted(
    honest_answer: Honest, judge_answer: Any
) -> None:
    answer = honest_answer("lmdeploy", IDS, START)
    answer["meta_info"]["input_token_logprobs"][1][0] = 0.9e-3
    answer["meta_info"]["input_token_logprobs"][2][0] = 0  # JSON may spell it as an integer
    assert judge_answer("lmdeploy", answer)[1:3] == (0.9e-3, 0.0)


@pytest.mark.parametrize("told", [None, -1, True, 2.0, "2", [2], 2**64])
def test_a_cached_tokens_that_is_no_count_is_no_reason_to_refuse(
    told: Any, honest_answer: Honest, vocab_size: int
) -> None:
    answer = honest_answer("sglang", IDS, START)
    answer["meta_info"]["cached_tokens"] = told
    body = json.dumps(answer).encode()
    assert parse_answer("sglang", body, IDS, START, vocab_size).cached_tokens is None


# ------------------------------------------------------------------------- answers that are refused


def _rows(answer: dict[str, Any]) -> list[Any]:
    rows: list[Any] = answer["meta_info"]["input_token_logprobs"]
    return rows


BAD_ROWS: dict[str, tuple[Callable[[list[Any]], object], str]] = {
    "one row less": (lambda rows: rows.pop(), "row_count"),
    "one row more": (lambda rows: rows.append(rows[-1]), "row_count"),
    "no rows": (lambda rows: rows.clear(), "row_count"),
    "another id": (lambda rows: rows[-1].__setitem__(1, 18), "ids"),
    "two rows exchanged": (lambda rows: rows.insert(-1, rows.pop()), "ids"),
    "id is text": (lambda rows: rows[-1].__setitem__(1, "17"), "ids"),
    "id has a point": (lambda rows: rows[-1].__setitem__(1, 17.0), "ids"),
    "id is null": (lambda rows: rows[-1].__setitem__(1, None), "ids"),
    "logprob is null": (lambda rows: rows[-1].__setitem__(0, None), "null"),
    "logprob is true": (lambda rows: rows[-1].__setitem__(0, True), "null"),
    "logprob is false": (lambda rows: rows[-1].__setitem__(0, False), "null"),
    "logprob is text": (lambda rows: rows[-1].__setitem__(0, "-0.5"), "null"),
    "logprob is a list": (lambda rows: rows[-1].__setitem__(0, [-0.5]), "null"),
    "logprob above 0": (lambda rows: rows[-1].__setitem__(0, 1.1e-3), "value"),
    "logprob is a raw logit": (lambda rows: rows[-1].__setitem__(0, 17), "value"),
    "row is null": (lambda rows: rows.__setitem__(-1, None), "shape"),
    "row is a record": (lambda rows: rows.__setitem__(-1, {"logprob": -1, "id": 17}), "shape"),
    "row is too short": (lambda rows: rows.__setitem__(-1, [-0.5]), "shape"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_refused(
    backend: str, name: str, honest_answer: Honest, judge_answer: Any
) -> None:
    spoil, cause = BAD_ROWS[name]
    answer = honest_answer(backend, IDS, START)
    spoil(_rows(answer))
    with pytest.raises(TeacherAnswerError) as caught:
        judge_answer(backend, answer)
    assert caught.value.cause == cause


@pytest.mark.parametrize("backend", BACKENDS)
def test_true_is_not_the_id_1(backend: str, honest_answer: Honest, judge_answer: Any) -> None:
    answer = honest_answer(backend, [3, 2, 1], 0)
    _rows(answer)[-1][1] = True
    with pytest.raises(TeacherAnswerError, match="of id True, sent was 1"):
        judge_answer(backend, answer, [3, 2, 1], 0)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
def test_a_number_that_is_none_makes_the_answer_no_json(
    literal: str, honest_answer: Honest, vocab_size: int
) -> None:
    answer = honest_answer("lmdeploy", IDS, START)
    _rows(answer)[1][0] = 12345.0
    body = json.dumps(answer).replace("12345.0", literal).encode()
    with pytest.raises(TeacherAnswerError, match="not JSON") as caught:
        parse_answer("lmdeploy", body, IDS, START, vocab_size)
    assert caught.value.cause == "not_json"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_server_that_lost_its_weights_is_found_out(
    backend: str, honest_answer: Honest, judge_answer: Any, vocab_size: int
) -> None:
    answer = honest_answer(backend, IDS, START)
    for row in _rows(answer)[-4:]:
        row[0] = -math.log(vocab_size) + 5e-5
    with pytest.raises(TeacherAnswerError, match="lost its weights") as caught:
        judge_answer(backend, answer)
    assert caught.value.cause == "uniform"
    _rows(answer)[-1][0] = -0.5  # one token that is not uniform is enough
    assert len(judge_answer(backend, answer)) == 4


def _alike(common: float, ids: Sequence[int]) -> bytes:
    """An answer of LMDeploy whose logprobs differ by less than anyone would notice."""
    rows = [[common + i % 3 * 2e-5, token] for i, token in enumerate(ids[1:])]
    return json.dumps({"meta_info": {"input_token_logprobs": rows}}).encode()


@pytest.mark.parametrize("common", [-1.1, -11.93, -40.0])
def test_lost_weights_are_found_out_whatever_the_servers_vocabulary(
    common: float, vocab_size: int
) -> None:
    ids = [1, 2, 3, 4, 5, 2, 3, 4, 5]
    with pytest.raises(TeacherAnswerError, match="though the ids differ") as caught:
        parse_answer("lmdeploy", _alike(common, ids), ids, 0, vocab_size)
    assert caught.value.cause == "uniform"


@pytest.mark.parametrize(
    ("common", "ids"),
    [
        pytest.param(-9e-5, [*range(30)], id="a text known by heart"),
        pytest.param(0.0, [*range(30)], id="a text known by heart, rounded"),
        pytest.param(-0.69, [*range(30)], id="two ways to go, every time"),
        pytest.param(-2.3, [1, 2, 3, 1, 2, 3, 1, 2, 3, 1], id="a loop over three ids"),
        pytest.param(-2.3, [*range(8)], id="too short to tell"),
    ],
)
def test_a_sound_answer_may_have_nearly_equal_logprobs(
    common: float, ids: list[int], vocab_size: int
) -> None:
    logprobs = parse_answer("lmdeploy", _alike(common, ids), ids, 0, vocab_size).logprobs
    assert logprobs == pytest.approx([common] * (len(ids) - 1), abs=5e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reason", ["abort", "error"])
@pytest.mark.parametrize("nested", [True, False])
def test_an_abort_inside_an_http_200_is_worth_a_retry(
    backend: str, reason: str, nested: bool, honest_answer: Honest, judge_answer: Any
) -> None:
    answer = honest_answer(backend, IDS, START)
    answer["meta_info"]["finish_reason"] = {"type": reason} if nested else reason
    with pytest.raises(TeacherTransient, match="ended the request itself") as caught:
        judge_answer(backend, answer)
    assert caught.value.cause == "abort"


@pytest.mark.parametrize("body", [b"", b"<html>502</html>", b"\xff\xfe", b"{", b"[" * 5000])
def test_a_body_that_is_no_json_is_refused(body: bytes, vocab_size: int) -> None:
    with pytest.raises(TeacherAnswerError) as caught:
        parse_answer("sglang", body, IDS, START, vocab_size)
    assert caught.value.cause == "not_json"


@pytest.mark.parametrize(
    "answer",
    [
        None,
        7,
        "text",
        [],
        [{"meta_info": {"input_token_logprobs": [[None, 13], [-1, 14], [-1, 15]]}}],
        {},
        {"meta_info": None},
        {"meta_info": []},
        {"meta_info": {}},
        {"meta_info": {"input_token_logprobs": None}},
        {"meta_info": {"input_token_logprobs": {"0": [-1, 2]}}},
        {"meta_info": {"input_token_logprobs": "rows"}},
    ],
)
def test_an_answer_of_another_shape_is_refused(answer: Any, judge_answer: Any) -> None:
    with pytest.raises(TeacherAnswerError) as caught:
        judge_answer("sglang", answer)
    assert caught.value.cause == "shape"


@pytest.mark.parametrize("place", ["answer", "meta", "finish", "rows", "row", "logprob", "id"])
@pytest.mark.parametrize("depth", [900, 1015, 1100])
def test_depth_never_breaks_the_refusal(
    place: str, depth: int, honest_answer: Honest, vocab_size: int
) -> None:
    answer = honest_answer("lmdeploy", IDS, START)
    match place:
        case "answer":
            answer = "DEEP"
        case "meta":
            answer["meta_info"] = "DEEP"
        case "finish":
            answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "DEEP"}
        case "rows":
            answer["meta_info"]["input_token_logprobs"] = {"0": "DEEP"}
        case "row":
            _rows(answer)[0] = ["DEEP"]
        case "logprob" | "id":
            _rows(answer)[0][place == "id"] = "DEEP"
    deep = "[" * depth + "]" * depth
    body = json.dumps(answer).replace('"DEEP"', deep).encode()
    with pytest.raises((TeacherAnswerError, TeacherTransient)) as caught:
        parse_answer("lmdeploy", body, IDS, START, vocab_size)
    assert len(str(caught.value)) < 500


# ------------------------------------------------------------------------------------ HTTP statuses


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 301])
def test_a_status_that_blames_the_request_is_final(status: int) -> None:
    error = error_of_status(status, b"", None)
    assert isinstance(error, TeacherRefused)
    assert error.cause == f"http_{status}"


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 507])
def test_a_status_that_blames_the_server_is_worth_a_retry(status: int) -> None:
    error = error_of_status(status, b"", None)
    assert isinstance(error, TeacherTransient)
    assert error.cause == f"http_{status}"


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": {"message": "too many ids"}}',
        b'{"error": "too many ids"}',
        b'{"object": "error", "message": "too many ids", "code": 400}',
        b'{"detail": "too many ids"}',
        b'"too many ids"',
        b"too many ids",
    ],
)
def test_the_servers_own_words_are_kept_whatever_their_shape(body: bytes) -> None:
    assert str(error_of_status(400, body, None)) == "HTTP 400: too many ids"


def test_a_long_or_unreadable_error_page_is_cut_not_raised() -> None:
    assert len(str(error_of_status(500, b"\xff" * 10_000, None))) < 400
    assert len(str(error_of_status(500, json.dumps({"error": "x" * 10_000}).encode(), None))) < 400
    assert str(error_of_status(502, b"", None)) == "HTTP 502: (no body)"


@pytest.mark.parametrize("shape", ["%s", '{"error": {"message": %s}}', '{"detail": %s}', "[%s, 1]"])
def test_a_deep_error_page_is_cut_not_raised(shape: str) -> None:
    deep = (shape % ("[" * 1000 + "7" + "]" * 1000)).encode()
    assert str(error_of_status(500, deep, None)).startswith("HTTP 500: [[")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("3", 3.0),
        ("0", 0.0),
        ("1.5", 1.5),
        (None, None),
        ("soon", None),
        ("-1", None),
        ("nan", None),
        ("inf", None),
        ("Wed, 21 Oct 2015 07:28:30 GMT", 30.0),
        ("Wednesday, 21-Oct-15 07:29:00 GMT", 60.0),
        ("Wed Oct 21 07:28:02 2015", 2.0),
        ("Wed, 21 Oct 2015 09:28:30 +0200", 30.0),
        ("Wed, 21 Oct 2015 07:27:59 GMT", 0.0),
        ("Wed, 21 Oct 99999 07:28:00 GMT", None),
        ("Wed, 32 Oct 2015 07:28:00 GMT", None),
        ("Wed, 21 Oct 2015 07:28:00 +" + "9" * 30, None),
        ("", None),
    ],
)
def test_retry_after_is_read_in_seconds_from_now_or_not_at_all(
    header: str | None, seconds: float | None
) -> None:
    clock = 1445412480.0  # 2015-10-21 07:28:00 GMT
    error = error_of_status(429, b"", header, now=lambda: clock)
    assert isinstance(error, TeacherTransient)
    assert error.retry_after_s == seconds
