"""What a run was made with, where it can be found out and where it cannot."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from opd_core.recipe import load_recipe
from tasks.provenance import MOST_READ, provenance, uncommitted_changes

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


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the code in a working tree without changes; ``*.log`` and ``runs`` apart."""
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)
    tree = tmp_path / "tree"
    (tree / "code").mkdir(parents=True)
    (tree / "code" / "judges.py").write_text("one")
    (tree / ".gitignore").write_text("*.log")
    author = "-c", "user.name=a", "-c", "user.email=a@b"
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tree), *command], check=True)
    return tree / "code"


def test_untracked_files_are_changes_but_for_what_is_ignored_or_of_runs(code: Path) -> None:
    tree = code.parent
    hashes = []

    def after_writing(path: str, text: str) -> str:
        (tree / path).parent.mkdir(exist_ok=True)
        (tree / path).write_text(text)
        return uncommitted_changes(code, apart=tree / "runs")

    assert after_writing("a.log", "") == ""
    assert after_writing("runs/mlflow.db", "") == ""
    hashes.append(after_writing("new judge.py", "one"))
    hashes.append(after_writing("new judge.py", "two"))
    hashes.append(after_writing("code/ä.py", ""))
    hashes.append(after_writing("code/judges.py", "two"))
    assert len({"", *hashes}) == 5
    (tree / "nowhere.py").symlink_to(tree / "nowhere.py")
    hashes.append(uncommitted_changes(code, apart=tree / "runs"))
    assert len({*hashes}) == 5


def test_of_a_large_untracked_file_the_name_counts(code: Path) -> None:
    def told(content: bytes) -> str:
        (code / "data.bin").write_bytes(content)
        return uncommitted_changes(code, apart=code / "runs")

    assert told(b"a" * (MOST_READ + 1)) == told(b"b" * (MOST_READ + 1)) != ""
    assert told(b"a" * MOST_READ) != told(b"b" * MOST_READ)


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
