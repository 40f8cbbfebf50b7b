"""Whole runs whose MLflow server is killed, or falls asleep: the run goes on, and everything
arrives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from opd_core.lifecycle.ledger import LEDGER_FILE, is_held
from opd_core.tracking.journal import JournalReader
from opd_core.tracking.mlflow_check import PointCheck, check_points
from opd_core.tracking.mlflow_sink import connect
from tasks.sync import sync_run
from tasks.tracking import SHIP_WITHIN_S
from tests.flows.conftest import OpdRun, wait_until
from tests.opd_core.tracking.mlflow_server import MlflowServer
from tests.tasks.ended_run import RECIPE

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
SMALL = ("training.prompts_per_step=16", "data.evaluation_rows=16", "evaluation.samples=1")
OUTAGE_S = 60.0


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowServer]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "mlflow").mkdir()
    server = MlflowServer(tmp_path / "mlflow")
    server.start()
    yield server
    server.kill()


def tracked(server: MlflowServer, run: OpdRun) -> tuple[Any, PointCheck]:
    """The one run that MLflow has, and its points against the journal."""
    client = connect(server.uri)
    (found,) = client.search_runs([client.get_experiment_by_name("opd").experiment_id])
    records = JournalReader(run.directory() / "metrics.jsonl").read()
    assert found.data.params["training.prompts_per_step"] == "16"
    kept = {file.path for file in client.list_artifacts(found.info.run_id)}
    assert {"config.json", "metrics.jsonl", "summary.json", "receipt.json", "logs"} <= kept
    assert found.data.tags["opd.status"] == "completed"
    assert found.info.status == "FINISHED"
    return found, check_points(server.uri, found.info.run_id, records)


def test_a_server_that_is_dead_for_a_minute_in_the_middle_has_everything_at_the_end(
    opd: Callable[..., OpdRun], server: MlflowServer
) -> None:
    run = opd(*SMALL, f"tracking.mlflow_uri={server.uri}", "training.steps=150")
    run.wait_for(lambda: run.trained_steps() >= 3, "three train steps")
    server.kill()
    killed, before = time.monotonic(), run.trained_steps()
    run.wait_for(lambda: time.monotonic() - killed > OUTAGE_S, "the end of the outage")
    assert run.trained_steps() > before + 3
    server.start()
    assert run.finish() == 0, run.output()
    found, points = tracked(server, run)
    assert points.points > 150 * 20
    assert points.exact
    assert run.json_file("summary.json")["mlflow_run_id"] == found.info.run_id


@pytest.mark.parametrize("how", ["killed", "asleep"])
def test_a_server_that_is_away_at_the_end_holds_the_run_up_for_a_minute_at_most(
    opd: Callable[..., OpdRun], server: MlflowServer, how: str
) -> None:
    run = opd(*SMALL, f"tracking.mlflow_uri={server.uri}", "training.steps=4")
    run.wait_for(lambda: run.trained_steps() >= 2, "two train steps")
    (server.kill if how == "killed" else server.sleep)()
    assert run.finish() == 0, run.output()
    directory = run.directory()
    held_up_s = time.time() - (directory / "receipt.json").stat().st_mtime
    print(f"{how}: held up for {held_up_s:.1f} s")
    assert held_up_s < SHIP_WITHIN_S + 30
    assert "mlflow is incomplete" in run.output()
    assert f"opd sync {directory}" in run.output()
    if how == "asleep":  # the supervisor tries once more, by itself
        server.wake()
    wait_until(lambda: not is_held(directory / LEDGER_FILE), "the supervisor's settling")
    if how == "killed":
        server.start()
        report = sync_run(str(directory), RECIPE)
        assert report.complete, report
        assert report.before is not None
        assert report.before.missing > 0
    assert tracked(server, run)[1].exact
