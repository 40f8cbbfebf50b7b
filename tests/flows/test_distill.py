"""Whole runs of the tiny experiment: what they leave, and what is left however they end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.teardown.stage import foreigners

pytestmark = pytest.mark.slow

FEW_STEPS = ("training.steps=3", "data.evaluation_rows=32", "evaluation.samples=1")
MANY_STEPS = ("training.steps=500", "data.evaluation_rows=16", "evaluation.samples=1")
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
"""127.0.0.1 as /proc/net/tcp writes it, and as an IPv6 socket's IPv4 address."""
StartRun = Callable[..., Any]


@pytest.fixture
def foreign_ray(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Ray cluster that no run started."""
    with foreigners(tmp_path) as foreign:
        yield foreign.ray


def assert_nothing_left(run: Any) -> None:
    """No process with the run's mark, no port of it taken, no Ray session of it."""
    receipt = run.json_file("receipt.json")
    assert receipt["clean"], receipt
    deadline = time.monotonic() + 120
    while strays := run.processes() + run.strays():
        assert time.monotonic() < deadline, f"still there: {strays}"
        time.sleep(0.1)
    for port in receipt["ports"]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port["port"]))
    for scratch in receipt["scratch"]:
        assert not Path(scratch["path"]).exists()


def test_one_command_runs_an_experiment_and_leaves_its_results(
    opd: StartRun, foreign_ray: subprocess.Popen[bytes]
) -> None:
    """On Prefect's own temporary server, beside a foreign Ray cluster."""
    run = opd(*FEW_STEPS, api=None)
    assert run.finish() == 0, run.output()
    summary = json.loads(run.output().splitlines()[-1])
    assert summary == run.json_file("summary.json")
    assert summary["status"] == "completed"
    assert summary["groups"] == {"completed": 3 * 128, "filtered": 0, "failed": 0}
    assert 0 < summary["accuracy"]["before"] < 1
    assert summary["opd_reverse_kl"]["before"] > 0
    assert {"teachers_wait", "training", "sampling", "teardown"} <= set(summary["seconds"])
    assert summary["findings"] == []
    assert [sink["complete"] for sink in summary["tracking"].values()] == [True, True]
    assert "Where the KL lives" in (run.directory() / "report.html").read_text()
    assert_nothing_left(run)
    assert foreign_ray.poll() is None
    assert_student_loads(Path(summary["student_path"]))
    assert_tracked_once(run, summary["mlflow_run_id"])


