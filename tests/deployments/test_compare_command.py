"""``opd compare`` at a terminal: the verdict first and the page last, or JSON only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deployments.comparing import compare
from opd_core.analysis.comparison import Target
from tests.tasks.compared_runs import write_arms


def test_the_verdict_comes_first_and_the_page_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(write_arms(tmp_path, mlflow=False), Target(), root=tmp_path)
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[0].startswith("tiny-slow ")
    assert Path(lines[-1].removeprefix("page: ")).is_file()
    assert "warning: no compared run is tracked in MLflow" in told.err


def test_json_is_all_there_is_on_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = write_arms(tmp_path, mlflow=False)
    out = tmp_path / "out"
    compare(names, Target(), root=tmp_path, out=out, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((out / "comparison.json").read_text())
