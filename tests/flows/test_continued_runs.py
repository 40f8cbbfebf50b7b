"""Whole runs that are ended in the middle and go on: by hand, by the flow, by Prefect."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

StartRun = Callable[..., Any]
QUICK = (
    "training.prompts_per_step=32",
    "training.checkpoint_every=2",
    "data.evaluation_rows=16",
    "evaluation.samples=1",
)
MANY = 40
"""Train steps that are not over before the driver is killed."""
RETRIED = """
import sys
from flows.distill import distill
from flows.request import DistillRequest

request = DistillRequest(recipe_file="deployments/recipes/tiny.yaml", overrides=sys.argv[1:])
distill.with_options(retries=1)(request)
"""


def train_steps(run: Any) -> list[int]:
    """The train steps in the journal, as often as they are there."""
    return [r["train_step"] for r in run.journal() if "time/step_s" in r["metrics"]]


def kill_driver(run: Any) -> None:
    """End the process of the student's job, and nothing else."""
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        # The shell that started it has all of this in one word.
        if b"opd_core.training.driver" in words and str(run.directory()).encode() in words:
            os.kill(int(folder.name), signal.SIGKILL)
            return
    pytest.fail("no driver")


def wait_for_the_receipt(run: Any) -> None:
    """Wait until the supervisor of a killed flow has ended everything."""
    deadline = time.monotonic() + 90
    while '"event": "receipt"' not in (run.directory() / "ledger.jsonl").read_text():
        assert time.monotonic() < deadline, "no receipt"
        time.sleep(0.1)


@pytest.mark.long
def test_a_run_that_was_stopped_and_then_killed_goes_on_as_the_same_run(opd: StartRun) -> None:
    first = opd(*QUICK, "training.steps=500")
    first.wait_for(lambda: first.trained_steps() >= 3, "three train steps")
    resume = ("--resume", first.directory().name)
    early = opd(arguments=resume)
    assert early.finish() == 2, early.output()
    assert f"is still running (pid {first.process.pid})" in early.output()
    first.process.send_signal(signal.SIGINT)
    assert first.finish() == 130, first.output()
    assert f"continue it with: opd run --resume {first.directory()}" in first.output()
    stopped = first.json_file("summary.json")
    written = first.journal()

    second = opd(arguments=resume)
    second.wait_for(lambda: len(train_steps(second)) > stopped["train_steps"], "a further step")
    second.process.send_signal(signal.SIGKILL)
    second.process.wait(timeout=30)
    wait_for_the_receipt(second)

    steps = second.trained_steps() + 2
    third = opd(f"training.steps={steps}", "training.micro_batch_tokens=512", arguments=resume)
    assert third.finish() == 0, third.output()
    assert train_steps(third) == list(range(1, steps + 1))
    assert third.journal()[: len(written)] == written
    summary = third.json_file("summary.json")
    assert (summary["status"], summary["attempts"]) == ("completed", 3)
    assert (summary["run_id"], summary["train_steps"]) == (stopped["run_id"], steps)
    assert third.json_file("attempts/1/summary.json") == stopped
    assert third.json_file("attempts/2/receipt.json")["cause"] == "owner died"
    assert third.json_file("receipt.json")["clean"]
    assert not third.processes()
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{third.root / 'mlflow.db'}")
    assert summary["mlflow_run_id"] == stopped["mlflow_run_id"]
    assert client.get_run(summary["mlflow_run_id"]).info.status == "FINISHED"
    points = client.get_metric_history(summary["mlflow_run_id"], "opd_reverse_kl")
    assert [point.step for point in points] == list(range(1, steps + 1))


@pytest.mark.long
def test_a_killed_driver_is_started_again_and_the_teacher_stays(opd: StartRun) -> None:
    run = opd(*QUICK, f"training.steps={MANY}", "training.checkpoint_every=0")
    run.wait_for(lambda: run.trained_steps() >= 3, "three train steps")
    kill_driver(run)
    assert run.finish() == 0, run.output()
    assert "starting it again from its last checkpoint, 1 of 2" in run.output()
    summary = run.json_file("summary.json")
    assert (summary["status"], summary["job_restarts"]) == ("completed", 1)
    assert train_steps(run) == list(range(1, MANY + 1))
    assert len(run.pids_of("teacher-teacher")) == 1
    logs = {path.name for path in (run.directory() / "logs").iterdir()}
    assert {"student.log", "student-job-2.log"} <= logs
    assert not run.processes()


@pytest.mark.long
def test_a_flow_run_that_prefect_tries_again_goes_on_in_its_run_directory(opd: StartRun) -> None:
    run = opd(*QUICK, f"training.steps={MANY}", "training.max_restarts=0", script=RETRIED)
    run.wait_for(lambda: run.trained_steps() >= 3, "three train steps")
    kill_driver(run)
    assert run.finish() == 0, run.output()
    assert len(list(run.root.glob("tiny-*/"))) == 1
    first, second = run.json_file("run.json")["attempts"]
    assert (first["status"], second["status"]) == ("failed", "completed")
    assert first["flow_run_id"] == second["flow_run_id"] != ""
    assert train_steps(run) == list(range(1, MANY + 1))
    assert not run.processes()


@pytest.mark.long
def test_a_fork_trains_on_from_the_newest_checkpoint_under_other_settings(opd: StartRun) -> None:
    source = opd(*QUICK, "training.steps=3")
    assert source.finish() == 0, source.output()
    old = source.directory()
    settings = ("training.steps=5", "training.learning_rate=1e-5")
    fork = opd(*settings, arguments=("--fork", old.name))
    assert fork.finish() == 0, fork.output()
    (new,) = set(fork.root.glob("tiny-*/")) - {old}
    run = json.loads((new / "run.json").read_text())
    assert run["forked_from"] == {"run_id": old.name, "train_step": 3}
    summary = json.loads((new / "summary.json").read_text())
    assert (summary["train_steps"], summary["attempts"]) == (5, 1)
    records = [json.loads(line) for line in (new / "metrics.jsonl").read_text().splitlines()]
    assert records[: len(source.journal())] == source.journal()
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{fork.root / 'mlflow.db'}")
    tracked = client.get_run(summary["mlflow_run_id"])
    assert tracked.data.tags["opd.forked_from"] == old.name
    assert tracked.data.params["training.learning_rate"] == "1e-05"
    trained = [r["metrics"] for r in records if "time/step_s" in r["metrics"]]
    assert tracked.data.metrics["opd_reverse_kl"] == trained[-1]["opd_reverse_kl"]