def assert_student_loads(path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    prompt = tokenizer("1+1=", return_tensors="pt")["input_ids"]
    assert model.generate(prompt, max_new_tokens=4).shape[1] > prompt.shape[1]


def assert_tracked_once(run: Any, run_id: str) -> None:
    """Every number of the journal is in MLflow and in TensorBoard, exactly once."""
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    client = MlflowClient(f"sqlite:///{run.root / 'mlflow.db'}")
    tracked = client.get_run(run_id)
    assert tracked.info.status == "FINISHED"
    assert tracked.data.params["training.steps"] == "3"
    assert tracked.data.tags["opd.recipe"] == "tiny"
    kept = {file.path for file in client.list_artifacts(run_id)}
    assert {"config.json", "summary.json", "model_card.md", "receipt.json", "logs"} <= kept
    assert {"report.html", "evaluations", "provenance.json"} <= kept
    events = EventAccumulator(str(run.directory() / "tensorboard"))
    events.Reload()
    expected = {
        record["train_step"]: record["metrics"]["opd_reverse_kl"]
        for record in run.journal()
        if "opd_reverse_kl" in record["metrics"]
    }
    history = client.get_metric_history(run_id, "opd_reverse_kl")
    assert {point.step: point.value for point in history} == expected
    assert len(history) == len(expected) == 3
    scalars = events.Scalars("opd_reverse_kl")
    assert [point.step for point in scalars] == [1, 2, 3]
    assert all(math.isclose(p.value, expected[p.step], rel_tol=1e-6) for p in scalars)


@pytest.mark.long
def test_a_killed_flow_leaves_nothing_and_its_end_is_told(opd: StartRun) -> None:
    """On Prefect's temporary server, which must not outlive the command either."""
    run = opd(*MANY_STEPS, api=None)
    run.wait_for(lambda: run.trained_steps() >= 2, "two train steps")
    assert len(run.processes()) > 3
    run.process.send_signal(signal.SIGKILL)
    run.process.wait(timeout=30)
    deadline = time.monotonic() + 60
    while not (run.directory() / "receipt.json").exists():
        assert time.monotonic() < deadline, "the supervisor wrote no receipt"
        time.sleep(0.2)
    assert run.json_file("receipt.json")["cause"] == "owner died"
    assert_nothing_left(run)  # the settle command has ended too
    summary = run.json_file("summary.json")
    assert (summary["status"], summary["train_steps"]) == ("crashed", run.trained_steps())
    with contextlib.closing(sqlite3.connect(run.home / "prefect.db")) as prefect:
        assert prefect.execute("SELECT state_name FROM flow_run").fetchall() == [("Crashed",)]
    with contextlib.closing(sqlite3.connect(run.root / "mlflow.db")) as mlflow:
        assert mlflow.execute("SELECT status FROM runs").fetchall() == [("FAILED",)]


def listening_addresses(pids: list[int]) -> set[str]:
    """Local addresses, as /proc/net/tcp writes them, at which these processes listen."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(descriptor).removeprefix("socket:[").rstrip("]"))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.add(fields[1].split(":")[0])
    return found


def test_ctrl_c_ends_in_order_and_says_so(opd: StartRun) -> None:
    run = opd(*MANY_STEPS)
    run.wait_for(lambda: run.trained_steps() >= 1, "a train step")
    assert listening_addresses(run.processes()) <= LOOPBACK
    run.process.send_signal(signal.SIGINT)
    run.wait_for(lambda: "ending everything" in run.output(), "the ending")
    run.process.send_signal(signal.SIGINT)  # an impatient user does not break the ending off
    assert run.finish() == 130, run.output()
    assert_nothing_left(run)
    summary = run.json_file("summary.json")
    assert summary["status"] == "cancelled"
    assert summary["train_steps"] >= 1
    assert summary["groups"]["completed"] >= 128
    assert "cancelled" in run.output()  # the table is shown, and JSON comes last
    assert json.loads(next(s for s in run.output().splitlines() if s.startswith("{")))
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.root / 'mlflow.db'}")
    assert client.get_run(summary["mlflow_run_id"]).info.status == "KILLED"


@pytest.mark.long
def test_a_teacher_that_dies_too_often_ends_the_run_with_its_reason(opd: StartRun) -> None:
    run = opd(*MANY_STEPS, "opd.teachers.0.launch.max_restarts=0")
    run.wait_for(lambda: run.trained_steps() >= 1, "a train step")
    os.kill(run.pids_of("teacher-teacher")[-1], signal.SIGKILL)
    assert run.finish() == 1, run.output()
    assert "has died (return code -9)" in run.json_file("summary.json")["error"]
    assert "Traceback" not in run.output()
    assert run.json_file("summary.json")["status"] == "failed"
    assert_nothing_left(run)


def test_a_teacher_that_cannot_start_fails_at_once_with_its_log(opd: StartRun) -> None:
    run = opd(*FEW_STEPS, "opd.teachers.0.launch.extra_args=[--no-such-flag]")
    assert run.finish() == 1, run.output()
    assert "no-such-flag" in run.output()
    assert_nothing_left(run)


def test_a_bad_machine_or_recipe_starts_nothing(opd: StartRun, tmp_path: Path) -> None:
    run = opd("student.model=/no/such/model", "data.train=/no/such/data.jsonl")
    assert run.finish() == 2, run.output()
    assert "/no/such/model" in run.output()
    assert "/no/such/data.jsonl" in run.output()
    assert not list((tmp_path / "runs").glob("tiny-*"))
