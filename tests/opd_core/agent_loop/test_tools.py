"""Tools of answers of several turns: what they may say, the tokens that call them, the
calculator."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd_core.agent_loop.tools import ToolError, ToolRunner, calculator, stop_ids_of
from opd_core.errors import ConfigError
from opd_core.training.models import load_tokenizer

STUDENT = Path(__file__).parents[3] / "deployments/recipes/assets/tiny/student"

TOOLS = """
import os


def echo(text, prompt):
    return f"{prompt.row}:{text}"


def nothing(text, prompt):
    return ""


def ends(text, prompt):
    return None


def number(text, prompt):
    return 5


def raises(text, prompt):
    raise KeyError("no such key")


def dies_of_bad(text, prompt):
    if text == "bad":
        os._exit(3)
    return "alive"
"""


@pytest.fixture(scope="module", autouse=True)
def _tools_are_importable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "some_tools.py").write_text(TOOLS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)  # spawned processes get the same path
        yield


@pytest.fixture
def one_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.parametrize(("name", "said"), [("echo", "0:4+5="), ("nothing", ""), ("ends", None)])
async def test_a_tool_says_some_text_or_nothing_or_ends_the_answer(
    name: str, said: str | None, one_thread: Any, make_prompt: Any
) -> None:
    tool = ToolRunner(f"some_tools:{name}", make_executor=lambda: one_thread)
    assert await tool.call("4+5=", make_prompt()) == said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("number", "expected text, or None to end the answer, got 5"),
        ("raises", "KeyError: 'no such key'"),
    ],
)
async def test_a_tool_that_fails_is_an_error_that_names_it(
    name: str, said: str, one_thread: Any, make_prompt: Any
) -> None:
    tool = ToolRunner(f"some_tools:{name}", make_executor=lambda: one_thread)
    with pytest.raises(ToolError, match=f"^some_tools:{name}: {said}$"):
        await tool.call("", make_prompt())


async def test_a_tool_runs_in_a_process_of_its_own_that_is_replaced(make_prompt: Any) -> None:
    before = multiprocessing.active_children()
    with ToolRunner("some_tools:dies_of_bad") as tool:
        with pytest.raises(ToolError, match="some_tools:dies_of_bad: the tool's process died"):
            await tool.call("bad", make_prompt())
        assert await tool.call("good", make_prompt()) == "alive"
    assert multiprocessing.active_children() == before


# ------------------------------------------------------------------------- tokens that end a turn


ENDS = (1, 14)
"""The tiny student's end token, and one that a generation config might name too (``+``)."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(STUDENT))


def test_texts_of_one_token_become_its_id(tokenizer: Any) -> None:
    assert stop_ids_of(("=", ";"), tokenizer, ENDS) == (16, 17)
    assert stop_ids_of((), tokenizer, ENDS) == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("=;", "'=;' is '=', ';': name a text that is exactly one"),
        ("", "'' is none"),
        ("x", "the student's tokenizer does not know 'x'"),
        ("<|end|>", "is an end token of the student"),
        ("+", "is an end token of the student"),
    ],
)
def test_what_cannot_end_a_turn_is_refused(text: str, said: str, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"^task\.tool_stop: ") as error:
        stop_ids_of(("=", text), tokenizer, ENDS)
    assert said in str(error.value)


def test_a_text_that_is_the_unknown_token_is_refused() -> None:
    class Guessing:
        unk_token_id, eos_token_id = 0, 1

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [0]

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return ["<unk>"]

    with pytest.raises(ConfigError, match="'ß' is '<unk>'"):
        stop_ids_of(("ß",), Guessing(), ENDS)


# --------------------------------------------------------------------------------- the calculator


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("9-4=", "5"),
        ("9-4=5;5+3=", "8"),
        ("9-4=5;5+3=8;=", ""),  # the answer itself is the student's
        ("2-9=-7;-7-1=", "-8"),
        ("2*(3+4)=", "14"),
        ("-(2-5)*-2=", "-6"),
        ("It is 3 + 4 =", "7"),
        ("007=", "7"),
        ("=", ""),
        ("", ""),
        ("9-4", ""),  # not called by "="
        ("9--=", ""),
        ("(9-4=", ""),
        ("9-4)=", ""),
        ("9 4=", ""),
        ("()=", ""),
        ("8/2=", ""),
        ("8.2+1=", ""),
        ("-" * 199 + "1=", "-1"),
        ("(" * 200 + "=", ""),
        ("1+" * 100 + "1=", ""),  # one too long
    ],
)
def test_the_calculator_says_the_value_or_nothing(text: str, said: str, make_prompt: Any) -> None:
    assert calculator(text, make_prompt()) == said


numbers = st.integers(0, 999).map(str)
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map("".join),
        inner.map("({})".format),
        inner.map("-{}".format),
    ),
    max_leaves=12,
)


@given(expressions)
def test_the_calculator_agrees_with_python(expression: str) -> None:
    said = calculator(f"{expression}=", None)  # type: ignore[arg-type]
    assert said == (str(eval(expression)) if len(expression) <= 200 else "")
