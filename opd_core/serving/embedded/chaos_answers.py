"""True answers of POST /generate made wrong: each fault in one way, with all else left right."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

from opd_core.serving.embedded.chaos_script import RequestFault, WrongRows
from opd_core.serving.embedded.requests import ModelFacts, ScoreRequest

Row = list[Any]
"""``[logprob or None, id, text or None]``; the first row of an answer has no logprob."""


class OwnModel(Protocol):
    """What the wrong answers need of the model."""

    @property
    def facts(self) -> ModelFacts: ...

    def own_scores(
        self, token_ids: NDArray[np.int64], *, normalised: bool
    ) -> NDArray[np.float32]: ...


def spoil(
    fault: RequestFault, answer: bytes, asked: Sequence[ScoreRequest], model: OwnModel
) -> bytes:
    """The JSON of a true answer with the fault in each of its sequences.

    A sequence for which no logprob was asked stays as it is, but for ``error_200``.
    """
    whole = orjson.loads(answer)
    parts = whole if isinstance(whole, list) else [whole]
    for part, request in zip(parts, asked, strict=True):
        meta = part["meta_info"]
        if fault.fault == "error_200":
            message = "chaos: the engine gave this request up"
            meta["finish_reason"] = {"type": "abort", "message": message}
        if request.rows:
            rows = meta["input_token_logprobs"]
            meta["input_token_logprobs"] = _spoil_rows(fault, rows, request, model)
    return json.dumps(whole).encode()  # not orjson: it writes NaN as null


def _spoil_rows(
    fault: RequestFault, rows: list[Row], request: ScoreRequest, model: OwnModel
) -> list[Row]:
    """The N - S rows of one sequence, at least two, with the fault in them."""
    logprobs = [row[0] for row in rows[1:]]
    if isinstance(fault, WrongRows):
        return rows[: fault.rows] if fault.rows < 0 else rows + rows[-1:] * fault.rows
    match fault.fault:
        case "shifted":
            return [rows[0], *rows[:-1]]
        case "other_ids":
            return [[logprob, token + 1, text] for logprob, token, text in rows]
        case "nulls" | "error_200":
            logprobs = [None] * len(logprobs)
        case "nan":
            logprobs[-1] = math.nan
        case "infinite":
            logprobs[-1] = -math.inf
        case "positive":
            logprobs[-1] = 0.5
        case "uniform":
            logprobs = [-math.log(model.facts.vocab_size)] * len(logprobs)
        case "raw_logits":
            own = model.own_scores(request.token_ids, normalised=False)
            logprobs = own[request.start :].tolist()
        case "stale":  # by the place in the sequence, so that each start gives the same numbers
            places = range(request.start + 1, len(request.token_ids))
            logprobs = [x - 0.1 * (i % 7) for x, i in zip(logprobs, places, strict=True)]
    return [rows[0], *([x, *row[1:]] for x, row in zip(logprobs, rows[1:], strict=True))]
