"""Whole runs that use one kept teacher: real servers, started the way a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from opd_core.lifecycle.process import read_stat
from tests.flows.conftest import ROOT, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

QUICK = (
    "training.prompts_per_step=16",
    "training.checkpoint_every=0",
    "data.evaluation_rows=8",
    "evaluation.samples=1",
)
TeacherCommand = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TeacherCommand]:
    """``opd teacher …`` in a state folder of the test's own, in which its runs are too."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "deployments.cli", "teacher", *arguments]
        return subprocess.run(
            line, cwd=ROOT, capture_output=True, text=True, timeout=300, env=dict(os.environ)
        )

    yield command
    command("down", "tiny-teacher", "--force")


def told(teacher: TeacherCommand) -> dict[str, Any]:
    """What ``opd teacher list`` says of the only one."""
    (only,) = json.loads(teacher("list", "--json").stdout)
    return dict(only)


def server_pids(folder: Path) -> list[int]:
    """Every server that its keeper started."""
    entries = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [entry["pid"] for entry in entries if entry["event"] == "child_started"]


def test_two_runs_use_one_teacher_which_is_gone_when_its_time_is_over(
    teacher: TeacherCommand, opd: Callable[..., Any]
) -> None:
    up = teacher("up", "tiny", "--json")
    assert up.returncode == 0, up.stderr
    kept = json.loads(up.stdout)

    first = opd(*QUICK, *kept["overrides"], "training.steps=400")
    first.wait_for(lambda: first.trained_steps() >= 1, "a train step")
    run_id = first.directory().name
    assert told(teacher)["users"] == [run_id]
    refused = teacher("down", "tiny-teacher")
    assert refused.returncode == 1
    assert f"is used by run {run_id} in {first.directory()}" in refused.stderr
    first.process.kill()
    first.process.wait(timeout=30)
    assert told(teacher)["users"] == []
    assert first.pids_of("teacher-teacher") == []

    second = opd(*QUICK, *kept["overrides"], "training.steps=2")
    assert second.finish() == 0, second.output()
    assert "using the kept teacher tiny-teacher" in second.output()
    (pid,) = server_pids(Path(kept["folder"]))

    assert teacher("up", "tiny", "--hours", "0.0003").returncode in (0, 1)
    wait_until(lambda: told(teacher)["state"] == "ended", "the end of its time")
    assert told(teacher)["said"] == "no run has used it for 0.0003 h"
    stat = read_stat(pid)
    assert stat is None or not stat.running
