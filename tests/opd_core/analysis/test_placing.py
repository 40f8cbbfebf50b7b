"""Where runs are compared, and what each is worth there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from opd_core.analysis.comparison import ArmRun, Comparison, Target, compare
from opd_core.analysis.run_data import RunData
from opd_core.errors import ConfigError
from tests.opd_core.analysis.compared_runs import evaluation, journal, make_run, question


def run_at(
    run_id: str, right: Sequence[tuple[int, int]], *, steps: int = 50, speed: float = 1.0
) -> RunData:
    """A run of its own arm; ``right`` are train steps and how many of 100 questions were right
    then; a train step costs ``speed`` student tokens."""
    kept = [
        evaluation([question(f"q{row}", [float(row < count)]) for row in range(100)], step)
        for step, count in right
    ]
    records = journal(steps, total__student_tokens=speed * np.arange(1, steps + 1))
    return make_run(run_id, recipe=[f"name={run_id}"], evaluations=kept, records=records)


def run_of(comparison: Comparison, run_id: str) -> ArmRun:
    return next(run for arm in comparison.arms for run in arm.runs if run.run_id == run_id)


# --- between two evaluations ----------------------------------------------------------------------


def test_a_slow_run_is_not_compared_as_it_was_before_training() -> None:
    fast = run_at("fast", [(0, 10), (25, 50), (50, 60)])
    slow = run_at("slow", [(0, 10), (25, 50), (50, 60)], speed=4)
    comparison = compare([fast, slow], Target())
    assert comparison.at == 50
    taken = run_of(comparison, "slow")
    assert (taken.train_step, taken.train_step_after, taken.fraction) == (0, 25, 0.5)
    assert (taken.axis_value, taken.value) == (50, pytest.approx(0.3))
    (pair,) = comparison.pairs
    assert pair.difference == pytest.approx(0.3 - 0.6)
    assert pair.models is not None
    assert pair.models.low < -0.3 < pair.models.high
    assert any("slow: not measured at 50" in each for each in comparison.warnings)


def test_an_evaluation_near_the_place_is_taken_itself_and_the_nearest_of_several() -> None:
    run = run_at("run", [(48, 40), (49, 50), (51, 70)])
    assert run_of(compare([run], Target(at=49.2)), "run").train_step == 49
    run = run_at("run", [(0, 10), (50, 60)])
    for at in (48, 50, 52):
        taken = run_of(compare([run], Target(at=at)), "run")
        assert (taken.train_step, taken.train_step_after, taken.value) == (50, None, 0.6)
    exact = run_of(compare([run], Target(axis="steps", at=48)), "run")
    assert (exact.train_step, exact.train_step_after) == (0, 50)


def test_between_two_evaluations_only_their_common_questions_count() -> None:
    run = run_at("run", [(0, 0), (50, 100)])
    last = replace(run.evaluations[1], questions=run.evaluations[1].questions[:60])
    run = replace(run, evaluations=(run.evaluations[0], last))
    comparison = compare([run, run_at("other", [(0, 0), (50, 50)])], Target(axis="steps", at=25))
    assert comparison.pairs[0].questions == 60
    odd = replace(last, questions=(question("x", [1.0]),))
    with pytest.raises(ConfigError, match=r"after train steps \(0, 50\) answered different"):
        compare([replace(run, evaluations=(run.evaluations[0], odd))], Target(axis="steps", at=25))


def test_what_the_journal_alone_has_is_taken_between_its_steps_with_its_error() -> None:
    values = np.full(50, np.nan)
    values[9], values[29] = 0.2, 0.6
    errors = np.full(50, np.nan)
    errors[9], errors[29] = 0.02, 0.04
    records = journal(eval__accuracy=values, eval__accuracy_stderr=errors)
    arm = compare(
        [make_run("run", records=records, evaluations=())], Target(axis="steps", at=15)
    ).arms[0]
    assert arm.value == pytest.approx(0.3)
    assert arm.models is not None
    assert arm.models.high - arm.value == pytest.approx(1.96 * 0.025, rel=1e-3)


@pytest.mark.parametrize("at", [10, 60])
def test_before_the_first_and_beyond_the_last_evaluation_there_is_no_value(at: float) -> None:
    run, short = run_at("run", [(0, 1), (70, 60)], steps=70), run_at("short", [(25, 5), (50, 6)])
    comparison = compare([run, short], Target(at=at))
    assert [arm.label for arm in comparison.arms] == ["run"]
    assert any("short" in each and "is left out" in each for each in comparison.warnings)
    with pytest.raises(ConfigError, match=r"short .*, the baseline, .* only from 25 to 50"):
        compare([short, run], Target(at=at))


# --- the farthest place ---------------------------------------------------------------------------


def test_a_run_that_died_before_its_first_evaluation_is_not_compared_untrained() -> None:
    dead = run_at("dead", [(0, 10)], steps=5)
    dead = replace(dead, summary={"status": "failed"})
    runs = [run_at("run", [(0, 10), (50, 60)]), dead]
    for axis in ("steps", "student_tokens"):
        with pytest.raises(ConfigError, match=r"dead \(status: failed\) .* leave dead out"):
            compare(runs, Target(axis=axis))
        assert compare(runs, Target(axis=axis, at=0)).at == 0


def test_a_run_that_holds_all_others_back_is_named_with_its_status() -> None:
    dead = replace(run_at("dead", [(0, 10), (25, 50)], steps=30), summary={"status": "failed"})
    comparison = compare([run_at("run", [(0, 10), (25, 50), (50, 60)]), dead], Target())
    assert comparison.at == 25
    (said,) = (each for each in comparison.warnings if "leave it out" in each)
    assert said.startswith(
        "dead (status: failed) was last measured at 25 student_tokens, run at 50"
    )
    alike = [run_at("a", [(50, 60)]), run_at("b", [(48, 60)])]
    assert compare(alike, Target()).warnings == ()


# --- evaluations without a place ------------------------------------------------------------------


def test_an_evaluation_beyond_the_recorded_axis_has_no_place() -> None:
    torn = run_at("torn", [(0, 10), (25, 50), (50, 90)], steps=30)
    comparison = compare([torn, run_at("run", [(25, 50), (50, 60)])], Target())
    assert comparison.at == 25
    assert run_of(comparison, "torn").value == 0.5
    assert any(
        each.startswith("torn: what was measured after train step 50 is left out")
        for each in comparison.warnings
    )
    assert run_of(compare([torn], Target(axis="steps")), "torn").train_step == 50


def test_a_run_without_any_place_is_left_out() -> None:
    torn = run_at("torn", [(50, 90)], steps=30)
    comparison = compare([run_at("run", [(25, 50), (50, 60)]), torn], Target())
    assert (comparison.at, [arm.label for arm in comparison.arms]) == (50, ["run"])
    with pytest.raises(ConfigError, match=r"torn .*, the baseline, has no eval/accuracy"):
        compare([torn], Target())


def test_curves_end_where_their_axis_does() -> None:
    records = journal(30, total__student_tokens=np.arange(1.0, 31))
    beyond = journal(50, entropy=1.0)
    for record in beyond[30:]:
        record.metrics.pop("response_tokens")
    records = [
        replace(late, metrics=late.metrics | (records[at].metrics if at < 30 else {}))
        for at, late in enumerate(beyond)
    ]
    curve = (
        compare([make_run("run", records=records)], Target())
        .arms[0]
        .curve("entropy", "student_tokens")
    )
    assert curve is not None
    assert curve.x[-1] == 30
    assert len(curve.x) == 30
