"""Answers spoilt in every way that we could think of: none is taken for a score, and nothing but a
ScoringError is raised. Every sample comes from a seed, so that a failure can be repeated."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd_core.config import Backend
from opd_core.errors import ScoringError
from opd_core.scoring.wire import Answer, error_of_status, parse_answer

VOCAB = 100
LAST = VOCAB - 1
CAUSES = {"not_json", "shape", "row_count", "ids", "null", "value", "uniform", "abort"}
BACKENDS: tuple[Backend, ...] = ("sglang", "embedded", "lmdeploy")


def sizes(fast: int, slow: int) -> Any:
    return pytest.mark.parametrize("samples", [fast, pytest.param(slow, marks=pytest.mark.slow)])


@dataclass(slots=True)
class Case:
    """A request and its honest answer, to be spoilt. ``rows`` are the answer's own."""

    backend: Backend
    ids: list[int]
    start: int
    rows: list[Any]
    meta: dict[str, Any]
    answer: Any

    @property
    def boundary_rows(self) -> int:
        return 0 if self.backend == "lmdeploy" else 1

    @property
    def scored(self) -> list[int]:
        return self.ids[self.start + 1 :]

    def body(self, rng: random.Random) -> bytes:
        return json.dumps(self.answer, separators=rng.choice([(",", ":"), (", ", ": ")])).encode()


def an_id(rng: random.Random, among: list[int]) -> int:
    return rng.choice(among) if rng.random() < 0.8 else rng.randrange(LAST)


def a_logprob(rng: random.Random) -> float:
    return rng.choice([-rng.expovariate(0.5) - 1e-3, -round(rng.uniform(0.1, 30), 2), -1e-9])


def make_case(rng: random.Random) -> Case:
    """At least two different ids are scored; the last id, which SGLang garbles, is not among them.

    A few ids come often, so that rows can be exchanged for rows of the same id; 0 and 1 are what
    false and true are equal to.
    """
    backend = rng.choice(BACKENDS)
    start = rng.randrange(4)
    among = [0, 1, rng.randrange(LAST), rng.randrange(LAST)]
    ids = [an_id(rng, among) for _ in range(start + rng.randint(3, 12))]
    if len(set(ids[start + 1 :])) < 2:
        ids[-1] = (ids[-2] + 1) % LAST
    tail = [] if backend == "lmdeploy" else [None]
    rows: list[Any] = [[a_logprob(rng), token, *tail] for token in ids[start + 1 :]]
    if backend != "lmdeploy":
        rows.insert(0, [None, ids[start], None])
    meta: dict[str, Any] = {"id": "5f\u00e9", "finish_reason": {"type": "length", "length": 0}}
    meta |= {"input_token_logprobs": rows, "prompt_tokens": len(ids), "cached_tokens": start}
    return Case(backend, ids, start, rows, meta, {"text": "", "output_ids": [], "meta_info": meta})


def parsed(case: Case, body: bytes) -> Answer | None:
    """None for a refusal; any other exception ends the test."""
    try:
        return parse_answer(case.backend, body, case.ids, case.start, VOCAB)
    except ScoringError as error:
        refusal = error
    assert refusal.cause in CAUSES
    assert len(str(refusal)) < 1000
    return None


# ------------------------------------------------------------------ an oracle, slow and in decimals


class Whole(Decimal):
    """A number written without point and exponent."""


def number(literal: str) -> Decimal:
    """Numbers that no double can hold are left out of JSON by the parser and by us."""
    value = (Whole if literal.lstrip("-").isdigit() else Decimal)(literal)
    return value if abs(float(value)) < float("inf") else no_number(literal)


def no_number(literal: str) -> Decimal:
    raise ValueError(f"{literal} is no JSON")


def meaning(case: Case, body: bytes) -> tuple[float, ...] | None:
    """What an answer says, or None where it says nothing that can be used. Knows no lost weights:
    mutations of text cannot make all numbers alike."""
    try:
        text = body.decode()
        answer = json.loads(text, parse_float=number, parse_int=number, parse_constant=no_number)
        if "\\ud" in text.lower():  # may be half a character, which no text can hold
            json.dumps(answer, ensure_ascii=False, default=str).encode()
    except (ValueError, ArithmeticError, RecursionError):
        return None
    match answer:
        case {"meta_info": {"finish_reason": "abort" | "error" | {"type": "abort" | "error"}}}:
            return None
        case {"meta_info": {"input_token_logprobs": [*rows]}}:
            return meaning_of_rows(case, rows)
    return None


