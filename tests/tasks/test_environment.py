"""The run directory: made, taken up again, forked."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from opd_core.errors import ConfigError, PreflightError
from opd_core.preflight import PreflightReport
from opd_core.recipe import load_recipe
from opd_core.training.attempts import end_attempt
from opd_core.training.checkpoint_folder import CheckpointFolder
from opd_core.training.forks import ForkPoint
from opd_core.training.lineage import RunPlan
from tasks.environment import open_run, plan_experiment
from tasks.provenance import add_provenance

RECIPE = Path(__file__).parents[2] / "deployments" / "recipes" / "tiny.yaml"


def test_a_run_directory_holds_the_resolved_recipe_without_any_key(tmp_path: Path) -> None:
    config = load_recipe(RECIPE, [f"run.root={tmp_path}", "opd.teachers.0.api_key=env:SOME_KEY"])
    run = open_run.fn(RunPlan(config), PreflightReport())
    assert run.directory.parent == tmp_path
    assert run.run_id.startswith("tiny-")
    written = json.loads((run.directory / "config.json").read_text())
    assert written["opd"]["teachers"][0]["api_key"] == "env:SOME_KEY"
    assert written["training"]["betas"] == [0.9, 0.99]
    assert open_run.fn(RunPlan(config), PreflightReport()).directory != run.directory


def test_each_attempt_tells_what_it_was_made_with(tmp_path: Path) -> None:
    config = load_recipe(RECIPE, [f"run.root={tmp_path}"])
    run = open_run.fn(RunPlan(config), PreflightReport())
    file = run.directory / "provenance.json"
    (attempt,) = json.loads(file.read_text())["attempts"]
    assert attempt["started_at"] == run.history.attempts[0].started_at
    assert attempt["packages"]["torch"] == metadata.version("torch")
    add_provenance(run.directory, config, 5.0)
    again = json.loads(file.read_text())["attempts"]
    assert again == [attempt, attempt | {"started_at": 5.0}]
    file.write_text("half a fi")
    add_provenance(run.directory, config, 6.0)
    assert [one["started_at"] for one in json.loads(file.read_text())["attempts"]] == [6.0]


def test_a_resumed_run_keeps_its_directory_and_takes_its_settings_from_it(tmp_path: Path) -> None:
    root = f"run.root={tmp_path}"
    name = "description=Über λ 🎓"
    first = open_run.fn(plan_experiment(str(RECIPE), [root, name]), PreflightReport())
    end_attempt(first.directory, "cancelled")
    (first.log("student")).write_text("of the first")
    plan = plan_experiment(str(RECIPE), [root, "training.steps=77"], resume=first.run_id)
    again = open_run.fn(plan, PreflightReport())
    assert (again.run_id, again.directory) == (first.run_id, first.directory)
    assert again.config.description == "Über λ 🎓"
    assert json.loads((again.directory / "config.json").read_text())["training"]["steps"] == 77
    assert [attempt.status for attempt in again.history.attempts] == ["cancelled", ""]
    assert again.log("student").parent.is_dir()
    assert not again.log("student").exists()


def test_data_that_changed_since_the_first_attempt_stops_the_run(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_bytes((RECIPE.parent / "assets" / "tiny" / "train.jsonl").read_bytes())
    settings = [f"run.root={tmp_path / 'runs'}", f"data.train={data}"]
    first = open_run.fn(plan_experiment(str(RECIPE), settings), PreflightReport())
    data.write_bytes(data.read_bytes().replace(b"+", b"-", 1))
    plan = plan_experiment(str(RECIPE), resume=str(first.directory))
    with pytest.raises(PreflightError, match=r"data\.train is not what it was"):
        open_run.fn(plan, PreflightReport())


def test_a_fork_is_a_run_of_its_own_with_the_checkpoint_of_another(tmp_path: Path) -> None:
    root = f"run.root={tmp_path}"
    first = open_run.fn(plan_experiment(str(RECIPE), [root]), PreflightReport())
    folder = CheckpointFolder(first.directory / "checkpoints", keep=1, keep_every=0)
    loop = {"queue": {}, "next_group_id": 0, "survivors": {}, "buffer": [], "under_way": []}
    folder.commit(folder.begin(3), {"loop": loop})
    (first.directory / "metrics.jsonl").touch()
    plan = plan_experiment(str(RECIPE), [root, "seed=9"], fork=str(first.directory))
    fork = open_run.fn(plan, PreflightReport())
    assert fork.run_id != first.run_id
    assert fork.config.seed == 9
    assert fork.history.forked_from == ForkPoint(first.run_id, 3)
    assert (fork.directory / "checkpoints" / "step-000003" / "loop.json").is_file()


def test_a_fork_that_cannot_take_over_its_checkpoint_leaves_no_run(tmp_path: Path) -> None:
    root = f"run.root={tmp_path}"
    first = open_run.fn(plan_experiment(str(RECIPE), [root]), PreflightReport())
    plan = RunPlan(first.config, fork=first.directory)
    with pytest.raises(ConfigError, match="no checkpoint"):
        open_run.fn(plan, PreflightReport())
    assert list(tmp_path.iterdir()) == [first.directory]
