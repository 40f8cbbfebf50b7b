"""``opd sync``: a run that has ended, once more into MLflow and TensorBoard."""

from __future__ import annotations

import io
import json
import os
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from opd_core.errors import ConfigError, DataError
from opd_core.lifecycle.ledger import LEDGER_FILE, Ledger
from opd_core.lifecycle.ports import reserve_ports
from opd_core.lifecycle.process import ProcessId
from opd_core.lifecycle.registry import RegisteredRun, Registry
from opd_core.tracking.journal import Journal, JournalReader
from opd_core.tracking.mlflow_check import PointCheck
from opd_core.tracking.mlflow_sink import MlflowSink, connect
from opd_core.tracking.shipper import Lag, ShippingReport, SinkReport
from opd_core.tracking.sink import Ending
from opd_core.training.files import JOURNAL_FILE
from tasks.environment import RunRecord
from tasks.mlflow_run import mlflow_run
from tasks.settle import settle
from tasks.sync import MOST_OF_A_FOLDER, SyncError, SyncReport, progress_bar, sync_run
from tests.tasks.ended_run import RECIPE, MakeRun, ended_run


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    return partial(ended_run, tmp_path)


def sync(run: RunRecord, mlflow_uri: str | None = None) -> SyncReport:
    return sync_run(str(run.directory), RECIPE, mlflow_uri=mlflow_uri)


def evaluate(run: RunRecord, *steps: int) -> None:
    with Journal(run.directory / JOURNAL_FILE) as journal:
        for step in steps:
            journal.append(step, {"eval/accuracy": 0.4 + step / 100, "eval/accuracy_stderr": 0.01})


def artifacts(uri: str, run_id: str | None, folder: str = "") -> set[str]:
    return {file.path for file in connect(uri).list_artifacts(run_id, folder)}


@pytest.mark.slow
def test_a_run_that_mlflow_calls_complete_and_is_not_gets_what_it_lacks(make_run: MakeRun) -> None:
    run = make_run(cause="completed")
    evaluate(run, 1)
    flow = MlflowSink(mlflow_run(run, over=False))
    flow.log(JournalReader(run.directory / JOURNAL_FILE).read()[:1])
    tags = {"opd.status": "completed", "opd.attempts": "1"}
    flow.finish(Ending("FINISHED", tags))
    assert settle(run.directory) == []  # it believes what it is told
    for name in ("report.html", "provenance.json", "evaluations/step-000000.json"):
        (run.directory / name).parent.mkdir(exist_ok=True)
        (run.directory / name).write_text("{}")
    (run.directory / "token_kl").mkdir()
    (run.directory / "token_kl" / "step-000001.json").write_text("{}")
    first, second = sync(run), sync(run)
    assert (first.before, first.after) == (PointCheck(4, missing=2), PointCheck(4))
    assert second.before == second.after == PointCheck(4)
    assert first.complete
    assert first.mlflow_run_id == second.mlflow_run_id == flow.run_id
    uri = mlflow_run(run).tracking_uri
    there = artifacts(uri, flow.run_id)
    assert {"report.html", "provenance.json", "evaluations", "token_kl", "metrics.jsonl"} <= there
    assert artifacts(uri, flow.run_id, "token_kl") == {"token_kl/step-000001.json"}
    tracked = connect(uri).get_run(flow.run_id)
    assert (tracked.info.status, tracked.data.tags["opd.complete"]) == ("FINISHED", "true")
    assert json.loads((run.directory / "summary.json").read_text())["mlflow_run_id"] == flow.run_id
    assert list((run.directory / "tensorboard").glob("events.*"))


