"""What a teacher's answers must look like: one function and one verdict for each promise.

Pure: answers in, a :class:`Check` out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from opd_core.config import Backend
from opd_core.scoring.proof import TOLERANCE, Gap, is_uniform
from opd_core.scoring.wire import ABOVE_ZERO
from opd_core.serving.probe.asking import Reply
from opd_core.serving.probe.text import ProbeText
from opd_core.serving.readiness import HEALTH_PATH, context_length

Verdict = Literal["pass", "warn", "fail", "unknown"]

NORMALISED_TOLERANCE = 1e-3
EXACT = TOLERANCE["float32"]
BELIEVABLE = TOLERANCE["bfloat16"]
GUESSING = 0.9
"""Below this part of -ln(V) plain English is scored as if its tokens meant something else."""
LARGEST_EXPONENT = 50.0
RAW_LOGITS = (
    "these are not log-probabilities; LMDeploy needs --backend pytorch --logprobs-mode raw_logprobs"
)


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, and what to do about it."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Scored:
    """A sequence of N ids, asked from ``start``, and the ``rows`` that came for it, unchecked."""

    ids: Sequence[int]
    start: int
    rows: Any

    def pairs(self, backend: Backend) -> list[tuple[int, Any, Any]]:
        """(sent id, logprob, echoed id) of each scored token, where the rows are complete."""
        rows = self.rows if backend == "lmdeploy" else self.rows[1:]
        sent = self.ids[self.start + 1 :]
        return [(token, row[0], row[1]) for token, row in zip(sent, rows, strict=True)]


def check_health(reply: Reply, backend: Backend) -> Check:
    """The backend's own health page says 200."""
    path = HEALTH_PATH[backend]
    if reply.status == 200:
        return Check("health", "pass", f"{path} answers 200 in {reply.seconds:.2f} s")
    if reply.status == 404:
        advice = f"a {backend} server has this page: is --backend right?"
        return Check("health", "fail", f"{path} does not exist (404)", advice)
    found = f"{path} answers {reply.status or reply.problem}"
    return Check("health", "fail", found, "wait until it is ready, or look at its log")


def check_key(keyed: bool, own: Reply, wrong: Reply | None) -> Check:
    """The key is accepted, and another one is not. ``wrong`` is the answer to a wrong key."""
    if own.status in (401, 403):
        if keyed:
            return Check("key", "fail", f"the key is refused: {own.problem}", "correct the key")
        advice = "name where the key is kept: --key env:NAME"
        return Check("key", "fail", f"a key is needed: {own.problem}", advice)
    if wrong is None:
        return Check("key", "pass", "none is needed")
    if wrong.status in (401, 403):
        return Check("key", "pass", f"accepted; a wrong one is refused ({wrong.status})")
    advice = "start the server with its key: whoever reaches this address can use it"
    return Check("key", "warn", f"accepted, but so is a wrong one ({wrong.status})", advice)


def check_model(info: Mapping[str, Any], text: ProbeText) -> Check:
    """What the server says of its model holds the tokenizer's ids."""
    vocab, context = info.get("vocab_size"), context_length(info)
    name = info.get("model_path") or info.get("id") or "a model without a name"
    said = f"{name}: vocabulary {vocab or 'not told'}, context {context or 'not told'}"
    if isinstance(vocab, int) and text.tokenizer_size > vocab:
        found = f"{said}; the tokenizer has ids up to {text.tokenizer_size - 1}"
        return Check("model", "fail", found, "the tokenizer is not this model's: correct one")
    if vocab and context:
        return Check("model", "pass", said)
    advice = (
        f"compare its config.json: vocab_size must be over {text.tokenizer_size - 1} (a larger id "
        "ends an SGLang server), and prompt + response must fit the context"
    )
    return Check("model", "unknown", said, advice)


def check_rows(backend: Backend, answers: Sequence[Scored]) -> Check:
    """As many rows as the backend promises, each [logprob, id], the boundary's null where it is."""
    other: Backend = "sglang" if backend == "lmdeploy" else "lmdeploy"
    for scored in answers:
        problem = _rows_problem(backend, scored)
        if problem:
            mixed = not _rows_problem(other, scored)
            advice = f"this is {other}'s form: try --backend {other}" if mixed else _form(backend)
            return Check("rows", "fail", problem, advice)
    return Check("rows", "pass", _form(backend))


def check_ids(backend: Backend, answers: Sequence[Scored], vocab_size: int) -> Check:
    """Every row carries the id that was sent."""
    count = 0
    for scored in answers:
        for token, _, echoed in scored.pairs(backend):
            # SGLang echoes the last id of the vocabulary as 0; its logprob is right.
            quirk = backend == "sglang" and token == vocab_size - 1 and echoed == 0
            if echoed != token and not quirk:
                found = f"sent id {token}, came {echoed!r:.40}"
                return Check("ids", "fail", found, "the server scores other tokens than were sent")
            count += 1
    return Check("ids", "pass", f"all {count} ids came back")


def check_values(backend: Backend, answers: Sequence[Scored]) -> Check:
    """Every logprob is a finite number <= 0."""
    values = [value for scored in answers for _, value, _ in scored.pairs(backend)]
    for value in values:
        if not _is_number(value):
            return Check("values", "fail", f"a logprob is {value!r:.40}", "the server is broken")
        if value > ABOVE_ZERO:
            return Check("values", "fail", f"a logprob is {value:.4g}, above 0", RAW_LOGITS)
    found = f"{len(values)} logprobs, all finite, {min(values):.3g} to {max(values):.3g} nats"
    return Check("values", "pass", found)