def meaning_of_rows(case: Case, rows: list[Any]) -> tuple[float, ...] | None:
    wanted = list(case.scored)
    numbers: list[float] = []
    while wanted and rows:
        match rows.pop():
            case [Decimal() as value, Whole() as echoed, *_]:
                token = wanted.pop()
                garbled = case.backend == "sglang" and token == LAST and not echoed
                if not (garbled or echoed == token) or not float("-inf") < float(value) <= 0.001:
                    return None
                numbers.append(float(value))
            case _:
                return None
    if wanted or len(rows) != case.boundary_rows:
        return None
    return tuple(reversed(numbers))


# -------------------------------------------- mutations after which an answer can mean nothing more

Mutation = Callable[[random.Random, Case], None]


def pick(rng: random.Random, case: Case) -> int:
    """The place of a scored row."""
    return rng.randrange(case.boundary_rows, len(case.rows))


def wrong_count(rng: random.Random, case: Case) -> None:
    rows, at = case.rows, pick(rng, case)
    match rng.randrange(7):
        case 0:
            del rows[at]
        case 1:
            rows.insert(at, rows[at])
        case 2:
            rows.append([a_logprob(rng), rng.randrange(LAST), None])
        case 3:
            rows.insert(0, [None, case.ids[case.start], None])
        case 4:
            del rows[0]
        case 5:
            rows.clear()
        case 6:
            rows.extend(rows[case.boundary_rows :])


def wrong_order(rng: random.Random, case: Case) -> None:
    """The count is right, an id is not."""
    first = case.boundary_rows
    scored, at = case.rows[first:], pick(rng, case)
    others = [row for row in scored if row[1] != case.rows[at][1]]
    match rng.randrange(4):
        case 0:
            case.rows[at] = rng.choice(others)
        case 1:
            other = case.rows.index(rng.choice(others))
            case.rows[at], case.rows[other] = case.rows[other], case.rows[at]
        case 2:
            case.rows[first:] = [*scored[1:], scored[0]]
        case 3:
            case.rows[first:] = [*scored[-1:], *scored[:-1]]


def wrong_id(rng: random.Random, case: Case) -> None:
    row = case.rows[pick(rng, case)]
    token = row[1]
    other = (token + rng.randrange(1, LAST)) % LAST
    odd: list[Any] = [str(token), [token], {"id": token}, None, token + 0.5, float(token)]
    odd += [
        other,
        -token - 1,
        bool(token),
        bool(token),
        token + 2**53,
        token + 2**64,
        10**30,
        LAST,
        "",
    ]
    row[1] = rng.choice(odd)


def quirk_of_another_server(rng: random.Random, case: Case) -> None:
    """Only SGLang may echo the last id as 0, and as nothing else."""
    row = case.rows[pick(rng, case)]
    case.ids[case.start + 1 + case.rows.index(row) - case.boundary_rows] = LAST
    row[1] = rng.choice([False, None, 1, "0"] if case.backend == "sglang" else [0, False])


def wrong_logprob(rng: random.Random, case: Case) -> None:
    row = case.rows[pick(rng, case)]
    odd: list[Any] = [None, True, False, str(row[0]), "NaN", [row[0]], {"logprob": row[0]}, {}]
    odd += [rng.uniform(1.1e-3, 30), 1, 17, 2**70, 1e300, float("nan"), float("inf")]
    row[0] = rng.choice([*odd, float("-inf")])


def wrong_row(rng: random.Random, case: Case) -> None:
    at = pick(rng, case)
    row = case.rows[at]
    odd: list[Any] = [None, {}, {"0": row[0], "1": row[1]}, "ab", json.dumps(row), row[1], row[0]]
    odd += [[], row[:1], [row], [row[1], row[0]], [None, *row], True]
    case.rows[at] = rng.choice(odd)


