"""The tiny task: sums of 2 to 4 single digits, worked out step by step.

An expression is a string such as `9-4+3`. Its prompt is `9-4+3=` and its solution
`9-4=5;5+3=8;=8`: one step per operator, the running result first, then the answer.
This file owns the generator, the split and the judge. It is pure Python; every function
is deterministic given its random generator.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

OPERATORS_OF = {"chain_sum": "+-", "chain_add": "+", "chain_sub": "-"}
"""The data sources, and the operators that occur in each."""

TERMS = (2, 3, 4)
TERM_WEIGHTS = (1, 12, 12)  # only 200 two-term expressions exist
HELD_OUT_SHARE = 10  # one expression in ten is held out

_SLIPS = (-2, -1, 1, 2)
_FINAL_ANSWER = re.compile(r"(?:^|;)=(-?[0-9]+)$")


@dataclass(frozen=True)
class SftRecipe:
    """How one model is trained: its corpus (seed, share of wrong steps, size) and its optimizer.

    `mistake_rate` is one share for all steps, or one for each operator: `{"+": 0.0, "-": 0.5}`.
    """

    seed: int
    mistake_rate: float | Mapping[str, float]
    steps: int
    batch_size: int
    learning_rate: float


def draw_expression(rng: random.Random, terms: int, operators: str = "+-") -> str:
    """One random expression of `terms` digits from 0 to 9, for instance `9-4+3`."""
    digits = [str(rng.randrange(10)) for _ in range(terms)]
    return digits[0] + "".join(rng.choice(operators) + digit for digit in digits[1:])


def prompt_of(expression: str) -> str:
    """What the user asks: `9-4+3` becomes `9-4+3=`."""
    return f"{expression}="


def answer_of(expression: str) -> str:
    """The right answer: `9-4+3` gives `8`."""
    return str(sum(int(term) for term in re.findall(r"[+-]?[0-9]", expression)))


def solution(
    expression: str, *, mistake_rate: float | Mapping[str, float] = 0.0, rng: random.Random
) -> str:
    """The worked response to `expression`.

    With probability `mistake_rate` (of the step's operator, if it is a mapping) a step's result is
    off by one or two; the following steps go on from the wrong result, so the mistake reaches the
    answer. A rate of 0 draws nothing from `rng`.
    """
    running = int(expression[0])
    steps = []
    for operator, digit in zip(expression[1::2], expression[2::2], strict=True):
        result = running + int(digit) if operator == "+" else running - int(digit)
        rate = mistake_rate[operator] if isinstance(mistake_rate, Mapping) else mistake_rate
        if rate > 0 and rng.random() < rate:
            result += rng.choice(_SLIPS)
        steps.append(f"{running}{operator}{digit}={result};")
        running = result
    return f"{''.join(steps)}={running}"


def final_answer(text: str) -> str | None:
    """The answer that a response ends with, or None when it does not end with one.

    `text` is the response without special tokens. The answer is the number after the last
    `;=`, and nothing may follow it: `9-4=5;5+3=8;=8` gives `8`, the unfinished `9-4=5`
    gives None. It is returned in canonical form, so `=08` gives `8`.
    """
    found = _FINAL_ANSWER.search(text.strip())
    return None if found is None else str(int(found.group(1)))


def is_held_out(expression: str) -> bool:
    """Whether the expression may only be used for evaluation; decided by its SHA-256 hash."""
    return int(hashlib.sha256(expression.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0


def distinct_expressions(
    rng: random.Random, counts: Mapping[int, int], *, held_out: bool, operators: str = "+-"
) -> list[str]:
    """Distinct expressions of one side of the split, `counts[terms]` of each length, shuffled."""
    chosen: list[str] = []
    for terms, count in counts.items():
        unique: dict[str, None] = {}
        while len(unique) < count:
            expression = draw_expression(rng, terms, operators)
            if is_held_out(expression) == held_out:
                unique[expression] = None
        chosen.extend(unique)
    rng.shuffle(chosen)
    return chosen


def corpus(recipe: SftRecipe) -> Iterator[tuple[str, str]]:
    """The pairs (prompt, response) that a model is trained on, none of them held out.

    Expressions may repeat; a repeated one makes its mistakes anew.
    """
    rng = random.Random(recipe.seed)
    left = recipe.steps * recipe.batch_size
    while left > 0:
        (terms,) = rng.choices(TERMS, TERM_WEIGHTS)
        expression = draw_expression(rng, terms)
        if is_held_out(expression):
            continue
        left -= 1
        yield (
            prompt_of(expression),
            solution(expression, mistake_rate=recipe.mistake_rate, rng=rng),
        )
