"""What is told of a run is what happened, however it ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opd_core.lifecycle.records import Receipt, Survivor
from opd_core.preflight import PreflightReport
from opd_core.recipe import load_recipe
from opd_core.training.results import RunResult, Span
from tasks.environment import RunRecord
from tasks.session import _left_over
from tasks.tracking import build_summary, git_commit, write_model_card, write_summary

RECIPE = Path(__file__).parents[2] / "deployments" / "recipes" / "tiny.yaml"


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    return RunRecord("tiny-1", tmp_path, load_recipe(RECIPE))


def receipt(*survivors: Survivor) -> Receipt:
    return Receipt("tiny-1", "completed", not survivors, 0.1, (), survivors, (), ())


def write_result(run: RunRecord) -> None:
    RunResult(
        "completed",
        train_steps=7,
        accuracy=Span(0.4, 0.7, 0.01, 0.02),
        groups={"completed": 5, "filtered": 1, "failed": 2},
        seconds={"training": 3.0},
        student_path="/somewhere/student",
    ).write(run.directory)


def test_a_completed_run_is_told_in_full(run: RunRecord) -> None:
    write_result(run)
    summary = build_summary(run, receipt(), {"teardown": 1.0}, error=None)
    assert summary["status"] == "completed"
    assert summary["accuracy"]["after"] == 0.7
    assert summary["opd_reverse_kl"]["before"] is None
    assert summary["groups"] == {"completed": 5, "filtered": 1, "failed": 2}
    assert summary["seconds"] == {"teardown": 1.0, "training": 3.0}


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("no"), "failed"), (KeyboardInterrupt(), "cancelled"), (SystemExit(), "cancelled")],
)
def test_a_run_that_was_ended_is_not_called_completed(
    run: RunRecord, error: BaseException, status: str
) -> None:
    write_result(run)
    summary = build_summary(run, receipt(), {}, error)
    assert summary["status"] == status
    assert type(error).__name__ in summary["error"]


def test_an_unclean_teardown_is_a_failure_that_names_what_is_left(run: RunRecord) -> None:
    write_result(run)
    left = receipt(Survivor(77, "python"))
    assert build_summary(run, left, {}, error=None)["status"] == "failed"
    assert "process 77 (python)" in _left_over(left)


def test_a_job_that_left_no_result_has_a_summary_too(run: RunRecord) -> None:
    summary = build_summary(run, receipt(), {}, RuntimeError("gone"))
    assert summary["status"] == "failed"
    assert summary["train_steps"] == 0
    write_summary(run, summary)
    assert json.loads((run.directory / "summary.json").read_text()) == summary


def test_the_model_card_says_how_it_was_measured(run: RunRecord) -> None:
    write_result(run)
    write_model_card(run, PreflightReport(), build_summary(run, receipt(), {}, error=None))
    card = (run.directory / "model_card.md").read_text()
    assert "0.400 ± 0.010 → 0.700 ± 0.020" in card
    assert "torch" in card


def test_the_commit_is_named_or_called_unknown() -> None:
    assert git_commit()
