"""SGLang's native protocol: the JSON of POST /generate to requests, results to its answer."""

from __future__ import annotations

import reprlib
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from opd_core.errors import OPDError
from opd_core.serving.embedded.requests import RequestRefused, ScoreRequest, ScoreResult

T = TypeVar("T")
Texts = Callable[[Sequence[int]], Sequence[str | None] | None]

WEIGHT_VERSION = "default"

# Fields of SGLang's request that change the answer and that nothing here can honour.
UNSUPPORTED_FIELDS = (
    "text",
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "lora_path",
    "session_params",
    "return_hidden_states",
)
# Of these only max_new_tokens and n matter to a score; the rest shape sampling.
SAMPLING_PARAMETERS = frozenset((
    "custom_params", "ebnf", "frequency_penalty", "ignore_eos", "json_schema", "logit_bias",
    "max_new_tokens", "min_new_tokens", "min_p", "n", "no_stop_trim", "presence_penalty", "regex",
    "repetition_penalty", "sampling_seed", "skip_special_tokens", "spaces_between_special_tokens",
    "stop", "stop_regex", "stop_token_ids", "stream_interval", "structural_tag", "temperature",
    "top_k", "top_p",
))  # fmt: skip


class MalformedRequest(OPDError):
    """The body is not JSON, or a field has the wrong type."""


@dataclass(frozen=True, slots=True)
class RowAsk:
    """What one sequence of a POST asks for, beyond its :class:`ScoreRequest`."""

    request: ScoreRequest
    request_id: str
    return_logprob: bool


@dataclass(frozen=True, slots=True)
class GenerateAsk:
    """One POST /generate: its sequences, whether they came as a list of lists, whether the answer
    has texts beside the ids."""

    rows: tuple[RowAsk, ...]
    batched: bool
    return_text: bool


