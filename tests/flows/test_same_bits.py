"""Whole deterministic runs: whatever is killed on the way, the student ends with the same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

TINY = Path(__file__).parents[2] / "deployments/recipes/assets/tiny"
STEPS, PROMPTS, ROWS = 8, 12, 40
EPOCH_END = ROWS // PROMPTS + 1
"""The train step in which the first epoch ends and the second begins."""

DRIVER, TRAINING_ACTOR = "opd_core.training.driver", "ray::TrainingActor"


def settings(rows: Path, *more: str) -> list[str]:
    return [
        "deterministic=true",
        f"data.train={rows}",
        "data.evaluation=null",
        "task.judge=null",
        f"training.steps={STEPS}",
        f"training.prompts_per_step={PROMPTS}",
        "training.checkpoint_every=3",
        "training.max_restarts=3",
        "training.actors=2",
        "tracking.mlflow=false",
        "tracking.tensorboard=false",
        *more,
    ]


def kill(run: Any, what: str) -> None:
    """SIGKILL the run's process whose command line holds ``what``."""
    for pid in run.processes():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        if what in command and "job_supervisor" not in command and "/bin/sh" not in command:
            os.kill(pid, signal.SIGKILL)
            return
    pytest.fail(f"no process {what!r} in {run.directory()}:\n{run.output()}")


def student_of(run: Any) -> dict[str, torch.Tensor]:
    return load_file(run.directory() / "student" / "model.safetensors")


def test_kills_of_the_driver_and_of_a_training_actor_change_no_bit(
    opd: Callable[..., Any], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = (TINY / "train.jsonl").read_text().splitlines(keepends=True)[:ROWS]
    rows.write_text("".join(lines))
    whole = opd(*settings(rows, f"run.root={tmp_path / 'whole'}"))
    whole.root = tmp_path / "whole"
    assert whole.finish() == 0, whole.output()
    killed = opd(*settings(rows))
    for step, victim in ((2, DRIVER), (EPOCH_END - 1, TRAINING_ACTOR), (6, DRIVER)):
        killed.wait_for(lambda step=step: killed.trained_steps() >= step, f"train step {step}")
        restarts = killed.output().count("from its last checkpoint")
        kill(killed, victim)
        killed.wait_for(
            lambda seen=restarts: killed.output().count("from its last checkpoint") > seen,
            f"the job's restart after {victim} died",
        )
    assert killed.finish() == 0, killed.output()
    found, wanted = student_of(killed), student_of(whole)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    steps = [r["train_step"] for r in killed.journal() if "time/step_s" in r["metrics"]]
    assert steps == list(range(1, STEPS + 1))
    summary = killed.json_file("summary.json")
    assert summary["job_restarts"] == 3
    assert summary["server_restarts"] == {}, "teachers stayed up"
    curve = [
        [r["metrics"]["opd_reverse_kl"] for r in run.journal() if "opd_reverse_kl" in r["metrics"]]
        for run in (killed, whole)
    ]
    assert curve[0] == curve[1]
    assert killed.json_file("receipt.json")["clean"]
    assert not killed.processes()
