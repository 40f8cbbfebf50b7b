"""``opd plan``: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from deployments.planning import plan
from opd_core.planning import make_plan, read_cards
from opd_core.recipe import find_recipe, load_recipe

ROOT = Path(__file__).parents[2]
DAPO = "dapo_math_qwen3_8b"


@pytest.fixture(autouse=True)
def without_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("OPD_CACHE", str(tmp_path / "cache"))


def opd_plan(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(plan)
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.output


def test_cards_that_are_too_small_end_with_status_2_and_the_arithmetic() -> None:
    status, told = opd_plan(DAPO, "--card", "80")
    assert status == 2
    (line,) = (line for line in told.splitlines() if line.startswith("DOES NOT FIT: GPU 7"))
    assert "65.5 GB" in line
    assert "48.0 GB of launch.memory_fraction 0.6 x 80.0 GB" in line
    assert "the smallest common card on which all fits: 141 GB" in told


@pytest.mark.parametrize(("name", "card"), [(f"{DAPO}_80gb", "80"), (DAPO, "141")])
def test_cards_that_suffice_end_with_status_0(name: str, card: str) -> None:
    status, told = opd_plan(name, "--card", card)
    assert (status, told.splitlines()[-1]) == (0, "fits, by this estimate")


def test_without_a_card_the_smallest_one_that_fits_is_assumed_and_said() -> None:
    status, told = opd_plan(DAPO)
    assert status == 0
    assert "assumed: no nvidia-smi here; name it with --card GB" in told
    assert "of 141.0 GB" in told


def test_the_driver_is_asked_where_there_is_one(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '7, GPU-a, 81559, NVIDIA X'\n")
    program.chmod(0o755)
    status, told = opd_plan(DAPO)
    assert status == 2
    assert "as nvidia-smi tells" in told
    assert "0.6 x 85.5 GB" in told
    assert "its memory is not known: name it with --card GB" in told


def test_a_change_of_the_recipe_changes_the_plan() -> None:
    changes = ("--set", "opd.teachers.0.launch.tp_size=2")
    changes += ("--set", "opd.teachers.0.launch.devices=['6','7']", "--card", "141")
    status, told = opd_plan(DAPO, *changes)
    assert status == 0
    assert "--tp-size 2" in told
    assert "GPU 6, GPU 7: fits" in told


def test_the_same_is_there_as_json() -> None:
    status, told = opd_plan(DAPO, "--card", "80", "--json")
    found = json.loads(told)
    assert status == 2
    assert found["smallest_card_gb"] == 141
    by_name = {device["name"]: device for device in found["devices"]}
    assert by_name["7"]["problems"]
    assert found["problems"][-1] == f"GPU 7: {by_name['7']['problems'][0]}"


def test_a_mistake_in_the_recipe_is_told() -> None:
    status, told = opd_plan(DAPO, "--set", "trainin.steps=1")
    assert status == 2
    assert "did you mean 'training'?" in told


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_starts_what_was_planned_and_writes_the_files(tmp_path: Path) -> None:
    changes = ["training.steps=1", "training.prompts_per_step=4", "evaluation.every=0"]
    changes += ["evaluation.samples=1", "data.evaluation_rows=2", f"run.root={tmp_path}/runs"]
    config = load_recipe(find_recipe("tiny"), changes)
    command = [sys.executable, "-m", "deployments.cli", "run", "tiny"]
    for change in changes:
        command += ["--set", change]
    path = os.environ["PATH"] + os.pathsep + os.defpath
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PATH": path}, check=True, timeout=800)
    (run,) = (tmp_path / "runs").glob("tiny-*/")
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    started = {e["name"]: e["argv"] for e in lines if e["event"] == "child_starting"}
    planned = make_plan(config, read_cards())
    for process in planned.processes[:-1]:
        argv = started.pop(process.name)
        assert len(argv) == len(process.argv)
        for really, said in zip(argv, process.argv, strict=True):
            free = said == "0" and really.isdecimal()
            assert really == said or free or said == "TEMPORARY-FOLDER"
    assert not started
    for file in planned.files:
        assert (run / file.path).exists(), file
    said = {file.path.removesuffix("/") for file in planned.files}
    only_sometimes = {"parked"}  # where the teacher was away for a while
    assert {path.name for path in run.iterdir()} - only_sometimes <= said