def parse_generate(body: bytes) -> GenerateAsk:
    """Read the body of POST /generate.

    Raises :class:`MalformedRequest` for a wrong type and :class:`RequestRefused` for what a server
    that only scores cannot do. Ids and lengths are checked later, against the model.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedRequest(f"1 validation error: the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise _wrong_type("body", "an object", fields)
    for name in UNSUPPORTED_FIELDS:
        if fields.get(name):
            raise RequestRefused(f"{name} is not supported by this server: send input_ids only.")
    if _flag(fields, "stream"):
        raise RequestRefused("this server does not stream: send stream=false.")
    sequences, batched = _read_sequences(fields.get("input_ids"))
    per_row = partial(_per_row, fields, len(sequences))
    for parameters in per_row("sampling_params", dict, {}):
        _check_sampling(parameters)
    columns = zip(
        sequences,
        per_row("rid", str, None),
        per_row("return_logprob", bool, False),
        per_row("logprob_start_len", int, -1),
        per_row("top_logprobs_num", int, 0),
        per_row("token_ids_logprob", list, []),
        strict=True,
    )
    return GenerateAsk(
        rows=tuple(_row_ask(*column) for column in columns),
        batched=batched,
        return_text=_flag(fields, "return_text_in_logprobs"),
    )


def _row_ask(
    token_ids: NDArray[np.int64],
    request_id: str | None,
    return_logprob: bool,
    start: int,
    top_k: int,
    extra_ids: list[Any],
) -> RowAsk:
    nothing = start == -1 or not return_logprob
    request = ScoreRequest(
        token_ids,
        start=len(token_ids) if nothing else start,
        top_k=top_k,
        token_ids_logprob=_read_ids("token_ids_logprob", extra_ids),
    )
    return RowAsk(request, request_id or uuid.uuid4().hex, return_logprob)


def _read_sequences(value: Any) -> tuple[list[NDArray[np.int64]], bool]:
    """The sequences, and True where they came as a list of lists."""
    if not isinstance(value, list):
        raise _wrong_type("input_ids", "a list of integers or a list of such lists", value)
    if not _is_nested(value):
        return [_read_ids("input_ids", value)], False
    return [_read_ids(f"input_ids.{index}", row) for index, row in enumerate(value)], True


def _read_ids(name: str, value: Any) -> NDArray[np.int64]:
    # Not isinstance: True is an int to Python, and not to this protocol.
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        raise _wrong_type(name, "a list of integers", value)
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError as error:
        raise RequestRefused(f"{name} has an id beyond 64 bits.") from error


def _is_nested(values: list[Any]) -> bool:
    return list in map(type, values[:1])


def _per_row(
    fields: Mapping[str, Any], count: int, name: str, kind: type[Any], default: Any
) -> list[Any]:
    """The field for each of ``count`` sequences, given once for all or as a list."""
    value = fields.get(name)
    values: list[Any] = [value] * count
    if isinstance(value, list) and (kind is not list or _is_nested(value)):
        values = value
    if len(values) != count:
        raise RequestRefused(
            f"{name} has {len(values)} entries for {count} sequences: send one for each, or one "
            "for all."
        )
    return [_checked(name, one, kind, default) for one in values]


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    return _checked(name, fields.get(name), bool, False)


def _checked(name: str, value: Any, kind: type[T], default: T) -> T:
    """The value, or the default for null, where it is of exactly this kind."""
    if value is None:
        return default
    if type(value) is not kind:
        raise _wrong_type(name, kind.__name__, value)
    return value


def _check_sampling(parameters: Mapping[str, Any]) -> None:
    """Refuse what is not pure scoring."""
    unknown = sorted(parameters.keys() - SAMPLING_PARAMETERS)
    if unknown:
        raise RequestRefused(
            f"unknown sampling parameters {unknown}, expected some of "
            f"{sorted(SAMPLING_PARAMETERS)}."
        )
    new_tokens, n = parameters.get("max_new_tokens", "128 by default"), parameters.get("n", 1)
    if type(new_tokens) is not int or new_tokens != 0 or n != 1:
        raise RequestRefused(
            "this server only scores: send sampling_params with max_new_tokens=0 and n=1, "
            f"came max_new_tokens={new_tokens} and n={n}."
        )


def _wrong_type(name: str, expected: str, value: object) -> MalformedRequest:
    return MalformedRequest(
        f"1 validation error: {name}: expected {expected}, "
        f"came {type(value).__name__} {reprlib.repr(value)}"
    )


def build_answer(
    ask: GenerateAsk, results: Sequence[ScoreResult], *, texts: Texts | None, latency_s: float
) -> bytes:
    """The JSON of POST /generate: one object, or a list in the order of the sequences.

    ``texts`` gives the text of each id; without it the answer has ids only.
    """
    # orjson holds the interpreter's lock for a whole call: one call per sequence lets the event
    # loop run in between.
    answers = [
        orjson.dumps(_answer(row, result, texts, latency_s))
        for row, result in zip(ask.rows, results, strict=True)
    ]
    return b"[" + b",".join(answers) + b"]" if ask.batched else answers[0]


def _answer(
    row: RowAsk, result: ScoreResult, texts: Texts | None, latency_s: float
) -> dict[str, object]:
    meta_info = {
        "id": row.request_id,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(row.request.token_ids),
        "weight_version": WEIGHT_VERSION,
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": 0,
        "cached_tokens": 0,
        "weight_versions": [{"version": WEIGHT_VERSION, "start": 0, "end": 0}],
        "cached_tokens_details": None,
        "dp_rank": None,
        "e2e_latency": latency_s,
        "response_sent_to_client_ts": time.time(),
    }
    if row.return_logprob:
        meta_info |= _logprob_fields(row.request, result, texts)
    return {"text": "", "output_ids": [], "meta_info": meta_info}


def _logprob_fields(
    request: ScoreRequest, result: ScoreResult, texts: Texts | None
) -> dict[str, object]:
    """SGLang's rows: N - S of them, the first without a score, ``[logprob, id, text or null]``."""

    def entries(logprobs: Iterable[float | None], ids: list[int]) -> list[tuple[object, ...]]:
        words: Sequence[str | None] = (texts and texts(ids)) or [None] * len(ids)
        return list(zip(logprobs, ids, words, strict=True))

    ids = request.token_ids[request.start :].tolist()
    first = [None] if ids else []
    fields: dict[str, object] = {
        "input_token_logprobs": entries(first + result.logprobs.tolist(), ids),
        "output_token_logprobs": [],
        "output_token_logprobs_length": 0,
    }
    if request.top_k:
        top = map(entries, result.top_logprobs.tolist(), result.top_ids.tolist())
        fields |= {"input_top_logprobs": [*first, *top], "output_top_logprobs": []}
    if len(request.token_ids_logprob):
        asked = request.token_ids_logprob.tolist()
        extra = [entries(logprobs, asked) for logprobs in result.token_ids_logprobs.tolist()]
        fields |= {"input_token_ids_logprobs": [*first, *extra], "output_token_ids_logprobs": []}
    return fields
