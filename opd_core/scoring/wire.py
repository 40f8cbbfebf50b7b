"""The scoring request and its answer, as SGLang and LMDeploy write them.

A request scores ``token_ids[start + 1:]``: both servers give the logprob of token i from the row
of position i, and position ``start`` itself has none (SGLang sends a null row for it, LMDeploy
no row). With ``start = P - 1`` the rows are exactly the R response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import orjson

from opd_core.config import Backend
from opd_core.errors import TeacherAnswerError, TeacherRefused, TeacherTransient

RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})
ABOVE_ZERO = 1e-3
"""Servers round: a logprob may be this much above 0 before it is called wrong."""
UNIFORM_TOLERANCE = 1e-4


def build_request(backend: Backend, token_ids: Sequence[int], start: int) -> dict[str, Any]:
    """The JSON body that asks for the logprobs of ``token_ids[start + 1:]`` and generates
    nothing."""
    body: dict[str, Any] = {
        "input_ids": list(token_ids),
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": 0,
        "stream": False,
    }
    if backend == "lmdeploy":
        return body | {"max_tokens": 0}
    sampling = {"max_new_tokens": 0, "temperature": 0, "skip_special_tokens": False}
    return body | {"sampling_params": sampling}


def parse_answer(
    backend: Backend, body: bytes, token_ids: Sequence[int], start: int, vocab_size: int
) -> tuple[float, ...]:
    """The logprobs of ``token_ids[start + 1:]``, or an error; never a number that failed a check.

    Raises :class:`TeacherAnswerError` (wrong for good) or :class:`TeacherTransient` (the server
    itself says that it aborted).
    """
    meta = _meta_info(body)
    rows = meta.get("input_token_logprobs")
    expected = token_ids[start + 1 :]
    if not isinstance(rows, list):
        raise TeacherAnswerError(f"input_token_logprobs is {rows!r:.80}, not a list", "shape")
    if backend != "lmdeploy":
        if len(rows) != len(expected) + 1:
            raise _wrong_count(len(expected) + 1, len(rows))
        rows = rows[1:]
    elif len(rows) != len(expected):
        raise _wrong_count(len(expected), len(rows))
    echo_quirk = vocab_size - 1 if backend == "sglang" else -1
    logprobs = tuple(
        _logprob(row, token, position, echo_quirk)
        for position, (row, token) in enumerate(zip(rows, expected, strict=True))
    )
    uniform = -math.log(vocab_size)
    if len(logprobs) > 1 and all(abs(x - uniform) < UNIFORM_TOLERANCE for x in logprobs):
        raise TeacherAnswerError(
            f"all {len(logprobs)} logprobs are -ln({vocab_size}): the server lost its weights",
            "uniform",
        )
    return logprobs


def error_of_status(
    status: int, body: bytes, retry_after: str | None
) -> TeacherRefused | TeacherTransient:
    """The error that an HTTP status stands for; the server's own words are kept."""
    said = _server_message(body)
    if status in RETRYABLE or status >= 500:
        return TeacherTransient(
            f"HTTP {status}: {said}", f"http_{status}", _retry_after_s(retry_after)
        )
    return TeacherRefused(f"HTTP {status}: {said}", f"http_{status}")


def _meta_info(body: bytes) -> dict[str, Any]:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise TeacherAnswerError(f"the answer is not JSON ({error})", "not_json") from None
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise TeacherAnswerError(f"the answer has no meta_info: {body[:200]!r}", "shape")
    finish = meta.get("finish_reason")
    reason = finish.get("type") if isinstance(finish, dict) else finish
    if reason in ("abort", "error"):
        raise TeacherTransient(f"the server ended the request itself: {finish!r:.200}", "abort")
    return meta


def _wrong_count(expected: int, got: int) -> TeacherAnswerError:
    return TeacherAnswerError(
        f"expected {expected} rows of input_token_logprobs, got {got}", "row_count"
    )


def _logprob(row: Any, token: int, position: int, echo_quirk: int) -> float:
    if not isinstance(row, list) or len(row) < 2:
        raise TeacherAnswerError(f"row {position} is {row!r:.80}, not [logprob, id]", "shape")
    value, echoed = row[0], row[1]
    # SGLang echoes the last id of the vocabulary as 0; its logprob is right.
    as_sent = echoed == token or (echoed == 0 and token == echo_quirk)
    if not as_sent or isinstance(echoed, bool):
        raise TeacherAnswerError(f"row {position} is of id {echoed!r:.80}, sent was {token}", "ids")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TeacherAnswerError(f"row {position} has logprob {value!r:.80}", "null")
    if not math.isfinite(value) or value > ABOVE_ZERO:
        raise TeacherAnswerError(f"row {position} has logprob {value}, expected <= 0", "value")
    return float(value)


def _server_message(body: bytes) -> str:
    """The three error shapes that the servers use, or the text itself."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:300].decode("utf-8", "replace") or "(no body)"
    if not isinstance(answer, dict):
        return str(answer)[:300]
    error = answer.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or answer.get("message") or answer.get("detail") or answer)[:300]


def _retry_after_s(value: str | None) -> float | None:
    try:
        seconds = float(value) if value is not None else None
    except ValueError:
        return None  # an HTTP date: our own back-off serves as well
    return seconds if seconds is not None and 0 <= seconds < math.inf else None
