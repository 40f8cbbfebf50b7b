"""Prefect's final state of a run: written by its engine, and where that is dead, afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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

from opd_core.lifecycle.ledger import LEDGER_FILE, Ledger
from opd_core.lifecycle.process import ProcessId
from opd_core.lifecycle.records import Receipt, write_receipt
from opd_core.lifecycle.registry import RegisteredRun, Registry
from opd_core.recipe import load_recipe
from opd_core.training.attempts import Attempt, RunHistory
from tasks.environment import RunRecord, write_config
from tasks.settle import settle

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


def run_of(directory: Path, flow_run_id: UUID, cause: str) -> Path:
    """A run directory as a killed flow and its supervisor leave it."""
    config = load_recipe(RECIPE, ["tracking.mlflow=false"])
    history = RunHistory("tiny-1", (Attempt(1.0, str(flow_run_id)),), {})
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
    def settled(self):
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(RUN).state
        print(json.dumps({"pid": os.getpid(), "settled": state.type.value}), flush=True)

how = sys.argv[1]
@flow(on_completion=[conclude], on_failure=[conclude], on_crashed=[conclude])
def experiment():
    global RUN
    RUN = flow_run.id
    guard, error = guard_flow(True), None
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
