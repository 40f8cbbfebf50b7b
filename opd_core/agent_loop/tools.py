"""Tools for answers of several turns: ``(text of the response so far, prompt) -> text or None``.

A turn of the student ends with one of the recipe's ``task.tool_stop``; the tool then says what is
appended to the trace (perhaps nothing, ``""``), or None to end the answer. It is given all of the
response so far, what it said itself included, but special tokens left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from opd_core.agent_loop.functions import FunctionError, FunctionRunner
from opd_core.errors import ConfigError
from opd_core.rollout import Prompt

LONGEST_EXPRESSION = 200
"""Characters; a longer expression is not computed."""
_ASKED = re.compile(r"([0-9+\-*/^%.,() ]*)=$")
"""With what it cannot compute, lest half of an expression be taken for the whole."""
_SYMBOL = re.compile(r"[0-9]+|[^ ]")


class ToolError(FunctionError):
    """A tool raised, crashed, hung or gave neither text nor None."""


class ToolRunner(FunctionRunner):
    """Runs the tool named by ``path`` in a process of its own. Use as a context manager."""

    kind, error = "tool", ToolError

    async def call(self, text: str, prompt: Prompt) -> str | None:
        """What is appended to the response ``text``; None ends it. Raises :class:`ToolError`."""
        said = await self._run(text, prompt)
        if said is None or isinstance(said, str):
            return said
        raise self._failed(f"expected text, or None to end the answer, got {said!r:.80}")


def stop_ids_of(
    tool_stop: Sequence[str], tokenizer: Any, end_ids: Sequence[int]
) -> tuple[int, ...]:
    """The ids of the tokens that end a turn; ``tokenizer`` is the student's (transformers), and
    ``end_ids`` are all tokens that end its answers.

    Raises :class:`ConfigError` for a text that is not exactly one token, or ends the whole answer.
    """
    return tuple(_stop_id(text, tokenizer, end_ids) for text in tool_stop)


def _stop_id(text: str, tokenizer: Any, end_ids: Sequence[int]) -> int:
    try:
        ids = tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # some tokenizers refuse what they do not know
        raise ConfigError(
            f"task.tool_stop: the student's tokenizer does not know {text!r} ({error}): name a "
            "token of its vocabulary"
        ) from None
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        tokens = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(ids))) or "none"
        raise ConfigError(
            f"task.tool_stop: expected one token of the student's tokenizer, but {text!r} is "
            f"{tokens}: name a text that is exactly one"
        )
    if ids[0] in end_ids:
        raise ConfigError(
            f"task.tool_stop: {text!r} is an end token of the student, which ends the answer and "
            "not a turn: remove it"
        )
    return int(ids[0])


def calculator(text: str, prompt: Prompt) -> str:
    """The value of the expression right before the ``=`` that ended the turn.

    Integers, ``+``, ``-``, ``*`` and parentheses: ``9-4=5;5+3=`` gives ``8``. Where there is no
    expression, or one that it cannot compute, it says nothing, and the student writes what follows.
    """
    asked = _ASKED.search(text)
    if asked is None or len(asked[1]) > LONGEST_EXPRESSION:
        return ""
    try:
        return str(_value(_SYMBOL.findall(asked[1])))
    except (ValueError, IndexError):
        return ""


def _value(symbols: list[str]) -> int:
    """The value of a whole expression. Raises ValueError or IndexError if it is none."""
    symbols.reverse()  # the next one is the last, and taken off
    value = _sum(symbols)
    if symbols:
        raise ValueError(symbols)
    return value


def _sum(symbols: list[str]) -> int:
    value = _product(symbols)
    while symbols and symbols[-1] in "+-":
        sign = 1 if symbols.pop() == "+" else -1
        value += sign * _product(symbols)
    return value


def _product(symbols: list[str]) -> int:
    value = _factor(symbols)
    while symbols and symbols[-1] == "*":
        symbols.pop()
        value *= _factor(symbols)
    return value


def _factor(symbols: list[str]) -> int:
    symbol = symbols.pop()
    if symbol == "-":
        return -_factor(symbols)
    if symbol == "(":
        value = _sum(symbols)
        if symbols.pop() != ")":
            raise ValueError(symbols)
        return value
    return int(symbol)
