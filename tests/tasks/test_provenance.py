"""What a run was made with, where it can be found out and where it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opd_core.recipe import load_recipe
from tasks.provenance import provenance

RECIPE = Path(__file__).parents[2] / "deployments" / "recipes" / "tiny.yaml"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def write_program(path: Path, *lines: str) -> None:
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)


def found(*overrides: str) -> dict[str, Any]:
    return provenance(load_recipe(RECIPE, overrides), 1.0)


def test_without_git_and_gpus_there_is_nothing_to_tell_of_them(programs: Path) -> None:
    told = found()
    assert (told["git_commit"], told["git_changes"], told["gpus"]) == ("", "", [])
    assert told["packages"]["torch"]
    assert told["python"].startswith("3.")
    write_program(programs / "git", "echo it is no repository", "exit 128")
    assert found()["git_commit"] == ""


def test_the_codes_commit_and_its_changes_are_told_apart(programs: Path) -> None:
    script = 'case "$*" in *rev-parse*) echo 12ab;; *diff*) printf "%s" "{}";; esac'
    changes = []
    for diff in ("", "one", "two"):
        write_program(programs / "git", script.format(diff))
        told = found()
        assert told["git_commit"] == "12ab"
        changes.append(told["git_changes"])
    assert changes[0] == "", "nothing was changed"
    assert len(set(changes)) == 3


def test_gpus_are_told_by_name(programs: Path) -> None:
    write_program(programs / "nvidia-smi", "echo NVIDIA H200", "echo NVIDIA H200")
    assert found()["gpus"] == ["NVIDIA H200", "NVIDIA H200"]


def test_a_servers_version_is_that_of_its_own_environment(programs: Path, tmp_path: Path) -> None:
    assert "sglang" not in found()["packages"]
    facts = tmp_path / "env" / "lib" / "python3.12" / "site-packages" / "sglang-0.5.99.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.99\n")
    python = tmp_path / "env" / "bin" / "python"
    told = found(f"opd.teachers.0.launch.python={python}")["packages"]
    assert told["sglang"] == "0.5.99"
    assert "lmdeploy" not in told
