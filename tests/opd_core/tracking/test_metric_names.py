"""Names that MLflow accepts (its own check is asked in the MLflow tests), and finite points."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd_core.tracking.journal import JournalRecord
from opd_core.tracking.names import MAX_NAME_LENGTH, Point, accepted_name, finite_points


@pytest.mark.parametrize(
    "name", ["opd_reverse_kl", "opd_reverse_kl/math_dapo", "time/a-b.c: d", "é/中文", "a..b/c"]
)
def test_a_name_that_mlflow_accepts_stays_as_it_is(name: str) -> None:
    assert accepted_name(name) == name


def test_a_changed_name_stays_readable() -> None:
    changed = accepted_name("opd_reverse_kl/math/中文 (a=b)")
    assert changed.startswith("opd_reverse_kl/math/中文 _a_b_-")
    assert len(changed) == len("opd_reverse_kl/math/中文 _a_b_-") + 6


@pytest.mark.parametrize("name", ["", "/", "a//b", "a/", "./a", "a/../b", "..", "..a", "/a"])
def test_no_name_resolves_to_another_path(name: str) -> None:
    changed = accepted_name(name)
    assert changed != name
    assert not changed.startswith((".", "/"))
    assert all(part not in ("", ".", "..") for part in changed.split("/"))


@given(st.text(max_size=300), st.text(max_size=300))
def test_two_names_never_become_one(first: str, second: str) -> None:
    assert (accepted_name(first) == accepted_name(second)) == (first == second)


def test_names_that_differ_in_a_refused_character_or_beyond_the_limit_stay_apart() -> None:
    long = "x" * 300
    names = ["a=b", "a(b", "a_b", "a?b", long, long + "y", long[:MAX_NAME_LENGTH]]
    assert len({accepted_name(name) for name in names}) == len(names)


@given(st.text(max_size=400))
def test_a_result_is_short_enough_and_accepted_again(name: str) -> None:
    changed = accepted_name(name)
    assert 0 < len(changed) <= MAX_NAME_LENGTH
    assert accepted_name(changed) == changed


def test_points_carry_time_and_step_and_leave_out_what_is_not_finite() -> None:
    records = [
        JournalRecord(1, 1700000000.1239, {"a": 1.0, "nan": math.nan}),
        JournalRecord(2, 1700000001.0, {"inf": math.inf, "minus": -math.inf, "b=": 0.0}),
    ]
    points, dropped = finite_points(records)
    assert dropped == 3
    assert points == [
        Point("a", 1.0, 1700000000123, 1),
        Point(accepted_name("b="), 0.0, 1700000001000, 2),
    ]
