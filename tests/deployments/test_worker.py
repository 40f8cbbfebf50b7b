"""The keeper of a worker lets the flows end in order, whoever ended first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast
from uuid import UUID, uuid4

import pytest
from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
from prefect.client.schemas.objects import FlowRun, State, StateType, Worker, WorkerStatus
from prefect.states import Pending, Running, Submitting

from deployments.worker import WORKER_LABEL, flow_run_of, option_of, put_back, tell_of_crashed

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


class FakePrefect:
    """A server with flow runs of one pool; ``refused``: those it answers with an error."""

    def __init__(self, *runs: FlowRun, online: Sequence[str] = ("mine",)) -> None:
        self.runs = {run.id: run for run in runs}
        self.online = online
        self.refused: set[UUID] = set()

    def read_workers_for_work_pool(self, pool: str) -> list[Worker]:
        assert pool == "opd"
        return [
            Worker(name=name, work_pool_id=uuid4(), status=WorkerStatus.ONLINE)
            for name in self.online
        ]

    def read_flow_runs(
        self, flow_run_filter: FlowRunFilter, work_pool_filter: WorkPoolFilter
    ) -> list[FlowRun]:
        assert work_pool_filter.name is not None
        assert work_pool_filter.name.any_ == ["opd"]
        assert flow_run_filter.state is not None
        assert flow_run_filter.state.type is not None
        wanted = flow_run_filter.state.type.any_ or []
        return [run for run in self.runs.values() if run.state and run.state.type in wanted]

    def read_flow_run(self, flow_run_id: UUID) -> FlowRun:
        return self.runs[flow_run_id]

    def set_flow_run_state(self, flow_run_id: UUID, state: State, force: bool = False) -> None:
        if flow_run_id in self.refused:
            raise HTTPError("the database is locked")
        self.runs[flow_run_id].state = state

    def as_client(self) -> SyncPrefectClient:
        return cast("SyncPrefectClient", self)


def flow_run(state: State, worker: str | None = None) -> FlowRun:
    labels = {} if worker is None else {WORKER_LABEL: worker}
    return FlowRun(flow_id=uuid4(), state=state, labels=labels)


def kinds(*runs: FlowRun) -> list[StateType | None]:
    return [run.state and run.state.type for run in runs]


def test_a_run_that_was_taken_up_and_never_started_is_put_back_in_line() -> None:
    taken, submitting, runs = (
        flow_run(Pending()),
        flow_run(Submitting(), "mine"),
        flow_run(Running()),
    )
    prefect = FakePrefect(taken, submitting, runs)
    put_back(prefect.as_client(), "opd", "mine", [])
    assert kinds(taken, submitting, runs) == [
        StateType.SCHEDULED,
        StateType.SCHEDULED,
        StateType.RUNNING,
    ]


def test_a_run_of_another_living_worker_and_one_that_had_a_process_stay() -> None:
    own, others, unsaid = (
        flow_run(Submitting(), "mine"),
        flow_run(Pending(), "b"),
        flow_run(Pending()),
    )
    begun = flow_run(Pending(), "mine")
    prefect = FakePrefect(own, others, unsaid, begun, online=("mine", "b"))
    put_back(prefect.as_client(), "opd", "mine", [str(begun.id)])
    assert kinds(own, others, unsaid, begun) == [StateType.SCHEDULED, *[StateType.PENDING] * 3]


def test_one_run_that_prefect_refuses_does_not_keep_the_others_from_being_told() -> None:
    ended = [flow_run(Running()) for _ in range(3)]
    waiting = [flow_run(Pending()) for _ in range(2)]
    prefect = FakePrefect(*ended, *waiting)
    prefect.refused = {ended[0].id, waiting[0].id}
    tell_of_crashed(prefect.as_client(), [str(run.id) for run in ended])
    put_back(prefect.as_client(), "opd", "mine", [])
    assert kinds(*ended) == [StateType.RUNNING, StateType.CRASHED, StateType.CRASHED]
    assert kinds(*waiting) == [StateType.PENDING, StateType.SCHEDULED]


def test_pool_and_name_are_read_from_the_workers_command() -> None:
    command = ["prefect", "worker", "start", "--pool", "opd", "--name=mine"]
    assert option_of(command, "--pool", "-p") == "opd"
    assert option_of(command, "--name", "-n") == "mine"
    assert option_of(command, "--limit") is None
