"""The command line, as far as it answers without starting anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from opd_core.lifecycle.process import ProcessId, identify
from opd_core.lifecycle.registry import RegisteredRun, Registry

ROOT = Path(__file__).parents[2]
SHIPPED = [
    "dapo_math_qwen3_8b",
    "dapo_math_qwen3_8b_80gb",
    "dapo_math_qwen3_8b_lmdeploy",
    "dapo_math_qwen3_8b_mixed",
    "dapo_math_qwen3_8b_two_nodes",
    "smollm2_heal",
    "tiny",
    "tiny_calculator",
    "tiny_grpo",
    "tiny_mixed",
    "tiny_multi_teacher",
    "tiny_sglang",
]


def opd(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deployments.cli", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "200", **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_typing_error_in_an_override_names_the_key_and_the_right_one() -> None:
    done = opd("run", "tiny", "--set", "trainin.steps=20")
    assert done.returncode == 2
    assert "tiny.yaml" in done.stderr
    assert "did you mean 'training'?" in done.stderr


def test_an_unknown_recipe_lists_those_that_ship() -> None:
    done = opd("run", "tinny")
    assert done.returncode == 2
    assert ", ".join(SHIPPED) in done.stderr


def test_a_run_is_begun_from_a_recipe_or_from_an_earlier_run() -> None:
    done = opd("run")
    assert done.returncode == 2
    assert "expected a recipe, or a run: --resume RUN, --fork RUN" in done.stderr


@pytest.mark.parametrize("option", ["--resume", "--fork"])
def test_a_run_that_is_not_there_is_told_with_where_it_was_looked_for(
    option: str, tmp_path: Path
) -> None:
    done = opd("run", option, "tiny-0", "--set", f"run.root={tmp_path}")
    assert done.returncode == 2
    assert f"no run 'tiny-0': expected a run directory, or the id of a run in {tmp_path}" in (
        done.stderr
    )
    done = opd("run", "tiny", option, str(tmp_path))
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr


def test_an_unknown_preparation_lists_those_that_exist() -> None:
    done = opd("prepare", "nothing")
    assert done.returncode == 2
    assert "smollm2" in done.stderr


def test_a_dead_run_is_shown_ended_and_then_gone(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "opd-lab" / "runs")
    (tmp_path / "tiny-1").mkdir()
    never = ProcessId(os.getpid(), 1)
    lacks = (sys.executable, "-c", "import sys; sys.exit('MLflow is away')")
    registry.add(RegisteredRun.here("tiny-1", tmp_path / "tiny-1", never, lacks, 5.0))
    state = {"XDG_STATE_HOME": str(tmp_path)}
    done = opd("reap", "--dry-run", "--json", **state)
    assert (done.returncode, json.loads(done.stdout)[0]["done"]) == (0, "would be ended")
    done = opd("reap", "--json", **state)
    assert (done.returncode, json.loads(done.stdout)[0]["done"]) == (1, "MLflow is away")
    registry.add(RegisteredRun.here("tiny-1", tmp_path / "tiny-1", never, (), 5.0))
    done = opd("reap", **state)
    assert done.returncode == 0
    assert "ended and settled" in " ".join(done.stdout.split())
    assert opd("reap", **state).stdout == "every run is settled\n"


def test_a_run_that_can_never_be_settled_is_struck_out_by_hand(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "opd-lab" / "runs")
    (tmp_path / "tiny-1").mkdir()
    for name, owner in (("tiny-1", ProcessId(os.getpid(), 1)), ("tiny-2", identify(os.getpid()))):
        assert owner is not None
        settle = (sys.executable, "-c", "import sys; sys.exit('never')")
        registry.add(RegisteredRun.here(name, tmp_path / "tiny-1", owner, settle, 5.0))
    done = opd("reap", "--forget", "tiny-1", XDG_STATE_HOME=str(tmp_path))
    assert (done.returncode, done.stdout.split()[0]) == (0, "tiny-1")
    done = opd("reap", "--forget", "tiny-2", XDG_STATE_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "tiny-2" in done.stderr
    assert [run.run_id for run in registry.runs()] == ["tiny-2"]


def test_recipes_are_listed_with_what_they_do() -> None:
    done = opd("recipes")
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == SHIPPED


def test_the_page_of_settings_is_the_configurations_own() -> None:
    done = opd("settings")
    assert done.stdout == (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "command", ["automations", "check", "plan", "prepare", "reap", "run", "teacher", "up"]
)
def test_every_command_explains_itself(command: str) -> None:
    assert "Usage" in opd(command, "--help").stdout
