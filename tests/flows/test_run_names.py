"""A run is named after its recipe and seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.distill import run_name
from flows.request import DistillRequest
from opd_core.recipe import RECIPES, load_recipe


def test_it_has_the_name_of_the_recipe_and_the_seed_that_counts() -> None:
    assert run_name(DistillRequest(recipe="tiny")) == "tiny · seed 1234"
    assert run_name(DistillRequest(recipe="tiny", seed=7)) == "tiny · seed 7"
    assert run_name(DistillRequest(overrides=["name=mine", "seed=8"])) == "mine · seed 8"


def test_a_recipe_that_cannot_be_read_still_has_a_name(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.yaml")
    assert run_name(DistillRequest(recipe_file=missing)) == f"distill {missing}"


def test_a_fork_has_the_recipe_and_the_seed_of_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPD_RUNS", str(tmp_path))
    (tmp_path / "run-x").mkdir()
    config = load_recipe(RECIPES / "tiny_grpo.yaml", ["name=another", "seed=99"])
    (tmp_path / "run-x" / "config.json").write_text(json.dumps(config.resolved()))
    for fork in ("run-x", str(tmp_path / "run-x")):
        assert run_name(DistillRequest(fork=fork)) == "another · seed 99 · fork of run-x"
    changed = DistillRequest(fork="run-x", seed=7)
    assert run_name(changed) == "another · seed 7 · fork of run-x"


def test_a_fork_of_a_run_that_is_not_there_says_nothing_of_another_recipe(tmp_path: Path) -> None:
    missing = str(tmp_path / "run-y")
    assert run_name(DistillRequest(fork=missing)) == "fork of run-y"
