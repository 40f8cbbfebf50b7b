"""The checks before a start: keys, the pair check card, the run directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import SecretStr

from opd_core.config import OPDTeacherConfig
from opd_core.errors import PreflightError
from opd_core.recipe import load_recipe
from tasks.console import TERMINAL
from tasks.environment import check_environment, open_run, resolve_key

RECIPE = Path(__file__).parents[2] / "deployments" / "recipes" / "tiny.yaml"


def teacher(key: str | None) -> OPDTeacherConfig:
    secret = None if key is None else SecretStr(key)
    return OPDTeacherConfig(name="t", endpoint="http://127.0.0.1:1", api_key=secret)


def test_no_reference_is_no_key() -> None:
    assert resolve_key(teacher(None)) is None


def test_a_plain_key_from_python_is_itself() -> None:
    assert resolve_key(teacher("s3cret")) == "s3cret"


def test_an_environment_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "from there")
    assert resolve_key(teacher("env:SOME_KEY")) == "from there"


@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_that_is_not_set_or_empty_stops_the_run(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SOME_KEY", value)
    with pytest.raises(PreflightError, match="SOME_KEY is not set, or empty"):
        resolve_key(teacher("env:SOME_KEY"))


def test_a_run_directory_holds_the_resolved_recipe_without_any_key(tmp_path: Path) -> None:
    config = load_recipe(RECIPE, [f"run.root={tmp_path}", "opd.teachers.0.api_key=env:SOME_KEY"])
    run = open_run.fn(config)
    assert run.directory.parent == tmp_path
    assert run.run_id.startswith("tiny-")
    written = json.loads((run.directory / "config.json").read_text())
    assert written["opd"]["teachers"][0]["api_key"] == "env:SOME_KEY"
    assert written["training"]["betas"] == [0.9, 0.99]
    assert open_run.fn(config).directory != run.directory


def test_checks_tell_the_pair_in_one_line_and_the_run_directory_keeps_its_card(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_recipe(RECIPE, [f"run.root={tmp_path}"])
    with caplog.at_level("INFO", "opd"):
        checked = check_environment.fn(config)
    assert "teacher 'teacher' fits the student: tokenizer, vocabulary" in caplog.text
    run = open_run.fn(config, checked.cards)
    (card,) = json.loads((run.directory / "pair_check.json").read_text())
    assert {row["level"] for row in card["rows"]} == {"ok"}
    assert "## Student against teacher 'teacher'" in (run.directory / "pair_check.md").read_text()


def test_a_pair_that_does_not_fit_is_shown_before_the_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_recipe(RECIPE, [f"run.root={tmp_path}", "sampling.max_new_tokens=300"])
    monkeypatch.setattr(TERMINAL, "lines", True)
    with pytest.raises(PreflightError, match="its context of 256 tokens is too short"):
        check_environment.fn(config)
    shown = capsys.readouterr().err
    assert "student against teacher 'teacher'" in shown
    assert "256 of 339 needed" in shown
