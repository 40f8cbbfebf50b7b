"""Prefect's final state of a run: written by its engine, and where that is dead, afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Crashed, Running

from opd_core.lifecycle.leases import DeviceLease
from opd_core.lifecycle.ledger import LEDGER_FILE, Ledger
from opd_core.lifecycle.process import ProcessId
from opd_core.lifecycle.records import Receipt, write_receipt
from opd_core.lifecycle.registry import RegisteredRun, Registry
from opd_core.recipe import load_recipe
from opd_core.training.attempts import Attempt, RunHistory
from tasks.environment import RunRecord, write_config
from tasks.settle import settle
from tests.flows.conftest import OpdRun

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "deployments" / "recipes" / "tiny.yaml"
pytestmark = pytest.mark.slow


@pytest.fixture
def client(prefect_api: str) -> Iterator[SyncPrefectClient]:
    with (
        temporary_settings({PREFECT_API_URL: prefect_api}),
        get_client(sync_client=True) as client,
    ):
        yield client


@flow
def killed() -> None:
    """What was killed: only its flow run is there."""


def run_of(directory: Path, flow_run_id: UUID, cause: str, *earlier: Attempt) -> Path:
    """A run directory as a killed flow and its supervisor leave it."""
    config = load_recipe(RECIPE, ["tracking.mlflow=false"])
    attempts = (*earlier, Attempt(time.time() + 60, str(flow_run_id)))
    history = RunHistory("tiny-1", attempts, {})
    history.write(directory)
    write_config(RunRecord("tiny-1", directory, config, history))
    write_receipt(directory, Receipt("tiny-1", cause, True, 0.5, (), (), (), ()))
    ledger = Ledger.open(directory / LEDGER_FILE, "tiny-1")
    ledger.append("receipt")
    ledger.close()
    return directory


@pytest.mark.parametrize(
    ("state", "cause", "final"),
    [
        (Running(), "owner died", "CRASHED"),
        (Cancelling(), "owner died", "CANCELLED"),
        (Crashed(), "cancelled", "CANCELLED"),
    ],
)
def test_the_state_of_a_killed_flow_says_why_it_ended_and_where_all_about_it_is(
    client: SyncPrefectClient, tmp_path: Path, state: State[Any], cause: str, final: str
) -> None:
    flow_run = client.create_flow_run(killed)
    client.set_flow_run_state(flow_run.id, state, force=True)
    directory = run_of(tmp_path, flow_run.id, cause)
    for _ in range(2):
        assert settle(directory) == []
        settled = client.read_flow_run(flow_run.id).state
        assert settled is not None
        assert settled.type.value == final
        assert cause in (settled.message or "")
        assert str(directory) in (settled.message or "")
    history = client.read_flow_run_states(flow_run.id)
    assert [each.type.value for each in history].count(final) == 1


def test_the_flow_runs_of_earlier_attempts_are_settled_too(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    first, last = (client.create_flow_run(killed) for _ in range(2))
    for flow_run in (first, last):
        client.set_flow_run_state(flow_run.id, Running(), force=True)
    later = time.time() + 60
    earlier = (Attempt(later, str(uuid4()), "failed"), Attempt(later, str(first.id), "failed"))
    assert settle(run_of(tmp_path, last.id, "owner died", *earlier)) == []
    states = [client.read_flow_run(flow_run.id).state for flow_run in (first, last)]
    assert [state and state.type.value for state in states] == ["FAILED", "CRASHED"]


def test_a_damaged_run_directory_does_not_keep_prefect_from_its_state_and_receipt(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    flow_run = client.create_flow_run(killed)
    client.set_flow_run_state(flow_run.id, Running(), force=True)
    directory = run_of(tmp_path, flow_run.id, "owner died")
    (directory / "config.json").write_text("{")
    for _ in range(2):
        (reason,) = settle(directory)
        assert "the run directory" in reason
    state = client.read_flow_run(flow_run.id).state
    assert state is not None
    assert state.type.value == "CRASHED"
    artifacts = [each for each in client.read_artifacts() if each.flow_run_id == flow_run.id]
    assert [(each.key, "owner died" in str(each.data)) for each in artifacts] == [("receipt", True)]


def test_a_flow_run_that_prefect_does_not_know_is_settled(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    assert settle(run_of(tmp_path, uuid4(), "owner died")) == []


FLOW = """
import json, os, signal, sys, time
api = os.environ.pop("PREFECT_API_URL")
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling
from tasks.guard import guard_flow
from tasks.hooks import UNSETTLED, Unsettled, conclude

class Supervisor:
    def settled(self, complete=True):
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(RUN).state
        print(json.dumps({"pid": os.getpid(), "settled": state.type.value}), flush=True)

how = sys.argv[1]
@flow(on_completion=[conclude], on_failure=[conclude], on_crashed=[conclude])
def experiment():
    global RUN
    RUN = flow_run.id
    guard, error = guard_flow(), None
    try:
        with guard:
            if how == "fail":
                raise ValueError("no")
            if how == "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            if how == "cancel":
                with get_client(sync_client=True) as client:
                    client.set_flow_run_state(RUN, Cancelling(), force=True)
                time.sleep(60)
    except BaseException as raised:
        error = raised
        raise
    finally:
        cause = guard.cause_of(error)
        UNSETTLED[str(RUN)] = Unsettled(Supervisor(), True, cause)
        print(json.dumps({"pid": os.getpid(), "cause": cause}), flush=True)

with temporary_settings({PREFECT_API_URL: api}):  # as `opd run` names its temporary server
    experiment()
