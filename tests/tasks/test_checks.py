"""The checks before a start: what they tell, and what the run directory keeps of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opd_core.config import ExperimentConfig
from opd_core.errors import PreflightError
from opd_core.preflight import PreflightReport, check_files
from opd_core.recipe import load_recipe
from opd_core.training.lineage import RunPlan
from tasks.checks import REPORT, check_environment, check_models_and_data
from tasks.console import TERMINAL
from tasks.environment import open_run

RECIPE = Path(__file__).parents[2] / "deployments" / "recipes" / "tiny.yaml"


def check(config: ExperimentConfig) -> PreflightReport:
    return check_environment.fn(config, check_files(config))


def test_checks_tell_the_pair_in_one_line_and_the_run_directory_keeps_its_card(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_recipe(RECIPE, [f"run.root={tmp_path}"])
    with caplog.at_level("INFO", "opd"):
        checked = check(config)
    assert "teacher 'teacher' fits the student: tokenizer, vocabulary" in caplog.text
    run = open_run.fn(RunPlan(config), checked)
    (card,) = json.loads((run.directory / "pair_check.json").read_text())
    assert {row["level"] for row in card["rows"]} == {"ok"}
    assert "## Student against teacher 'teacher'" in (run.directory / "pair_check.md").read_text()
    found = run.history.fingerprints
    assert set(found) == {"the student", "teacher 'teacher'", "data.train", "data.evaluation"}
    assert len(set(found.values())) == 4


def test_a_pair_that_does_not_fit_is_shown_before_the_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_recipe(RECIPE, [f"run.root={tmp_path}", "sampling.max_new_tokens=300"])
    monkeypatch.setattr(TERMINAL, "lines", True)
    with pytest.raises(PreflightError, match="its context of 256 tokens is too short"):
        check(config)
    shown = capsys.readouterr().err
    assert "student against teacher 'teacher'" in shown
    assert "256 of 339 needed" in shown


def test_problems_of_files_of_the_machine_and_of_keys_are_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    (tmp_path / "train.jsonl").write_text("no row\n")
    wrong = [f"data.train={tmp_path / 'train.jsonl'}", "task.judge=no.such:judge"]
    wrong += ["opd.teachers.0.api_key=env:SOME_KEY"]
    with pytest.raises(PreflightError) as raised:
        check(load_recipe(RECIPE, wrong))
    for said in ("train.jsonl", "task.judge: ", "SOME_KEY is not set"):
        assert said in str(raised.value)


def test_what_is_kept_of_files_is_all_that_was_found(tmp_path: Path) -> None:
    config = load_recipe(RECIPE, ["sampling.max_new_tokens=300"])
    kept = check_models_and_data.fn(config)
    found = check_files(config)
    assert found.problems
    assert REPORT.validate_json(kept) == found
