"""The sampling request and its answer, as SGLang and LMDeploy write them: ids in, ids out.

Both end at a stop id, which is the last of the answer's ids and has its logprob (LMDeploy is told
to keep it). At temperature 1 the logprobs are those of the model. At another one LMDeploy's still
are; SGLang's only with SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment.

Whatever bytes a server sends, nothing but a :class:`~opd_core.errors.SamplingError` comes out of
here, and no number that failed a check.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Any

import orjson

from opd_core.config import Backend
from opd_core.errors import SamplingError
from opd_core.sampling.protocol import Completion, FinishReason, SampleRequest
from opd_core.scoring.wire import ABOVE_ZERO

UNTAGGED = frozenset({"lmdeploy"})
"""Backends whose answers do not say the version of their weights."""


class ServerLost(SamplingError):
    """The server is dead, hangs, answers rubbish or samples from other weights than it should: the
    same request may well be answered elsewhere."""


def sample_body(backend: Backend, request: SampleRequest, end_ids: Sequence[int]) -> bytes:
    """The JSON body that asks for one continuation, from the model's own distribution at the
    request's temperature. Every setting is named: a server fills in what is missing from the
    model's generation_config.json."""
    sampling: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [*end_ids, *request.stop_ids],
        "skip_special_tokens": False,
    }
    body: dict[str, Any] = {
        "input_ids": request.token_ids,
        "return_logprob": True,
        "stream": False,
    }
    if backend == "lmdeploy":
        sampling |= {"max_tokens": request.max_new_tokens, "top_k": 0}
        body |= sampling | {"include_stop_str_in_output": True}
    else:
        sampling |= {"max_new_tokens": request.max_new_tokens, "top_k": -1}
        body |= {"sampling_params": sampling, "logprob_start_len": -1, "top_logprobs_num": 0}
    return orjson.dumps(body)


def check_sendable(request: SampleRequest, vocab_size: int) -> None:
    """Refuse what no server may get: one bad id, or none, can end a whole SGLang server.

    Raises :class:`~opd_core.errors.SamplingError`.
    """
    ids, asked = request.token_ids, f"rollout {request.key}"
    if not ids:
        raise SamplingError(f"{asked}: there is no prompt to go on from: send at least one token")
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise SamplingError(
            f"{asked}: id {bad} is outside the student's vocabulary of {vocab_size}: look for "
            "another model's tokenizer"
        )
    if request.max_new_tokens < 1:
        raise SamplingError(f"{asked}: max_new_tokens is {request.max_new_tokens}, not 1 or more")


def parse_completion(
    backend: Backend,
    body: bytes,
    request: SampleRequest,
    *,
    end_ids: Sequence[int],
    vocab_size: int,
    policy_version: int,
) -> Completion:
    """The completion in an answer, or an error; ``policy_version`` is that of the weights which the
    server was last given.

    Raises :class:`ServerLost` for an answer that failed a check, and
    :class:`~opd_core.errors.SamplingError` where the server's settings do not fit the request.
    """
    ids, meta = _ids_and_meta(body)
    logprobs = _logprobs(ids, meta.get("output_token_logprobs"), vocab_size)
    if len(ids) > request.max_new_tokens:
        raise ServerLost(f"asked for {request.max_new_tokens} tokens at most, got {len(ids)}")
    if backend not in UNTAGGED:
        _check_versions(meta, len(ids), str(policy_version))
    ends = {*end_ids, *request.stop_ids}
    reason = _finish_reason(meta, ids, ends, request.max_new_tokens)
    return Completion(tuple(ids), logprobs, (policy_version,) * len(ids), reason)


def _ids_and_meta(body: bytes) -> tuple[list[int], dict[str, Any]]:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ServerLost(f"the answer is not JSON ({error})") from None
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    ids = answer.get("output_ids") if isinstance(answer, dict) else None
    if not isinstance(meta, dict) or not isinstance(ids, list):
        raise ServerLost(f"the answer has no output_ids or no meta_info: {body[:200]!r}")
    return ids, meta


def _logprobs(ids: list[int], rows: Any, vocab_size: int) -> tuple[float, ...]:
    """The R logprobs of ``ids``, out of rows [logprob, id, ...]; an answer without ids may have
    none."""
    rows = [] if rows is None else rows
    if not isinstance(rows, list) or len(rows) != len(ids):
        got = len(rows) if isinstance(rows, list) else type(rows).__name__
        raise ServerLost(f"expected {len(ids)} rows of output_token_logprobs, got {got}")
    for position, (row, token) in enumerate(zip(rows, ids, strict=True)):
        if not isinstance(row, list) or len(row) < 2:
            raise ServerLost(f"row {position} is not [logprob, id]: {_shown(row)}")
        value, echoed = row[0], row[1]
        if type(token) is not int or type(echoed) is not int or echoed != token:
            raise ServerLost(f"row {position} is of {_shown(echoed)}, the token is {_shown(token)}")
        if not 0 <= token < vocab_size:
            raise ServerLost(f"token {position} is {token}, the vocabulary has {vocab_size}")
        if type(value) not in (int, float) or not math.isfinite(value) or value > ABOVE_ZERO:
            raise ServerLost(f"row {position} has logprob {_shown(value)}, expected <= 0")
    return tuple(float(row[0]) for row in rows)


def _check_versions(meta: dict[str, Any], count: int, expected: str) -> None:
    """Every one of the ``count`` tokens must be of the weights that are ``expected``."""
    if not count:
        return
    spans = meta.get("weight_versions")
    if spans is None:  # before 0.5.23 only the version at the end is told
        spans = [{"version": meta.get("weight_version"), "start": 0, "end": count}]
    try:
        covered = sum(span["end"] - span["start"] for span in spans)
        right = covered == count and {span["version"] for span in spans} == {expected}
    except (TypeError, LookupError):
        right = False
    if not right:
        raise ServerLost(
            f"its {count} tokens are of the weights {_shown(spans)}, last given were {expected!r}"
        )


def _finish_reason(
    meta: dict[str, Any], ids: list[int], ends: set[int], max_new_tokens: int
) -> FinishReason:
    """``abort`` only where something is left to sample: an interrupted request may just have drawn
    its last token."""
    finish = meta.get("finish_reason")
    said = finish.get("type") if isinstance(finish, dict) else finish
    if said not in ("stop", "length", "abort"):
        raise ServerLost(f"the server ended the request itself: {_shown(finish)}")
    if ids and ids[-1] in ends:
        return "stop"
    if len(ids) == max_new_tokens:
        return "length"
    if said == "abort":
        return "abort"
    if said == "stop":
        last = ids[-1] if ids else None
        raise SamplingError(
            f"the server ended an answer at id {last}, which is none of the student's end ids "
            f"{sorted(ends)}: its generation_config.json or tokenizer names another"
        )
    raise SamplingError(
        f"the server ended an answer after {len(ids)} of {max_new_tokens} tokens: its context "
        "length is too short for the prompt and the answer: raise server.context_length"
    )


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother = 3, 300, 300


def _shown(value: Any) -> str:
    """A JSON value, cut: a plain repr runs out of stack on a deep one."""
    return _REPR.repr(value)[:300]
