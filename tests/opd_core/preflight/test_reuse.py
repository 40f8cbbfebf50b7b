"""When models and data need not be checked again: only if nothing that the checks look at
differs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opd_core.config import ExperimentConfig
from opd_core.preflight import check_files, files_key
from opd_core.preflight.reuse import SECTIONS
from opd_core.recipe import load_recipe

RECIPES = Path(__file__).parents[3] / "deployments" / "recipes"
TINY = RECIPES / "assets" / "tiny"


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """Of the tiny recipe, with models and data of the test's own."""
    shutil.copytree(TINY, tmp_path / "tiny")
    return [
        f"student.model={tmp_path / 'tiny' / 'student'}",
        f"opd.teachers.0.launch.model={tmp_path / 'tiny' / 'teacher'}",
        f"data.train={tmp_path / 'tiny' / 'train.jsonl'}",
        f"data.evaluation={tmp_path / 'tiny' / 'heldout.jsonl'}",
    ]


def key(settings: list[str], *more: str) -> str:
    return files_key(load_recipe(RECIPES / "tiny.yaml", [*settings, *more]))


def edit_and_put_the_time_back(file: Path) -> None:
    """As many bytes as before, and the time of change that it had."""
    before, data = file.stat(), bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_a_copy(file: Path) -> None:
    shutil.copy2(file, file.with_suffix(".new"))
    os.replace(file.with_suffix(".new"), file)


CHANGES: dict[str, Callable[[Path], object]] = {
    "weights": lambda tiny: edit_and_put_the_time_back(tiny / "teacher" / "model.safetensors"),
    "tokenizer": lambda tiny: edit_and_put_the_time_back(tiny / "student" / "tokenizer.json"),
    "copy": lambda tiny: replace_by_a_copy(tiny / "student" / "config.json"),
    "rows": lambda tiny: edit_and_put_the_time_back(tiny / "train.jsonl"),
    "held-out rows": lambda tiny: (tiny / "heldout.jsonl").unlink(),
    "one more file": lambda tiny: (tiny / "student" / "added_tokens.json").write_text("{}"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_any_change_of_a_file_is_seen(settings: list[str], tmp_path: Path, what: str) -> None:
    before = key(settings)
    assert key(settings) == before
    CHANGES[what](tmp_path / "tiny")
    assert key(settings) != before


@pytest.mark.parametrize(
    "setting",
    ["sampling.max_new_tokens=47", "task.group_size=2", "opd.teachers.0.launch.context_length=200"],
)
def test_a_setting_that_the_checks_look_at_is_seen(settings: list[str], setting: str) -> None:
    assert key(settings, setting) != key(settings)


def test_another_seed_length_or_place_is_the_same_check(settings: list[str]) -> None:
    other = ["seed=7", "training.steps=3", "run.root=elsewhere", "tracking.experiment=other"]
    assert key(settings, *other) == key(settings)


LOOKED_AT: set[str] = set()


class Watched(ExperimentConfig):
    """Keeps in mind which sections of it are looked at."""

    def __getattribute__(self, name: str) -> Any:
        if name in ExperimentConfig.model_fields:
            LOOKED_AT.add(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("engine", ["transformers", "sglang"])
def test_the_checks_of_files_look_at_no_other_section(engine: str) -> None:
    config = load_recipe(RECIPES / "tiny.yaml", [f"sampling.engine={engine}"])
    fields = {name: getattr(config, name) for name in ExperimentConfig.model_fields}
    watched = Watched.model_construct(**fields)
    LOOKED_AT.clear()
    check_files(watched)
    assert {"student", "opd", "data"} <= LOOKED_AT <= SECTIONS