@pytest.mark.slow
def test_another_mlflow_gets_the_whole_run_and_the_runs_own_summary_stays(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run("tracking.mlflow=false", cause="cancelled")
    assert settle(run.directory) == []
    summary = (run.directory / "summary.json").read_text()
    other = f"sqlite:///{tmp_path / 'other' / 'mlflow.db'}"
    report = sync(run, other)
    assert report.before == PointCheck(2, missing=2)
    assert report.after == PointCheck(2)
    found = connect(other).get_run(report.mlflow_run_id)
    assert found.info.status == "KILLED"
    assert found.data.params["student.model"] == run.config.student.model
    assert "config.json" in artifacts(other, report.mlflow_run_id)
    assert Path(found.info.artifact_uri.removeprefix("file://")).is_relative_to(tmp_path / "other")
    assert (run.directory / "summary.json").read_text() == summary
    assert "everything is there" in report.lines()[0]


def test_a_run_that_is_tracked_nowhere_says_what_to_name(make_run: MakeRun) -> None:
    run = make_run("tracking.mlflow=false", "tracking.tensorboard=false")
    with pytest.raises(ConfigError, match="--mlflow-uri"):
        sync(run)


def test_a_large_folder_is_left_out_and_named(make_run: MakeRun) -> None:
    run = make_run("tracking.mlflow=false")
    (run.directory / "token_kl").mkdir()
    with (run.directory / "token_kl" / "step-000001.json").open("w") as sparse:
        os.truncate(sparse.fileno(), MOST_OF_A_FOLDER + (1 << 20))
    report = sync(run)
    assert report.left_out == (f"{run.directory / 'token_kl'} (33 MB)",)
    assert report.complete


def test_a_run_that_lives_is_left_alone(make_run: MakeRun) -> None:
    run = make_run()
    ledger = Ledger.open(run.directory / LEDGER_FILE, "tiny-1")  # as its supervisor does
    with pytest.raises(ConfigError, match="lives"):
        sync(run)
    ledger.close()
    assert not (run.directory / "summary.json").exists()


def unfinished(run: RunRecord) -> RunRecord:
    """Flow and supervisor were killed."""
    (run.directory / "receipt.json").unlink()
    ledger = Ledger.open(run.directory / LEDGER_FILE, "tiny-1")
    ledger.append("run_started", run_id="tiny-1")
    ledger.close()
    return run


def test_a_run_that_died_without_a_receipt_gets_one_and_is_synchronised(make_run: MakeRun) -> None:
    run = unfinished(make_run("tracking.mlflow=false"))
    assert sync(run).complete
    assert json.loads((run.directory / "summary.json").read_text())["status"] == "crashed"
    assert "crashed" in (run.directory / "report.html").read_text()


def test_a_run_that_waits_for_the_reaper_is_left_to_it(make_run: MakeRun) -> None:
    run = unfinished(make_run())
    dead = RegisteredRun.here("tiny-1", run.directory, ProcessId(1, 1), (), 5.0)
    Registry.of_user().add(dead)
    with pytest.raises(ConfigError, match="opd reap"):
        sync(run)


def test_a_journal_that_cannot_be_read_is_named(make_run: MakeRun) -> None:
    run = make_run()
    with (run.directory / JOURNAL_FILE).open("a") as journal:
        journal.write("nonsense\n")
    with pytest.raises(DataError, match=r"line 2: .*remove or mend"):
        sync(run)


@pytest.mark.slow
def test_a_deleted_experiment_is_told_at_once(make_run: MakeRun) -> None:
    run = make_run()
    client = connect(mlflow_run(run).tracking_uri)
    client.delete_experiment(client.create_experiment(run.config.tracking.experiment))
    with pytest.raises(SyncError, match="mlflow experiments restore"):
        sync(run)


def test_progress_is_shown_at_a_terminal() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120)
    with progress_bar(console, live=True) as progress:
        sink = SinkReport(3, Lag(), 1, "OSError: [no]", 0, (), None, False, 0.1)
        progress(ShippingReport(3, None, {"mlflow": sink}))
    told = shown.getvalue()
    assert "3/3" in told
    assert "artifacts, tags and status; last error: OSError: [no]" in told


@pytest.mark.slow
def test_an_mlflow_that_is_away_is_named_without_its_password(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with reserve_ports(1) as reserved:
        host = f"127.0.0.1:{reserved.ports[0]}"
    run = make_run()
    with pytest.raises(SyncError, match="try again when it answers") as raised:
        sync(run, f"http://me:secret@{host}")
    assert host in str(raised.value)
    assert "secret" not in str(raised.value)
