"""``opd eval``: a model is measured as a run measures its student."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from opd_core.errors import ConfigError
from opd_core.recipe import load_recipe
from opd_core.training.attempts import Attempt, RunHistory
from opd_core.training.evaluation_records import read_evaluation, read_evaluations
from opd_core.training.files import EVALUATIONS_FOLDER, JOURNAL_FILE
from tasks.environment import RunRecord, write_config
from tasks.evaluation import ModelEvaluation, evaluate_model
from tests.opd_core.training.whole_loop import train
from tests.tasks.ended_run import RECIPE

ASSETS = RECIPE.parent / "assets" / "tiny"
FEW = ("data.evaluation_rows=12", "evaluation.samples=2", "opd=null", "task.group_size=2")
TRAINED = (*FEW, "training.steps=2", "training.prompts_per_step=8", "tracking.system_metrics=false")


def told(model: str, root: Path, *overrides: str, recipe: Path | None = RECIPE) -> ModelEvaluation:
    settings = (f"run.root={root}", *overrides)
    return evaluate_model(model, recipe, settings, default_recipe=RECIPE)


@pytest.mark.slow
def test_a_runs_student_gives_the_very_numbers_of_its_last_evaluation(tmp_path: Path) -> None:
    directory = tmp_path / "tiny-1"
    config = load_recipe(RECIPE, (f"run.root={tmp_path}", *TRAINED))
    asyncio.run(train(config, directory))
    history = RunHistory("tiny-1", (Attempt(1.0),), {})
    history.write(directory)
    write_config(RunRecord("tiny-1", directory, config, history))
    first, *_, last = read_evaluations(directory / EVALUATIONS_FOLDER)
    measured = told("tiny-1", tmp_path, recipe=None)
    assert measured.record.questions == last.questions
    journal = [json.loads(line) for line in (directory / JOURNAL_FILE).read_text().splitlines()]
    assert journal[-1]["metrics"]["eval/accuracy"] == measured.evaluation.accuracy
    assert measured.file == tmp_path / "evaluations" / "tiny-1.json"
    assert read_evaluation(measured.file) == measured.record
    assert told("student", tmp_path, *FEW).record.questions == first.questions


@pytest.mark.slow
def test_a_teacher_is_measured_by_its_name_and_by_its_directory(tmp_path: Path) -> None:
    few = FEW[:2]
    by_word = told("teacher", tmp_path, *few)
    assert by_word.evaluation.accuracy > 0.8
    assert by_word.file.name == "teacher.json"
    shutil.copytree(ASSETS / "teacher", tmp_path / "some model")
    for tokenizer in (tmp_path / "some model").glob("tokenizer*"):
        tokenizer.unlink()  # the student's is taken
    by_place = told(str(tmp_path / "some model"), tmp_path, *few)
    assert by_place.file.name == "some_model.json"
    assert by_place.record == by_word.record
    lines = "\n".join(by_place.lines())
    assert f"accuracy {by_word.evaluation.accuracy:.3f} ± " in lines
    assert "12 questions, 24 answers" in lines
    assert "% truncated" in lines


@pytest.mark.parametrize(
    ("model", "overrides", "words"),
    [
        ("teacher:other", (), "teacher:teacher"),
        ("teacher", ("opd=null", "task.group_size=2"), "none"),
        (
            "teacher",
            (
                "opd.teachers.0.launch=null",
                "opd.teachers.0.endpoint=http://127.0.0.1:1",
            ),
            "name its directory",
        ),
        ("student", ("data.evaluation=null",), "data.evaluation"),
        ("student", ("task.judge=null",), "task.judge"),
        ("no-such-run", (), "expected a run directory"),
    ],
)
def test_what_cannot_be_measured_says_what_to_name(
    tmp_path: Path, model: str, overrides: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        told(model, tmp_path, *overrides)


def test_a_model_needs_a_recipe_and_a_run_a_trained_student(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--recipe"):
        told("teacher", tmp_path, recipe=None)
    with pytest.raises(ConfigError, match="--recipe"):
        told(str(ASSETS / "teacher"), tmp_path, recipe=None)
    (tmp_path / "tiny-2").mkdir()
    with pytest.raises(ConfigError, match="no trained student"):
        told("tiny-2", tmp_path)


def test_importing_it_imports_no_heavy_library() -> None:
    code = "import sys, tasks.evaluation, tasks.sync\n"
    code += "print(*({'torch', 'transformers', 'mlflow', 'ray'} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=RECIPE.parents[2], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("", 0)