def check_uniform(backend: Backend, answers: Sequence[Scored]) -> Check:
    """Different tokens get different logprobs."""
    for scored in answers:
        tokens, values, _ = zip(*scored.pairs(backend), strict=True)
        if is_uniform(tokens, values):
            found = f"all {len(values)} logprobs are {values[0]:.4f}"
            return Check("uniform", "fail", found, "the server lost its weights: start it again")
    return Check("uniform", "pass", "the logprobs differ from token to token")


def check_tokenizer(
    backend: Backend, answers: Sequence[Scored], text: ProbeText, vocab_size: int
) -> Check:
    """Plain English is more probable than a guess: else the ids mean other text to this server."""
    if not text.english:
        found = "the tokenizer writes no English, so nothing plausible could be sent"
        return Check("tokenizer", "unknown", found, "compare the tokenizers' files yourself")
    values = [value for scored in answers for _, value, _ in scored.pairs(backend)]
    mean, guess = sum(values) / len(values), -math.log(vocab_size)
    found = f"plain English scores {mean:.2f} nats a token (a blind guess: {guess:.2f})"
    if mean < GUESSING * guess:
        advice = "the ids mean other text to this server: is it the tokenizer of its model?"
        return Check("tokenizer", "warn", found, advice)
    return Check("tokenizer", "pass", found)


def check_gap(name: str, gap: Gap) -> Check:
    """Two scorings of the same tokens agree; up to :data:`BELIEVABLE` nats may be noise."""
    found = f"{gap.how}: within {gap.nats:.2g} nats"
    if gap.nats <= EXACT:
        return Check(name, "pass", found)
    if gap.nats <= BELIEVABLE:
        return Check(name, "warn", found, "noise of half precision; serve float32 for less")
    advice = "scores depend on how they are asked for: look at prefix cache, batching and dtype"
    return Check(name, "fail", found, advice)


def check_cache(reply: Reply, prompt_tokens: int) -> Check:
    """A prompt that was just scored is not computed again. ``reply`` is the second answer."""
    name, cached = "prefix cache", reply.meta.get("cached_tokens")
    if reply.problem or not isinstance(cached, int):
        return Check(name, "unknown", reply.problem or "the server does not tell")
    if cached > 0:
        return Check(name, "pass", f"{cached} of {prompt_tokens} tokens of a repeated prompt")
    found = f"none of {prompt_tokens} tokens of a repeated prompt"
    return Check(name, "warn", found, "each rollout of a group pays for its prompt")


def check_normalised(backend: Backend, scored: Scored, tops: Any, vocab_size: int) -> Check:
    """The K likeliest tokens' probabilities sum to at most 1, and none scored is above the first.

    ``tops``: for each row a list of K rows [logprob, id]. With ``vocab_size`` of K they are all,
    and must sum to 1; 0 means unknown.
    """
    name, listed = "normalised", tops if isinstance(tops, list) else []
    listed = listed if backend == "lmdeploy" else listed[1:]
    pairs = [] if _rows_problem(backend, scored) else scored.pairs(backend)
    sound = all(_is_number(value) for _, value, _ in pairs) and all(map(_is_top, listed))
    if not listed or len(listed) != len(pairs) or not sound:
        return Check(name, "unknown", "the server lists no likeliest tokens as they were asked for")
    largest, smallest = 0.0, math.inf
    for (token, value, _), top in zip(pairs, listed, strict=True):
        if value > top[0][0] + NORMALISED_TOLERANCE:
            found = f"id {token} has {value:.4g} nats, the likeliest token {top[0][0]:.4g}"
            return Check(name, "fail", found, RAW_LOGITS)
        total = sum(math.exp(min(row[0], LARGEST_EXPONENT)) for row in top)
        largest, smallest = max(largest, total), min(smallest, total)
    count = len(listed[0])
    found = f"the {count} likeliest tokens sum to {smallest:.4g} to {largest:.4g}"
    whole = count == vocab_size and smallest < 1 - NORMALISED_TOLERANCE
    if largest > 1 + NORMALISED_TOLERANCE or whole:
        return Check(name, "fail", found, RAW_LOGITS)
    return Check(name, "pass", found)


def _rows_problem(backend: Backend, scored: Scored) -> str:
    rows, count = scored.rows, len(scored.ids) - scored.start - (backend == "lmdeploy")
    asked = f"{len(scored.ids)} tokens from {scored.start}"
    if not isinstance(rows, list):
        return f"{asked}: input_token_logprobs is {rows!r:.40}, not a list"
    if len(rows) != count:
        return f"{asked}: expected {count} rows, came {len(rows)}"
    if not all(isinstance(row, list) and len(row) >= 2 for row in rows):
        return f"{asked}: a row is not [logprob, id]"
    if backend != "lmdeploy" and rows[0][0] is not None:
        return f"{asked}: the first row must have no logprob, came {rows[0][0]!r:.40}"
    return ""


def _form(backend: Backend) -> str:
    if backend == "lmdeploy":
        return "N - start - 1 rows, as LMDeploy promises"
    return "N - start rows, the first without a logprob, as SGLang promises"


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max  # an integer may be longer than any float


def _is_top(top: Any) -> bool:
    return (
        isinstance(top, list)
        and len(top) > 0
        and all(isinstance(row, list) and row and _is_number(row[0]) for row in top)
    )
