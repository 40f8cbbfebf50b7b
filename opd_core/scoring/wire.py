"""The scoring request and its answer, as SGLang and LMDeploy write them.

A request scores ``token_ids[start + 1:]``: both servers give the logprob of token i from the row
of position i, and position ``start`` itself has none (SGLang sends a null row for it, LMDeploy
no row). With ``start = P - 1`` the rows are exactly the R response tokens.

Whatever bytes a server sends, nothing but a :class:`ScoringError` comes out of here.
"""

from __future__ import annotations

import math
import reprlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any

import orjson

from opd_core.config import Backend
from opd_core.errors import TeacherAnswerError, TeacherRefused, TeacherTransient

RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})
ABOVE_ZERO = 1e-3
"""Servers round: a logprob may be this much above 0 before it is called wrong."""
_NUMBERS = {int, float}
UNIFORM_TOLERANCE = 1e-4
UNIFORM_ROWS, UNIFORM_IDS, UNIFORM_BELOW = 8, 4, -1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Logprobs of the scored tokens, in nats, and how many tokens of the sequence the server had in
    its prefix cache (None where it does not tell)."""

    logprobs: tuple[float, ...]
    cached_tokens: int | None


def request_body(backend: Backend, token_ids: Sequence[int], start: int) -> bytes:
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
        body["max_tokens"] = 0
    else:
        sampling = {"max_new_tokens": 0, "temperature": 0, "skip_special_tokens": False}
        body["sampling_params"] = sampling
    return orjson.dumps(body)


def parse_answer(
    backend: Backend, body: bytes, token_ids: Sequence[int], start: int, vocab_size: int
) -> Answer:
    """The logprobs of ``token_ids[start + 1:]``, or an error; never a number that failed a check.

    Raises :class:`TeacherAnswerError` (wrong for good) or :class:`TeacherTransient` (the server
    itself says that it aborted).
    """
    meta = _meta_info(body)
    rows = meta.get("input_token_logprobs")
    expected = list(token_ids[start + 1 :])
    if not isinstance(rows, list):
        raise TeacherAnswerError(f"input_token_logprobs is {_shown(rows)}, not a list", "shape")
    boundary_rows = 0 if backend == "lmdeploy" else 1
    if len(rows) != len(expected) + boundary_rows:
        raise _wrong_count(len(expected) + boundary_rows, len(rows))
    rows = rows[boundary_rows:]
    logprobs = _flawless(rows, expected)
    if logprobs is None:
        echo_quirk = vocab_size - 1 if backend == "sglang" else -1
        logprobs = [
            _logprob(row, token, position, echo_quirk)
            for position, (row, token) in enumerate(zip(rows, expected, strict=True))
        ]
    _refuse_uniform(logprobs, expected, vocab_size)
    cached = meta.get("cached_tokens")
    return Answer(tuple(logprobs), cached if type(cached) is int and cached >= 0 else None)


def error_of_status(
    status: int, body: bytes, retry_after: str | None, *, now: Callable[[], float] = time.time
) -> TeacherRefused | TeacherTransient:
    """The error that an HTTP status stands for; the server's own words are kept.

    ``now`` (seconds since the epoch) is what a date in ``retry_after`` is compared with.
    """
    said = _server_message(body)
    if status in RETRYABLE or status >= 500:
        pause_s = _retry_after_s(retry_after, now)
        return TeacherTransient(f"HTTP {status}: {said}", f"http_{status}", pause_s)
    return TeacherRefused(f"HTTP {status}: {said}", f"http_{status}")


def _meta_info(body: bytes) -> dict[str, Any]:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise TeacherAnswerError(f"the answer is not JSON ({error})", "not_json") from None
    # A list, even of one answer, is what SGLang says to a list of sequences: it was not asked so.
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise TeacherAnswerError(f"the answer has no meta_info: {body[:200]!r}", "shape")
    finish = meta.get("finish_reason")
    reason = finish.get("type") if isinstance(finish, dict) else finish
    if reason in ("abort", "error"):
        raise TeacherTransient(
            f"the server ended the request itself: {_shown(finish, 200)}", "abort"
        )
    return meta


def _wrong_count(expected: int, got: int) -> TeacherAnswerError:
    return TeacherAnswerError(
        f"expected {expected} rows of input_token_logprobs, got {got}", "row_count"
    )


def _flawless(rows: list[Any], expected: list[int]) -> list[float] | None:
    """What :func:`_logprob` says of all rows, or None where any needs a closer look.

    Whole columns are compared at once, which is three times as fast. Nothing is made for a row on
    the way that the garbage collector would have to follow.
    """
    try:
        values = [row[0] for row in rows]
        ids = [row[1] for row in rows]
    except (TypeError, LookupError):  # no row, or too short; a text holds only texts
        return None
    if ids != expected or set(map(type, ids)) != {int} or not set(map(type, values)) <= _NUMBERS:
        return None
    sound = max(values) <= ABOVE_ZERO and math.isfinite(sum(values))
    return list(map(float, values)) if sound else None


def _logprob(row: Any, token: int, position: int, echo_quirk: int) -> float:
    if not isinstance(row, list) or len(row) < 2:
        raise TeacherAnswerError(f"row {position} is {_shown(row)}, not [logprob, id]", "shape")
    value, echoed = row[0], row[1]
    # SGLang echoes the last id of the vocabulary as 0; its logprob is right.
    same = echoed == token or (echoed == 0 and token == echo_quirk)
    if not same or type(echoed) is not int:  # True equals 1, and 1e-400 is read as 0.0
        raise TeacherAnswerError(
            f"row {position} is of id {_shown(echoed)}, sent was {token}", "ids"
        )
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TeacherAnswerError(f"row {position} has logprob {_shown(value)}", "null")
    if not math.isfinite(value) or value > ABOVE_ZERO:
        raise TeacherAnswerError(f"row {position} has logprob {value}, expected <= 0", "value")
    return float(value)


def _refuse_uniform(logprobs: list[float], token_ids: list[int], vocab_size: int) -> None:
    """A server that lost its weights gives every token of its vocabulary the same logprob.

    That is -ln(V) of its own V, which may be padded beyond the V that is known here, so many rows
    of several ids with one value are refused whatever the value.
    """
    said = "the server lost its weights"
    uniform = -math.log(vocab_size)
    if len(logprobs) > 1 and all(abs(x - uniform) < UNIFORM_TOLERANCE for x in logprobs):
        raise TeacherAnswerError(
            f"all {len(logprobs)} logprobs are -ln({vocab_size}): {said}", "uniform"
        )
    # What real answers could trip this? A text known by heart has all its logprobs near 0: far
    # above the limit, which no lost vocabulary of 3 or more reaches. A loop over up to three ids
    # can settle on one value: too few ids. Below the limit the model hesitates at every token, and
    # over several ids its hesitation is never alike to 1e-4.
    if (
        len(logprobs) >= UNIFORM_ROWS
        and logprobs[0] < UNIFORM_BELOW
        and all(abs(x - logprobs[0]) < UNIFORM_TOLERANCE for x in logprobs)
        and len(set(token_ids)) >= UNIFORM_IDS
    ):
        raise TeacherAnswerError(
            f"all {len(logprobs)} logprobs are {logprobs[0]:.4f} though the ids differ: {said}",
            "uniform",
        )


def _server_message(body: bytes) -> str:
    """The three error shapes that the servers use, or the text itself."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:300].decode("utf-8", "replace") or "(no body)"
    message = answer
    if isinstance(answer, dict):
        error = answer.get("error")
        message = error.get("message") if isinstance(error, dict) else error
        message = message or answer.get("message") or answer.get("detail") or answer
    return message[:300] if isinstance(message, str) else _shown(message, 300)


def _retry_after_s(value: str | None, now: Callable[[], float]) -> float | None:
    """Seconds to wait, from a number of seconds or from an HTTP date (0 where it is past)."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        return _seconds_until(value, now)
    return seconds if 0 <= seconds < math.inf else None


def _seconds_until(date: str, now: Callable[[], float]) -> float | None:
    try:
        then = parsedate_to_datetime(date)
    except (ValueError, OverflowError):  # no date, or one with absurdly long numbers
        return None
    # HTTP dates are of Greenwich, also where they do not say so.
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    return max(0.0, then.timestamp() - now())


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother = 3, 300, 300


def _shown(value: Any, limit: int = 80) -> str:
    """A JSON value in Python's words, cut: a plain repr runs out of stack on a deep one."""
    return _REPR.repr(value)[:limit]
