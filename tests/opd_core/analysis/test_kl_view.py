"""Where the KL lies: tables and sentences against numbers by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from opd_core.analysis.kl_view import KLView, Moment, load_kl_view, position_label, worst_said
from opd_core.errors import DataError
from opd_core.training.step_files import path_of
from opd_core.training.token_kl import KeptRollout, KLSum, TokenKL, write_token_kl
from tests.opd_core.analysis.run_builder import RunBuilder


def cell(tokens: int, k: float, k_squared: float, **names: object) -> KLSum:
    where = {"data_source": "sums", "segment": "answer", "token_class": "digit", "position": 0}
    return KLSum(**{**where, **names}, tokens=tokens, k=k, k_squared=k_squared)  # type: ignore[arg-type]


def view_of(folder: Path, *steps: tuple[KLSum, ...]) -> KLView:
    for step, sums in enumerate(steps, start=1):
        write_token_kl(path_of(folder, step), TokenKL(step, sums, ()))
    view = load_kl_view(folder)
    assert view is not None
    return view


def kept(*k: float) -> KeptRollout:
    count = len(k)
    one = RunBuilder(response_tokens=count, rollouts_kept=1).token_kl(1).rollouts[0]
    names = {name: getattr(one, name) for name in KeptRollout.__slots__}
    numbers = {"student": (0.0,) * count, "teacher": tuple(-each for each in k)}
    return KeptRollout(**{**names, **numbers, "response_mask": (True,) * count})


def test_means_errors_and_shares_are_those_of_the_tokens(tmp_path: Path) -> None:
    # digits: k = 1, 3 (one cell) and 2; words: k = -1, 1
    digits = cell(2, 4.0, 10.0), cell(1, 2.0, 4.0, position=1)
    words = cell(2, 0.0, 2.0, token_class="word")
    view = view_of(tmp_path, (*digits, words))
    table = next(table for table in view.tables if table.name == "token class")
    first, second = (row.before for row in table.rows)
    assert [row.label for row in table.rows] == ["digit", "word"]
    assert first == Moment(3, 2.0, pytest.approx(1 / math.sqrt(3)), 1.0)
    assert second == Moment(2, 0.0, pytest.approx(1.0), 0.0)


def test_first_and_last_five_steps_are_held_against_each_other(tmp_path: Path) -> None:
    view = view_of(tmp_path, *((cell(10, step, step),) for step in range(1, 13)))
    assert (view.before, view.after) == ((1, 2, 3, 4, 5), (8, 9, 10, 11, 12))
    (row,) = view.tables[0].rows
    assert row.before is not None
    assert row.after is not None
    assert (row.before.mean, row.after.mean) == (0.3, 1.0)


@pytest.mark.parametrize(
    ("steps", "before", "after"), [(1, (1,), ()), (2, (1,), (2,)), (5, (1, 2), (4, 5))]
)
def test_a_short_run_never_counts_a_step_on_both_sides(
    tmp_path: Path, steps: int, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    view = view_of(tmp_path, *[(cell(10, 1.0, 1.0),)] * steps)
    assert (view.before, view.after) == (before, after)


def test_the_sentence_names_what_holds_most(tmp_path: Path) -> None:
    sums = cell(10, 3.0, 9.0), cell(30, 1.0, 9.0, token_class="word")
    said = {table.name: table.said for table in view_of(tmp_path, sums, sums).tables}
    assert said["token class"] == (
        "After training, “digit” holds 75\u00a0% of the KL in 25\u00a0% of the tokens."
    )
    assert said["segment"] == ""


def test_the_sentence_names_the_kind_whose_tokens_hold_the_most_each(tmp_path: Path) -> None:
    large, small = cell(80, 6.0, 9.0), cell(15, 3.0, 9.0, token_class="word")
    tiny = cell(1, 0.5, 9.0, token_class="punctuation")  # 5 % of the KL
    said = view_of(tmp_path, (large, small, tiny)).tables[2].said
    assert "“word” holds 32\u00a0% of the KL in 16\u00a0% of the tokens." in said


def test_a_share_above_the_whole_says_that_the_others_are_negative(tmp_path: Path) -> None:
    sums = cell(10, 3.0, 9.0), cell(30, -1.0, 9.0, token_class="word")
    said = view_of(tmp_path, sums).tables[2].said
    assert said == (
        "In these steps, “digit” holds 150\u00a0% of the KL in 25\u00a0% of the tokens; "
        "the sum over all others is negative."
    )


def test_shares_of_a_sum_that_is_not_positive_are_not_told(tmp_path: Path) -> None:
    sums = cell(10, -3.0, 9.0), cell(30, 1.0, 9.0, token_class="word")
    table = view_of(tmp_path, sums).tables[2]
    assert table.said == ""
    assert all(row.before is not None and math.isnan(row.before.share) for row in table.rows)


def test_many_data_sources_are_the_largest_and_the_others(tmp_path: Path) -> None:
    sums = tuple(cell(100 - n, 1.0, 1.0, data_source=f"s{n:02d}") for n in range(20))
    table = view_of(tmp_path, sums).tables[3]
    assert [row.label for row in table.rows] == [f"s{n:02d}" for n in range(12)] + ["all others"]
    others = table.rows[-1].before
    assert others is not None
    assert others.tokens == sum(100 - n for n in range(12, 20))


@pytest.mark.parametrize(("every", "shown"), [(1, [3, 38]), (10, [10, 30])])
def test_rollouts_are_those_of_the_first_and_last_step_that_kept_any(
    tmp_path: Path, every: int, shown: list[int]
) -> None:
    build = RunBuilder(steps=40, rollouts_every=every)
    for step in range(3, 39):  # neither the first step nor the last one
        write_token_kl(path_of(tmp_path, step), build.token_kl(step))
    view = load_kl_view(tmp_path)
    assert view is not None
    assert [step.train_step for step in view.steps] == shown
    assert all(len(step.rollouts) == 8 for step in view.steps)
    assert view.prompt_tokens == "not scored; 12 tokens on average in the rollouts below"


def test_one_step_that_kept_rollouts_is_shown_once(tmp_path: Path) -> None:
    write_token_kl(path_of(tmp_path, 10), RunBuilder().token_kl(10))
    view = load_kl_view(tmp_path)
    assert view is not None
    assert [step.train_step for step in view.steps] == [10]


def test_records_that_say_at_their_end_that_they_keep_none_are_not_read(tmp_path: Path) -> None:
    build = RunBuilder(steps=30, rollouts_kept=0)
    for step in range(1, 31):
        write_token_kl(path_of(tmp_path, step), build.token_kl(step))
    for step in range(6, 26):  # neither before nor after
        record = path_of(tmp_path, step).read_bytes()
        path_of(tmp_path, step).write_bytes(b"what cannot be read" + record)
    view = load_kl_view(tmp_path)
    assert view is not None
    assert view.steps == ()


def test_the_worst_hundredth_is_told_with_its_share() -> None:
    said = worst_said([kept(*[0.01] * 198, 8.0, -2.0)])
    assert said == (
        "Of the 200 tokens of these rollouts, the worst 1\u00a0% carry 83\u00a0% of the "
        "disagreement (sum of |k|); half of all tokens have |k| ≤ 0.01."
    )
    assert worst_said([kept(0.0, 0.0)]) == worst_said([]) == ""


def test_positions_count_tokens_from_1() -> None:
    assert [position_label(p) for p in (0, 1, 2, 10)] == ["1", "2 to 3", "4 to 7", "1,024 to 2,047"]


def test_no_records_are_no_view_and_a_broken_one_is_named(tmp_path: Path) -> None:
    assert load_kl_view(tmp_path / "none") is None
    assert load_kl_view(tmp_path) is None
    path_of(tmp_path, 1).write_text("{")
    with pytest.raises(DataError, match="step-000001"):
        load_kl_view(tmp_path)
