"""The keeper of a worker lets the flows end in order, whoever ended first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.worker import flow_run_of

# On SIGTERM it leaves a process of its own session behind, which needs a moment, and ends.
FLOW = """
import pathlib, signal, subprocess, sys, time
late = "import pathlib, sys, time; time.sleep(0.4); pathlib.Path(sys.argv[1]).write_text('ended')"
def end(*_):
    subprocess.Popen([sys.executable, "-c", late, sys.argv[1]], start_new_session=True)
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[2]).touch()
time.sleep(60)
"""
# Kills its flow when it is asked to stop, as Prefect's does.
WORKER = """
import signal, subprocess, sys
flow = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
signal.signal(signal.SIGTERM, lambda *_: (flow.kill(), sys.exit(0)))
print("worker", flow.pid, flush=True)
flow.wait()
signal.pause()
"""


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """What is written when all that came of the flow has ended."""
    return tmp_path / "ended"


@pytest.fixture
def keeper(tmp_path: Path, ended: Path) -> subprocess.Popen[str]:
    """A keeper whose worker has a flow."""
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    flow = FLOW.replace("pathlib.Path(sys.argv[2]).touch()", "open(sys.argv[2], 'w').close()")
    worker = [sys.executable, "-c", WORKER, flow, str(ended), str(begun)]
    process = subprocess.Popen(
        [sys.executable, "-m", "deployments.worker", *worker], stdout=subprocess.PIPE, text=True
    )
    begun.read_text()
    return process


def test_a_stop_waits_for_all_that_came_of_the_flows(
    keeper: subprocess.Popen[str], ended: Path
) -> None:
    keeper.send_signal(signal.SIGTERM)
    keeper.communicate(timeout=20)
    assert keeper.returncode == 0
    assert ended.read_text() == "ended"


def test_the_flows_of_a_dead_worker_are_ended_and_its_death_is_told(
    keeper: subprocess.Popen[str], ended: Path
) -> None:
    worker = next(iter(children_of(keeper.pid)))
    os.kill(worker, signal.SIGKILL)
    said, _ = keeper.communicate(timeout=20)
    assert keeper.returncode == -signal.SIGKILL % 256
    assert "the worker has ended by itself, status -9" in said
    assert ended.read_text() == "ended"


def test_a_flow_runs_process_is_known_by_its_environment() -> None:
    environment = {**os.environ, "PREFECT__FLOW_RUN_ID": "an-id"}
    command = ["sh", "-c", "echo; read line"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert flow_run_of(process.pid) == "an-id"
    assert flow_run_of(os.getpid()) is None


def children_of(pid: int) -> list[int]:
    """The children of a process's main thread."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
