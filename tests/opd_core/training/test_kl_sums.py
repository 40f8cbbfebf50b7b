"""Where the reverse KL of a train step lies: sums against numbers by hand, and rollouts to see."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opd_core.agent_loop.survivors import Survivors
from opd_core.rollout import RolloutState
from opd_core.training.kl_sums import (
    SEARCHED,
    Scored,
    TokenKLWriter,
    answer_start,
    kept_rollouts,
    kl_sums,
    scored_rollouts,
)
from opd_core.training.models import load_tokenizer
from opd_core.training.step_records import StepRecord
from opd_core.training.token_kl import KLSum, read_token_kl, read_token_kls
from opd_core.training.vocabulary import Vocabulary
from tests.opd_core.training.conftest import SYMBOLS
from tests.opd_core.training.whole_loop import config_of

Make = Callable[..., RolloutState]


@pytest.fixture
def vocabulary(student_dir: Path) -> Vocabulary:
    return Vocabulary(load_tokenizer(str(student_dir)))


@pytest.fixture
def make(make_rollout: Any, make_prompt: Any) -> Make:
    """``make("1+2", k, …)``: a rollout of these symbols; k is that of its tokens, in order."""

    def made(text: str, k: list[float], index: int = 0, **fields: Any) -> RolloutState:
        ids = (*(SYMBOLS.index(symbol) for symbol in text), SYMBOLS.index("<eos>"))
        prompt = make_prompt(index, data_source=fields.pop("data_source", "sums"))
        rollout: RolloutState = make_rollout(
            index,
            prompt,
            response_ids=ids,
            rollout_logprobs=tuple(-1.0 + one for one in k),
            teacher_logprobs=(-1.0,) * len(ids),
            **fields,
        )
        return rollout

    return made


def scored(rollouts: list[RolloutState], vocabulary: Vocabulary, **changes: Any) -> list[Scored]:
    settings: dict[str, Any] = {"truncated": "train", "answer_pattern": "="} | changes
    return scored_rollouts(rollouts, vocabulary, **settings)


def test_tokens_are_summed_by_source_segment_class_and_place(
    make: Make, vocabulary: Vocabulary
) -> None:
    # Places 0 | 1 2 | 3 4; the answer begins at "=".
    rollouts = [
        make("1+2=3", [1.0, 2.0, 3.0, -1.0, 0.5, 0.25]),
        make("2=", [4.0, 1.0, 1.0], 1),
        make("a", [0.5, 0.0], 2, data_source="words"),
    ]
    table = kl_sums(scored(rollouts, vocabulary), vocabulary)
    assert set(table) == {
        KLSum("sums", "reasoning", "digit", 0, 2, 5.0, 17.0),
        KLSum("sums", "reasoning", "symbol", 1, 1, 2.0, 4.0),
        KLSum("sums", "reasoning", "digit", 1, 1, 3.0, 9.0),
        KLSum("sums", "answer", "symbol", 1, 1, 1.0, 1.0),
        KLSum("sums", "answer", "special", 1, 1, 1.0, 1.0),
        KLSum("sums", "answer", "symbol", 2, 1, -1.0, 1.0),
        KLSum("sums", "answer", "digit", 2, 1, 0.5, 0.25),
        KLSum("sums", "answer", "special", 2, 1, 0.25, 0.0625),
        KLSum("words", "answer", "word", 0, 1, 0.5, 0.25),
        KLSum("words", "answer", "special", 1, 1, 0.0, 0.0),
    }


def test_places_double_from_cell_to_cell(make: Make, vocabulary: Vocabulary) -> None:
    rollout = make("1" * 40, [0.0] * 41)
    table = kl_sums(scored([rollout], vocabulary), vocabulary)
    digits = {cell.position: cell.tokens for cell in table if cell.token_class == "digit"}
    assert digits == {0: 1, 1: 2, 2: 4, 3: 8, 4: 16, 5: 9}
    (end,) = (cell for cell in table if cell.token_class == "special")
    assert end.position == math.floor(math.log2(40 + 1))


def test_a_tools_tokens_and_what_does_not_train_are_in_no_sum(
    make: Make, vocabulary: Vocabulary
) -> None:
    mask = (True, False, False, True)
    tool = make("1+2", [1.0, 9.0, 9.0, 3.0], response_mask=mask)
    cut = make("12", [5.0, 5.0, 5.0], 1, finish_reason="length")
    rollouts = [tool, cut]
    table = kl_sums(scored(rollouts, vocabulary, truncated="mask"), vocabulary)
    assert sum(cell.tokens for cell in table) == 2
    assert sum(cell.k for cell in table) == 4.0
    assert sum(cell.tokens for cell in kl_sums(scored(rollouts, vocabulary), vocabulary)) == 5
    (seen,) = kept_rollouts(scored([tool], vocabulary), vocabulary, 1, (0, 1))
    assert seen.response_mask == mask
    assert seen.student == (0.0, 0.0, 0.0, 2.0)
    assert seen.teacher == (-1.0, 0.0, 0.0, -1.0)


@pytest.mark.parametrize(
    ("text", "prompt", "pattern", "answer"),
    [
        ("so<think>a</think>b</think>c", "", None, "c"),
        ("a \\boxed{1} b \\boxed{2}", "", None, "\\boxed{2}"),
        ("a #### 3", "", None, "#### 3"),
        ("Answer: a \nAnswer: b", "", None, "Answer: b"),
        ("all of it", "", None, "all of it"),
        ("<think>cut", "", None, ""),
        ("cut", "user: a <think>\n", None, ""),
        ("a", "<think>\n\n</think>\n\n", None, "a"),
        ("x = 1 = 2", "", "= ?", "= 2"),
        ("no match", "", "=", "no match"),
        ("a" * 30_000 + " = 2", "", "=", "= 2"),
        ("a = " + "b" * SEARCHED, "", "=", "a = " + "b" * SEARCHED),
        ("a #### " + "b" * SEARCHED, "", None, "#### " + "b" * SEARCHED),
    ],
)
def test_the_answer_begins_where_models_begin_it(
    text: str, prompt: str, pattern: str | None, answer: str
) -> None:
    assert text[answer_start(text, prompt, pattern) :] == answer


def test_an_answer_begins_at_the_token_that_holds_its_first_character(
    make: Make, vocabulary: Vocabulary
) -> None:
    (found,) = scored([make("1+2=3", [0.0] * 6)], vocabulary)
    assert found.answer_from == 3
    (whole,) = scored([make("1+2=3", [0.0] * 6)], vocabulary, answer_pattern=" =")
    assert whole.answer_from == 3, "where it begins with the token too"
    (begins,) = scored([make("=3", [0.0] * 3)], vocabulary)
    assert begins.answer_from == 0


def test_half_of_the_kept_are_the_worst_and_half_are_drawn_by_the_seed(
    make: Make, vocabulary: Vocabulary
) -> None:
    means = [float(n) for n in np.random.default_rng(0).permutation(40)]
    some = scored([make("1", [k, k], i) for i, k in enumerate(means)], vocabulary)
    kept = kept_rollouts(some, vocabulary, 5, (1, 10))
    assert [one.why for one in kept] == ["worst"] * 3 + ["random"] * 2
    assert [means[one.index] for one in kept[:3]] == [39, 38, 37]
    assert len({one.index for one in kept}) == 5
    assert kept == kept_rollouts(some, vocabulary, 5, (1, 10))
    assert kept != kept_rollouts(some, vocabulary, 5, (1, 11))
    assert len(kept_rollouts(some[:3], vocabulary, 8, (1, 10))) == 3
    assert kept_rollouts(some, vocabulary, 0, (1, 10)) == ()


def test_a_kept_rollout_shows_its_tokens(make: Make, vocabulary: Vocabulary) -> None:
    rollout = make("1=", [0.123456789, 0.0, 0.0], 4, reward=0.5, group_id=7)
    (seen,) = kept_rollouts(scored([rollout], vocabulary), vocabulary, 1, (0, 1))
    assert (seen.group_id, seen.index, seen.row, seen.data_source) == (7, 4, 4, "sums")
    assert (seen.reward, seen.finish_reason, seen.prompt_tokens) == (0.5, "stop", 3)
    assert [token.strip() for token in seen.tokens] == ["1", "=", "<eos>"]
    assert seen.student[0] == -0.87654
    assert seen.response_mask == (True, True, True)
    assert seen.answer_from == 1


@pytest.fixture
def writer(student_dir: Path, vocabulary: Vocabulary, tmp_path: Path) -> TokenKLWriter:
    """Of a run of 7 train steps that keeps a rollout in every third."""
    changes = {
        "training": {"steps": 7},
        "tracking": {"rollouts_every": 3, "rollouts_kept": 1},
    }
    config = config_of(student_dir, tmp_path, "http://127.0.0.1:1", **changes)
    return TokenKLWriter(tmp_path / "token_kl", vocabulary, config)


def test_sums_are_kept_of_each_step_and_rollouts_of_some(
    writer: TokenKLWriter, make: Make, make_group: Any
) -> None:
    groups = (make_group(make("1+2=3", [1.0] * 6)),)
    for step in range(1, 8):
        writer.write(StepRecord(step, groups, Survivors(), {}))
    kept = list(read_token_kls(writer.folder))
    assert [one.train_step for one in kept] == list(range(1, 8))
    assert all(sum(cell.tokens for cell in one.sums) == 6 for one in kept)
    assert [one.train_step for one in kept if one.rollouts] == [1, 3, 6, 7]


def test_a_step_that_is_trained_again_is_not_written_again(
    writer: TokenKLWriter, make: Make, make_group: Any
) -> None:
    for k in (1.0, 2.0):
        groups = (make_group(make("1", [k, k])),)
        writer.write(StepRecord(2, groups, Survivors(), {}))
    record = read_token_kl(writer.folder / "step-000002.json")
    assert sum(cell.k for cell in record.sums) == 2.0


def test_what_cannot_be_written_costs_the_file_only(
    writer: TokenKLWriter, make: Make, make_group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    writer.folder.write_text("a file stands there")
    writer.write(StepRecord(1, (make_group(make("1", [0.0, 0.0])),), Survivors(), {}))
    assert "step-000001.json is not written" in caplog.text
