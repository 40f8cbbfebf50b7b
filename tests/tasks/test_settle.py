"""What a killed flow could not write is written afterwards, from its run directory alone."""

from __future__ import annotations

import fcntl
import json
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from opd_core.lifecycle.ports import reserve_ports
from opd_core.lifecycle.records import Receipt
from opd_core.tracking.journal import Journal, JournalReader
from opd_core.tracking.mlflow_sink import MlflowSink, connect
from opd_core.training.attempts import Attempt, read_history
from opd_core.training.files import JOURNAL_FILE
from tasks.environment import RunRecord
from tasks.mlflow_run import mlflow_run
from tasks.settle import CONFIGURED, main, settle, settle_command
from tasks.summary import build_summary, write_summary
from tasks.tracking import load_run
from tests.tasks.ended_run import RECIPE, MakeRun, ended_run

UNTRACKED = "tracking.mlflow=false"


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    return partial(ended_run, tmp_path)


def summary_of(run: RunRecord) -> dict[str, Any]:
    return dict(json.loads((run.directory / "summary.json").read_text()))


def mlflow_of(run: RunRecord) -> Any:
    """The run as MLflow has it."""
    client = connect(mlflow_run(run).tracking_uri)
    experiment = client.get_experiment_by_name(run.config.tracking.experiment)
    (found,) = client.search_runs([experiment.experiment_id])
    return found


def points(run: RunRecord) -> int:
    client = connect(mlflow_run(run).tracking_uri)
    return len(client.get_metric_history(mlflow_of(run).info.run_id, "eval/accuracy"))


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        ("owner died", "crashed"),
        ("supervisor died", "crashed"),
        ("cancelled", "cancelled"),
        ("completed", "completed"),
        ("TrainingError", "failed"),  # the disk was full when it was to be told
        ("KeyboardInterrupt", "cancelled"),
        ("deadline", "failed"),
    ],
)
def test_a_run_without_summary_gets_one_and_its_attempt_an_end(
    make_run: MakeRun, cause: str, status: str
) -> None:
    run = make_run(UNTRACKED, cause=cause)
    assert settle(run.directory) == []
    summary = summary_of(run)
    assert summary["status"] == status
    assert cause in summary["error"]
    assert summary["accuracy"]["before"] == 0.4
    assert summary["seconds"]["teardown"] == 0.5
    assert read_history(run.directory).attempts[-1].status == status


def test_what_the_flow_wrote_itself_stays(make_run: MakeRun) -> None:
    run = make_run(UNTRACKED)
    written = {"status": "failed", "mlflow_run_id": None, "student_path": "", "error": "its own"}
    write_summary(run, written)
    settled = replace(run.history, attempts=(Attempt(1.0, status="cancelled"),))
    settled.write(run.directory)
    assert settle(run.directory) == []
    assert summary_of(run) == written
    assert read_history(run.directory).attempts[-1].status == "cancelled"


