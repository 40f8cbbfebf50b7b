"""``opd check``: what a recipe would meet, told without starting anything."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from deployments.cli import app

ROOT = Path(__file__).parents[2]
TEACHER = ROOT / "deployments" / "recipes" / "assets" / "tiny" / "teacher"


def check(*arguments: str) -> Result:
    """In this process, on a wide terminal."""
    return CliRunner(env={"COLUMNS": "160", "NO_COLOR": "1"}).invoke(app, ["check", *arguments])


@pytest.fixture
def thinking_teacher(tmp_path: Path) -> str:
    """The tiny teacher with a template that puts a think tag at the end of the prompt."""
    shutil.copytree(TEACHER, tmp_path / "teacher")
    file = tmp_path / "teacher" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["chat_template"] += "<think>"
    file.write_text(json.dumps(settings))
    return f"opd.teachers.0.launch.model={tmp_path / 'teacher'}"


@pytest.mark.slow
def test_a_recipe_that_fits_shows_its_card(tmp_path: Path) -> None:
    """Through the command, in a process of its own."""
    command = [sys.executable, "-m", "deployments.cli", "check", "tiny"]
    done = subprocess.run(
        [*command, "--set", f"run.root={tmp_path / 'runs'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "student against teacher 'teacher'" in done.stdout
    assert "256 of 87 needed" in done.stdout
    assert "a run would start (4000 rows of data)" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_warnings_are_told_and_do_not_refuse(thinking_teacher: str) -> None:
    done = check("tiny", "--set", thinking_teacher)
    assert done.exit_code == 0
    assert "+<think>" in done.stdout.splitlines()
    assert "warning: teacher 'teacher': its prompts end with <think>" in done.stdout
    assert "problem" not in done.stdout


def test_all_problems_are_told_and_refuse() -> None:
    changes = ("sampling.max_new_tokens=300", "opd.teachers.0.api_key=env:NO_SUCH_KEY")
    done = check("tiny", *(part for change in changes for part in ("--set", change)))
    assert done.exit_code == 2
    problems = [line for line in done.stdout.splitlines() if line.startswith("problem: ")]
    assert "student: its context of 256 tokens" in problems[0]
    assert "teacher 'teacher': its context of 256 tokens is too short" in problems[1]
    assert "NO_SUCH_KEY is not set, or empty" in problems[2]
    assert "a run would start" not in done.stdout


def test_a_key_in_a_prefect_block_is_left_to_the_run() -> None:
    done = check("tiny", "--set", "opd.teachers.0.api_key=block:teacher-key")
    assert done.exit_code == 0
    assert "a Prefect block, which is looked up when the run starts" in done.stdout


def test_json_holds_problems_warnings_and_cards(thinking_teacher: str) -> None:
    changes = ("--set", thinking_teacher, "--set", "sampling.max_new_tokens=300")
    done = check("tiny", "--json", *changes)
    assert done.exit_code == 2
    found = json.loads(done.stdout)
    assert sorted(found) == ["cards", "name", "ok", "problems", "warnings"]
    assert (found["name"], found["ok"], len(found["problems"])) == ("tiny", False, 2)
    assert "end with <think>" in found["warnings"][0]
    (card,) = found["cards"]
    assert sorted(card) == ["rendering_diff", "rows", "teacher"]
    levels = {row["item"]: row["level"] for row in card["rows"]}
    assert (levels["context"], levels["think tags"], levels["sampling"]) == (
        "error",
        "warning",
        "ok",
    )


def test_a_mistake_in_the_recipe_is_told_as_by_run() -> None:
    done = check("tiny", "--set", "trainin.steps=20")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "did you mean 'training'?" in done.stderr