def wrong_shape(rng: random.Random, case: Case) -> None:
    meta = case.meta
    key = rng.choice(["meta_info", "input_token_logprobs"])
    place = case.answer if key == "meta_info" else meta
    value = place[key]
    match rng.randrange(6):
        case 0:
            del place[key]
        case 1:
            place[key] = rng.choice([None, True, 0, -0.5, "", {}, [], json.dumps(value)])
        case 2:
            place[key] = [value]
        case 3:
            place[key] = {key: value}
        case 4:
            place[key.upper()] = place.pop(key)
        case 5:
            case.answer = rng.choice([[case.answer], meta, case.rows, json.dumps(case.answer)])


def wrong_finish(rng: random.Random, case: Case) -> None:
    reason = rng.choice(["abort", "error"])
    nested = {"type": reason, "message": rng.choice(["", None, [[]]]), "status_code": 500}
    case.meta["finish_reason"] = rng.choice([reason, nested])


def lost_weights(rng: random.Random, case: Case) -> None:
    """-ln(V) of the vocabulary that the server has; a short answer shows only the one we know."""
    known = len(case.scored) < 8 or len(set(case.scored)) < 4
    common = -4.605170185988091 if known else rng.uniform(-20, -1.01)
    for row in case.rows[case.boundary_rows :]:
        row[0] = common + rng.uniform(-4e-5, 4e-5)


MUTATIONS: list[Mutation] = [wrong_count, wrong_order, wrong_id, quirk_of_another_server]
MUTATIONS += [wrong_logprob, wrong_row, wrong_shape, wrong_finish, lost_weights]


@sizes(300, 7_000)
@pytest.mark.parametrize("mutate", MUTATIONS)
def test_no_answer_passes_that_is_malformed_by_construction(mutate: Mutation, samples: int) -> None:
    for seed in range(samples):
        rng = random.Random(f"{mutate.__name__} {seed}")
        case = make_case(rng)
        mutate(rng, case)
        body = case.body(rng)
        assert parsed(case, body) is None, (seed, case.backend, body)
        assert mutate is lost_weights or meaning(case, body) is None, (seed, body)


# ---------------------------------------------------------- mutations of text, judged by the oracle


def flipped(rng: random.Random, body: bytes) -> bytes:
    """Other bytes; those of JSON's own alphabet are the dangerous ones."""
    spoilt = bytearray(body)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        alphabet = rng.choice([b'{}[]",:.-+eE0123456789 \\untrfalse', bytes(range(256))])
        spoilt[rng.randrange(len(spoilt))] = rng.choice(alphabet)
    return bytes(spoilt)


def spliced(rng: random.Random, body: bytes) -> bytes:
    """A piece is lost, comes twice or stands elsewhere."""
    cuts = sorted(rng.randrange(len(body) + 1) for _ in range(3))
    a, b, c, d = (body[i:j] for i, j in zip([0, *cuts], [*cuts, len(body)], strict=True))
    return rng.choice([a + c + d, a + b + b + c + d, a + c + b + d, a + b, b + c + d])


def edited(rng: random.Random, body: bytes) -> bytes:
    """A token of the text gives way to another one that JSON, or nearly JSON, knows."""
    tokens = list(re.finditer(rb"-?\d[\d.e-]*|null|[][{},:]", body))
    found = rng.choice(tokens)
    others = [b"1e999", b"-1e999", b"NaN", b"-Infinity", b"null", b"true", b"-0", b"-0.0", b"01"]
    others += [b"1e-400", b"-" + b"9" * 400, b"[" * 1100, b"[" * 700 + b"]" * 700, b'"\\ud800"']
    others += [b"\xff", b"\x00", b"//", b"", b",", b"[]", b"{}", b"-3", b"0", b"1", b"-1e-3"]
    return body[: found.start()] + rng.choice(others) + body[found.end() :]


@sizes(400, 15_000)
@pytest.mark.parametrize("mutate", [flipped, spliced, edited])
def test_garbled_text_means_what_the_oracle_says_or_nothing(
    mutate: Callable[[random.Random, bytes], bytes], samples: int
) -> None:
    refused = 0
    for seed in range(samples):
        rng = random.Random(f"{mutate.__name__} {seed}")
        case = make_case(rng)
        body = mutate(rng, case.body(rng))
        answer = parsed(case, body)
        said = None if answer is None else answer.logprobs
        assert said == meaning(case, body), (seed, case.backend, body)
        refused += said is None
        assert str(error_of_status(500, body, None)).startswith("HTTP 500: ")
    assert refused > samples / 3


