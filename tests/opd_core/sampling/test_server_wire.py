"""The sampling request and its answer: every check of both servers' forms."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd_core.config import Backend
from opd_core.errors import SamplingError
from opd_core.sampling.protocol import Completion, SampleRequest
from opd_core.sampling.server_wire import (
    ServerLost,
    check_sendable,
    parse_completion,
    sample_body,
)

VOCAB_SIZE = 32
END = 1
REQUEST = SampleRequest((3, 0), (2, 5, 6), 7, max_new_tokens=8, stop_ids=(9,))


def answer(
    backend: Backend,
    ids: list[Any],
    *,
    finish: Any = "stop",
    version: str = "7",
    **meta: Any,
) -> dict[str, Any]:
    """What a server writes, as captured from SGLang 0.5.23 and read in LMDeploy 0.18."""
    rows = [[-0.5 - position, token] for position, token in enumerate(ids)]
    if backend == "lmdeploy":
        more: dict[str, Any] = {"finish_reason": {"type": finish}}
        more["output_token_logprobs"] = rows or None
    else:
        more = {"finish_reason": {"type": finish, "matched": 1}, "weight_version": version}
        more["output_token_logprobs"] = [[*row, None] for row in rows]
        more["weight_versions"] = [{"version": version, "start": 0, "end": len(ids)}]
    return {"text": "", "output_ids": ids, "meta_info": more | meta}


def parse(backend: Backend, said: Any, request: SampleRequest = REQUEST) -> Completion:
    body = said if isinstance(said, bytes) else orjson.dumps(said)
    return parse_completion(
        backend, body, request, end_ids=(END,), vocab_size=VOCAB_SIZE, policy_version=7
    )


both = pytest.mark.parametrize("backend", ["sglang", "lmdeploy"])


def test_sglang_is_asked_for_the_plain_distribution_and_told_where_to_stop() -> None:
    body = json.loads(sample_body("sglang", REQUEST, (END,)))
    assert body["input_ids"] == [2, 5, 6]
    assert body["return_logprob"] is True
    assert body["logprob_start_len"] == -1
    assert body["sampling_params"] == {
        "max_new_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [END, 9],
        "skip_special_tokens": False,
    }


def test_lmdeploy_gets_its_settings_at_the_top_and_keeps_the_stop_token() -> None:
    body = json.loads(sample_body("lmdeploy", REQUEST, (END,)))
    assert body["max_tokens"] == 8
    assert body["top_k"] == 0
    assert (body["top_p"], body["min_p"], body["repetition_penalty"]) == (1.0, 0.0, 1.0)
    assert body["stop_token_ids"] == [END, 9]
    assert body["include_stop_str_in_output"] is True
    assert "logprob_start_len" not in body
    assert "sampling_params" not in body


@both
def test_the_end_token_belongs_to_the_response(backend: Backend) -> None:
    completion = parse(backend, answer(backend, [5, 6, END]))
    assert completion == Completion((5, 6, END), (-0.5, -1.5, -2.5), (7, 7, 7), "stop")


@both
def test_a_stop_id_of_the_request_ends_it_too(backend: Backend) -> None:
    assert parse(backend, answer(backend, [5, 9])).finish_reason == "stop"


@both
def test_an_interrupted_request_gives_what_it_has(backend: Backend) -> None:
    completion = parse(backend, answer(backend, [5, 6], finish="abort"))
    assert completion == Completion((5, 6), (-0.5, -1.5), (7, 7), "abort")
    assert parse(backend, answer(backend, [], finish="abort")) == Completion((), (), (), "abort")


@both
@pytest.mark.parametrize(("ids", "reason"), [([5, END], "stop"), ([5] * 8, "length")])
def test_an_interrupted_request_that_was_done_is_not_continued(
    backend: Backend, ids: list[int], reason: str
) -> None:
    assert parse(backend, answer(backend, ids, finish="abort")).finish_reason == reason


@both
def test_an_answer_cut_before_its_limit_names_the_context_length(backend: Backend) -> None:
    with pytest.raises(SamplingError, match=r"2 of 8 tokens.*context") as caught:
        parse(backend, answer(backend, [5, 6], finish="length"))
    assert not isinstance(caught.value, ServerLost)


@both
def test_an_end_token_that_the_student_has_not_is_named(backend: Backend) -> None:
    with pytest.raises(SamplingError, match=r"id 6.*\[1, 9\]") as caught:
        parse(backend, answer(backend, [5, 6], finish="stop"))
    assert not isinstance(caught.value, ServerLost)


BAD_ROWS: dict[str, list[Any]] = {
    "too few": [[-0.5, 5]],
    "too many": [[-0.5, 5], [-0.5, 1], [-0.5, 1]],
    "other id": [[-0.5, 5], [-0.5, 2]],
    "true is no id": [[-0.5, 5], [-0.5, True]],
    "above zero": [[-0.5, 5], [0.01, 1]],
    "null": [[-0.5, 5], [None, 1]],
    "true is no number": [[-0.5, 5], [False, 1]],
    "text": [[-0.5, 5], ["-0.5", 1]],
    "short row": [[-0.5, 5], [-0.5]],
    "no row": [[-0.5, 5], -0.5],
}


@both
@pytest.mark.parametrize("rows", BAD_ROWS.values(), ids=BAD_ROWS)
def test_rows_that_fail_a_check_give_no_numbers(backend: Backend, rows: list[Any]) -> None:
    with pytest.raises(ServerLost):
        parse(backend, answer(backend, [5, END], output_token_logprobs=rows))


@both
def test_a_logprob_rounded_just_above_zero_is_taken(backend: Backend) -> None:
    said = answer(backend, [END], output_token_logprobs=[[0.0005, END]])
    assert parse(backend, said).rollout_logprobs == (0.0005,)


@both
@pytest.mark.parametrize("ids", [[5, VOCAB_SIZE], [-1, END], [5] * 9])
def test_ids_outside_the_vocabulary_and_tokens_too_many_are_refused(
    backend: Backend, ids: list[int]
) -> None:
    with pytest.raises(ServerLost):
        parse(backend, answer(backend, ids, finish="length"))


@both
def test_tokens_without_logprobs_are_refused(backend: Backend) -> None:
    with pytest.raises(ServerLost, match="2 rows"):
        parse(backend, answer(backend, [5, END], output_token_logprobs=None))


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": "default", "start": 0, "end": 2}],
        [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 2}],
        [{"version": "7", "start": 0, "end": 1}],
        [{"version": "7", "start": 0, "end": 10**15}],
        [],
        "7",
        [{"version": ["7"], "start": 0, "end": 2}],
    ],
)
def test_tokens_of_other_weights_are_refused(spans: Any) -> None:
    with pytest.raises(ServerLost, match="last given were '7'"):
        parse("sglang", answer("sglang", [5, END], weight_versions=spans))


def test_a_server_that_tells_one_version_is_held_to_it() -> None:
    said = answer("sglang", [5, END], weight_versions=None)
    assert parse("sglang", said).policy_versions == (7, 7)
    said["meta_info"]["weight_version"] = "default"
    with pytest.raises(ServerLost, match="default"):
        parse("sglang", said)


def test_no_tokens_are_of_no_weights() -> None:
    assert parse("sglang", answer("sglang", [], finish="abort", version="6")).response_ids == ()


@both
@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b'{"output_ids": [1]}', b'{"meta_info": {}}', b"[" * 900 + b"]" * 900],
)
def test_what_is_no_answer_is_refused(backend: Backend, body: bytes) -> None:
    with pytest.raises(ServerLost):
        parse(backend, body)


@both
@pytest.mark.parametrize("finish", ["error", None, ["stop"]])
def test_an_end_that_no_one_knows_is_refused(backend: Backend, finish: Any) -> None:
    with pytest.raises(ServerLost):
        parse(backend, answer(backend, [5, END], finish_reason={"type": finish}))


@both
@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (SampleRequest((3, 0), (), 7, 8), "at least one token"),
        (SampleRequest((3, 0), (5, VOCAB_SIZE), 7, 8), "id 32"),
        (SampleRequest((3, 0), (5, -1), 7, 8), "id -1"),
        (SampleRequest((3, 0), (5,), 7, 0), "max_new_tokens"),
    ],
)
def test_what_would_end_a_server_is_not_sent(
    backend: Backend, request_: SampleRequest, said: str
) -> None:
    with pytest.raises(SamplingError, match=said):
        check_sendable(request_, VOCAB_SIZE)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 40) | st.floats(-9, 1) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@both
@given(
    key=st.sampled_from(["output_token_logprobs", "finish_reason", "weight_versions"]),
    value=json_values,
)
def test_whatever_stands_in_a_field_only_sampling_errors_come_out(
    backend: Backend, key: str, value: Any
) -> None:
    try:
        completion = parse(backend, answer(backend, [5, END], **{key: value}))
    except SamplingError:
        return
    assert completion.response_ids == (5, END)
    assert all(logprob <= 1e-3 for logprob in completion.rollout_logprobs)