"""


@pytest.fixture
def told(prefect_api: str) -> Callable[..., list[dict[str, Any]]]:
    """What a program says, line by line, in JSON."""

    def run(script: str, *arguments: str, **variables: str) -> list[dict[str, Any]]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        environment |= {"PREFECT_API_URL": prefect_api, **variables}
        command = [sys.executable, "-c", script, *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return run


@pytest.mark.parametrize(
    ("how", "cause", "final"),
    [
        ("complete", "completed", "COMPLETED"),
        ("fail", "ValueError", "FAILED"),
        ("terminate", "TerminationSignal", "CRASHED"),
    ],
)
def test_a_supervisor_is_let_go_in_the_flows_process_once_prefect_has_its_final_state(
    told: Callable[..., list[dict[str, Any]]], how: str, cause: str, final: str
) -> None:
    ended, settled = told(FLOW, how)
    assert ended["cause"] == cause
    assert settled == {"pid": ended["pid"], "settled": final}


def test_a_cancellation_that_nobody_carries_out_ends_the_flow_and_leaves_the_rest_to_settling(
    told: Callable[..., list[dict[str, Any]]],
) -> None:
    (ended,) = told(FLOW, "cancel")
    assert ended["cause"] == "cancelled"


JANITOR = """
import json
from flows.janitor import janitor
for line in janitor():
    print(json.dumps(line))
"""


def test_the_janitor_ends_dead_runs_and_keeps_what_it_did_as_an_artifact(
    told: Callable[..., list[dict[str, Any]]], client: SyncPrefectClient, tmp_path: Path
) -> None:
    (tmp_path / "tiny-1").mkdir()
    registry = Registry(tmp_path / "opd-lab" / "runs")
    registry.add(
        RegisteredRun.here(
            "tiny-1",
            tmp_path / "tiny-1",
            ProcessId(os.getpid(), 1),
            (sys.executable, "-c", ""),
            5.0,
        )
    )
    (line,) = told(JANITOR, XDG_STATE_HOME=str(tmp_path))
    assert (line["run"], line["done"]) == ("tiny-1", "ended and settled")
    assert registry.runs() == ()
    artifacts = client.read_artifacts()
    (artifact,) = [each for each in artifacts if each.key == "janitor"]
    assert "tiny-1" in str(artifact.data)


EXPERIMENT = """
import json, sys, time
from pathlib import Path
from prefect import flow
from opd_core.lifecycle.records import ChildSpec
from opd_core.preflight import PreflightReport
from opd_core.recipe import load_recipe
from opd_core.training.attempts import Attempt, RunHistory
from prefect.runtime import flow_run
from tasks.environment import RunRecord, write_config
from tasks.experiment import experiment
from tasks.guard import guard_flow
from tasks.hooks import conclude

when, directory, recipe = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
SLOW = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: None); print(1, flush=True)"
SLOW += chr(10) + "while True: time.sleep(1)"

@flow(timeout_seconds=6, on_completion=[conclude], on_failure=[conclude], on_crashed=[conclude])
def timed():
    began = time.monotonic()
    config = load_recipe(recipe, ["tracking.mlflow=false", "tracking.tensorboard=false"])
    history = RunHistory("tiny-1", (Attempt.begin(str(flow_run.id)),), {})
    history.write(directory)
    run = RunRecord("tiny-1", directory, config, history)
    write_config(run)
    with guard_flow() as guard, experiment(run, PreflightReport(), guard) as session:
        if when == "body":
            time.sleep(60)
        log = run.log("slow")
        session.spawn(ChildSpec(name="slow", kind="teacher", argv=(sys.executable, "-c", SLOW),
            cwd=directory, log=log, grace_s=max(7 - (time.monotonic() - began), 1)))
        while not (log.exists() and log.read_text()):
            time.sleep(0.05)

state = timed(return_state=True)
receipt = json.loads((directory / "receipt.json").read_text())
summary = json.loads((directory / "summary.json").read_text())
print(json.dumps({"state": state.name, "cause": receipt["cause"], "status": summary["status"]}))
"""


@pytest.mark.parametrize(
    ("when", "wanted"),
    [
        ("body", {"state": "TimedOut", "cause": "timed out", "status": "failed"}),
        ("ending", {"state": "Completed", "cause": "completed", "status": "completed"}),
    ],
)
def test_a_flows_time_out_is_a_failure_and_does_not_break_off_the_ending(
    told: Callable[..., list[dict[str, Any]]],
    tmp_path: Path,
    when: str,
    wanted: dict[str, str],
) -> None:
    directory = tmp_path / "tiny-1"
    (directory / "logs").mkdir(parents=True)
    said = told(EXPERIMENT, when, str(directory), str(RECIPE), XDG_STATE_HOME=str(tmp_path))
    assert said == [wanted]
    assert Registry(tmp_path / "opd-lab" / "runs").runs() == ()


def test_a_terminal_that_is_closed_while_the_run_waits_for_devices_is_told_to_prefect(
    opd: Callable[..., OpdRun],
    client: SyncPrefectClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPD_LEASES", str(tmp_path / "leases"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    before = {each.id for each in client.read_flow_runs(limit=200)}
    with DeviceLease.take(["cpu:0"], owner={"run_id": "another"}, wait_s=0.0):
        run = opd("student.devices=[cpu:0]", "devices.wait_s=.inf")
        run.wait_for(lambda: "waiting for device" in run.output(), "queue")
        run.process.send_signal(signal.SIGHUP)
        assert run.finish() == -signal.SIGTERM
    (ended,) = (each for each in client.read_flow_runs(limit=200) if each.id not in before)
    assert ended.state is not None
    assert ended.state.is_crashed()