@sizes(500, 8_000)
def test_random_bytes_are_refused(samples: int) -> None:
    words = [b"{", b"}", b"[", b"]", b",", b":", b"null", b"-1", b"0.5", b'"meta_info"', b'"a"']
    words += [b'"input_token_logprobs"', b"1e5", b" ", b"\xc3", b"\\u00e9", b'{"meta_info":{']
    for seed in range(samples):
        rng = random.Random(seed)
        case = make_case(rng)
        noise = rng.randbytes(rng.randrange(40))
        for body in (noise, b"".join(rng.choices(words, k=rng.randrange(12)))):
            assert parsed(case, body) is None, (seed, body)
            assert str(error_of_status(400, body, None)).startswith("HTTP 400: ")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


@sizes(100, 1_000)
def test_arbitrary_json_means_what_the_oracle_says_or_nothing(samples: int) -> None:
    @settings(max_examples=samples, deadline=None, derandomize=True, database=None)
    @given(junk=JSON, seed=st.integers(0, 2**32))
    def check(junk: Any, seed: int) -> None:
        rng = random.Random(seed)
        for place in ("answer", "meta_info", "finish_reason", "rows", "row", "logprob", "id"):
            case = make_case(rng)
            match place:
                case "answer":
                    case.answer = junk
                case "meta_info":
                    case.answer[place] = junk
                case "finish_reason":
                    case.meta[place] = junk
                case "rows":
                    case.meta["input_token_logprobs"] = junk
                case "row":
                    case.rows[pick(rng, case)] = junk
                case "logprob" | "id":
                    case.rows[pick(rng, case)][place == "id"] = junk
            body = case.body(rng)
            answer = parsed(case, body)
            assert (answer and answer.logprobs) == meaning(case, body), (place, body)

    check()


# -------------------------------------------------------------- answers that are right all the same


def a_right_logprob(rng: random.Random) -> float:
    odd = [0, -3, 0.0, -0.0, 5e-4, 1e-3, -1e-300, -1e300, -5e-324, -(2**60)]
    return rng.choice([a_logprob(rng), a_logprob(rng), rng.choice(odd)])


@sizes(500, 10_000)
def test_a_right_answer_is_read_exactly_whatever_else_it_says(samples: int) -> None:
    for seed in range(samples):
        rng = random.Random(seed)
        case = make_case(rng)
        extras: list[Any] = [None, "", "t\u00e9xt \u0000", 1.5, True, [None], {"a": [{}]}, 10**19]
        numbers = []
        for at in range(case.boundary_rows, len(case.rows)):
            token = case.ids[case.start + 1 + at - case.boundary_rows]
            if rng.random() < 0.1:
                case.ids[case.start + 1 + at - case.boundary_rows] = token = LAST
            echoed = 0 if token == LAST and case.backend == "sglang" and at % 2 else token
            numbers.append(a_right_logprob(rng))
            more = rng.choices(extras, k=rng.randrange(3))
            case.rows[at] = [numbers[-1], echoed, *more]
        reasons = [None, "stop", {}, {"type": "length"}, {"type": None}, 7, []]
        case.meta["finish_reason"] = rng.choice(reasons)
        cached = rng.choice([0, 7, 2**40, None, -1, True, 1.0, "3", [], 10**30])
        case.meta["cached_tokens"] = cached
        case.meta |= {f"more {i}": rng.choice(extras) for i in range(rng.randrange(3))}
        case.answer |= {"e2e_latency": 0.04, "text": rng.choice(extras)}
        body = case.body(rng)
        told = cached if cached in (0, 7, 2**40) and cached is not True else None
        answer = parsed(case, body)
        assert answer == Answer(tuple(map(float, numbers)), told), (seed, body)
        assert {type(x) for x in answer.logprobs} == {float}
        assert meaning(case, body) == tuple(map(float, numbers)), (seed, body)