def test_a_run_without_report_gets_one_and_is_settled_without_one_too(
    make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(UNTRACKED)
    in_the_way = run.directory / "report.html.partial"
    in_the_way.mkdir()
    assert settle(run.directory) == []
    assert "the report could not be written" in caplog.text
    in_the_way.rmdir()
    assert settle(run.directory) == []
    assert "crashed" in (run.directory / "report.html").read_text()
    (run.directory / "report.html").write_text("the flow's own")
    assert settle(run.directory) == []
    assert (run.directory / "report.html").read_text() == "the flow's own"


def test_a_run_that_has_not_ended_is_not_settled(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(UNTRACKED)
    (run.directory / "receipt.json").unlink()
    assert main([str(run.directory), ""]) == 1
    (reason,) = capsys.readouterr().err.splitlines()
    assert "the run has not ended yet" in reason
    assert not (run.directory / "summary.json").exists()


def test_two_processes_do_not_settle_a_run_at_once(make_run: MakeRun) -> None:
    run = make_run(UNTRACKED)
    with (run.directory / "receipt.json").open() as receipt:
        fcntl.flock(receipt, fcntl.LOCK_SH)
        (reason,) = settle(run.directory)
    assert "another process" in reason
    assert settle(run.directory) == []


def test_a_run_directory_that_cannot_be_read_is_told_once(make_run: MakeRun) -> None:
    run = make_run(UNTRACKED)
    (run.directory / "config.json").write_text("{")
    (reason,) = settle(run.directory)
    assert "the run directory" in reason


@pytest.mark.parametrize(
    ("api", "told"),
    [
        ("http://host:4200/api", "http://host:4200/api"),
        ("https://me:secret@host/api", CONFIGURED),
    ],
)
def test_a_password_in_prefects_url_is_not_told_to_everybody(api: str, told: str) -> None:
    with temporary_settings({PREFECT_API_URL: api}):
        assert settle_command(Path("/runs/tiny-1"))[-1] == told


def test_a_run_whose_directory_was_removed_is_settled(tmp_path: Path) -> None:
    assert main([str(tmp_path / "tiny-0"), ""]) == 0


def test_a_job_on_a_cluster_that_is_gone_counts_as_ended(make_run: MakeRun) -> None:
    with reserve_ports(1) as reserved:
        port = reserved.ports[0]
    run = make_run(UNTRACKED, address=f"http://127.0.0.1:{port}", job_id="tiny-1-2")
    assert settle(run.directory) == []


@pytest.mark.slow
def test_a_job_on_a_cluster_that_does_not_answer_is_told_and_the_rest_is_written(
    make_run: MakeRun,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        run = make_run(UNTRACKED, address=address, job_id="tiny-1")
        (reason,) = settle(run.directory)
    assert "Ray job tiny-1" in reason
    assert summary_of(run)["status"] == "crashed"


def test_another_runs_job_is_never_touched(make_run: MakeRun) -> None:
    run = make_run(UNTRACKED, address="http://203.0.113.1:1", job_id="tiny-12")
    assert settle(run.directory) == []


@pytest.mark.slow
def test_mlflow_gets_what_it_lacks_and_nothing_twice(make_run: MakeRun) -> None:
    run = make_run("tracking.tensorboard=true")
    told = mlflow_run(run, over=False)
    flow = MlflowSink(replace(told, tags={**told.tags, "git.commit": "the flow's"}))
    flow.log(JournalReader(run.directory / JOURNAL_FILE).read())
    with Journal(run.directory / JOURNAL_FILE) as journal:
        journal.append(1, {"eval/accuracy": 0.7, "eval/accuracy_stderr": 0.02})
    for _ in range(2):
        assert settle(run.directory) == []
        found = mlflow_of(run)
        assert found.info.run_id == flow.run_id
        assert found.info.status == "FAILED"
        assert found.data.tags["opd.status"] == "crashed"
        assert found.data.tags["git.commit"] == "the flow's"
        assert points(run) == 2
    assert summary_of(run)["mlflow_run_id"] == flow.run_id
    assert list((run.directory / "tensorboard").glob("events.*"))


@pytest.mark.slow
def test_an_artifact_that_failed_at_the_end_of_the_flow_is_brought_later(make_run: MakeRun) -> None:
    run = make_run(cause="completed")
    flow = MlflowSink(mlflow_run(run, over=False))
    flow.log(JournalReader(run.directory / JOURNAL_FILE).read())
    flow.set_tags({"opd.status": "completed"})
    flow.set_status("FINISHED")  # all but the artifacts
    assert settle(run.directory) == []
    kept = {file.path for file in flow_client(run).list_artifacts(flow.run_id)}
    assert {"config.json", "metrics.jsonl", "receipt.json", "report.html"} <= kept


def flow_client(run: RunRecord) -> Any:
    return connect(mlflow_run(run).tracking_uri)


@pytest.mark.slow
def test_what_came_late_is_told_in_the_summary(make_run: MakeRun) -> None:
    run = make_run("tracking.tensorboard=false")
    told = {"mlflow": {"complete": False, "last_error": "ConnectionError: away"}}
    written = {"status": "failed", "mlflow_run_id": None, "student_path": "", "tracking": told}
    write_summary(run, written)
    assert settle(run.directory) == []
    summary = summary_of(run)
    assert summary["status"] == "failed"
    assert summary["mlflow_run_id"] == mlflow_of(run).info.run_id
    assert summary["tracking"]["mlflow"].keys() == {
        "shipped",
        "failed_attempts",
        "cpu_s",
        "last_error",
        "complete",
    }
    assert summary["tracking"]["mlflow"]["complete"]


@pytest.mark.slow
def test_a_run_that_mlflow_never_heard_of_is_created(make_run: MakeRun) -> None:
    run = make_run(cause="cancelled")
    assert settle(run.directory) == []
    found = mlflow_of(run)
    assert found.info.status == "KILLED"
    assert found.data.params["student.model"] == run.config.student.model
    assert found.data.tags["opd.attempts"] == "1"
    assert found.data.tags["opd.kind"] == "run"
    assert found.info.start_time == 1000  # when its first attempt began
    ended_at = (run.directory / "receipt.json").stat().st_mtime
    assert found.info.end_time == int(ended_at * 1000)
    ended = found.info.end_time
    assert settle(run.directory) == []
    assert mlflow_of(run).info.end_time == ended, "a run that has everything is not touched"


@pytest.mark.slow
def test_a_run_whose_journal_is_damaged_has_its_status_and_is_complete_once_it_is_mended(
    make_run: MakeRun,
) -> None:
    run = make_run(cause="completed")
    journal = run.directory / JOURNAL_FILE
    whole = journal.read_text()
    journal.write_text(f"{whole}nonsense\n{whole}")
    (reason,) = settle(run.directory, tracking_s=10.0)
    assert "line 2" in reason
    found = mlflow_of(run)
    assert found.info.status == "FINISHED"
    assert found.data.tags["opd.status"] == "completed"
    assert found.data.tags.get("opd.complete") != "true"
    journal.write_text(whole)
    assert settle(run.directory) == []
    assert mlflow_of(run).data.tags["opd.complete"] == "true"


@pytest.mark.slow
def test_an_mlflow_that_is_away_is_told_and_the_rest_is_written(make_run: MakeRun) -> None:
    with reserve_ports(1) as reserved:
        uri = f"http://127.0.0.1:{reserved.ports[0]}"
    run = make_run(f"tracking.mlflow_uri={uri}")
    (reason,) = settle(run.directory, tracking_s=5.0)
    assert "mlflow is incomplete" in reason
    assert summary_of(run)["status"] == "crashed"


def test_a_run_is_loaded_as_it_was_started(make_run: MakeRun) -> None:
    run = make_run("seed=7")
    loaded = load_run(run.directory)
    assert loaded == run
    assert mlflow_run(loaded) == mlflow_run(run)
    assert mlflow_run(run).over
    assert not mlflow_run(run, over=False).over
    receipt = Receipt("tiny-1", "owner died", True, 0.5, (), (), (), ())
    assert build_summary(loaded, receipt, {}, None) == build_summary(run, receipt, {}, None)


@pytest.mark.slow
def test_it_is_a_program() -> None:
    command = [sys.executable, "-m", "tasks.settle", "/nowhere", ""]
    done = subprocess.run(command, cwd=RECIPE.parents[2], capture_output=True, timeout=120)
    assert done.returncode == 0
