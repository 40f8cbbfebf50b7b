"""A run is named after its recipe and seed."""

from __future__ import annotations

from pathlib import Path

from flows.distill import run_name
from flows.request import DistillRequest


def test_it_has_the_name_of_the_recipe_and_the_seed_that_counts() -> None:
    assert run_name(DistillRequest(recipe="tiny")) == "tiny · seed 1234"
    assert run_name(DistillRequest(recipe="tiny", seed=7)) == "tiny · seed 7"
    assert run_name(DistillRequest(overrides=["name=mine", "seed=8"])) == "mine · seed 8"


def test_a_recipe_that_cannot_be_read_still_has_a_name(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.yaml")
    assert run_name(DistillRequest(recipe_file=missing)) == f"distill {missing}"
