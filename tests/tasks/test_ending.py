"""However a run ends, its supervisor ends what it started, and is left to settle it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from opd_core.lifecycle.handle import Supervisor
from opd_core.lifecycle.records import Receipt
from opd_core.preflight import PreflightReport
from opd_core.recipe import load_recipe
from opd_core.training.attempts import Attempt, RunHistory
from opd_core.training.jobs import StudentJob
from tasks import ending
from tasks.console import TERMINAL
from tasks.ending import Ended, end_experiment, end_run, keep_ray_logs
from tasks.environment import RunRecord
from tasks.session import Cluster, Session
from tasks.tracking import Tracker

RECIPE = Path(__file__).parents[2] / "deployments" / "recipes" / "tiny.yaml"


@dataclass
class FakeSupervisor:
    """Says what it was asked for."""

    ended: threading.Event = field(default_factory=threading.Event)
    settled_with: list[bool] = field(default_factory=list)

    def end(self, cause: str) -> Receipt:
        self.ended.set()
        return Receipt("tiny-1", cause, True, 0.1, (), (), (), ())

    def settled(self, *, complete: bool = True) -> None:
        self.settled_with.append(complete)


@dataclass
class FakeTracker:
    """MLflow has everything."""

    complete: bool = True
    told: dict[str, dict[str, Any]] = field(default_factory=dict)

    def finish(self, summary: Any) -> str:
        return "mlflow-1"


@dataclass
class BusyRay:
    """A foreign cluster that answers only when the supervisor has ended the run."""

    ended: threading.Event
    stopped: list[str] = field(default_factory=list)

    def list_jobs(self) -> list[Any]:
        assert self.ended.wait(10)
        return [SimpleNamespace(submission_id="tiny-1")]

    def get_job_status(self, job: str) -> Any:
        return SimpleNamespace(value="STOPPED" if self.stopped else "RUNNING")

    def stop_job(self, job: str) -> None:
        self.stopped.append(job)


@pytest.fixture
def supervisor() -> FakeSupervisor:
    return FakeSupervisor()


@pytest.fixture
def session(tmp_path: Path, supervisor: FakeSupervisor) -> Session:
    (tmp_path / "logs").mkdir()
    history = RunHistory("tiny-1", (Attempt(1.0),), {})
    (tmp_path / "config.json").touch()
    history.write(tmp_path)
    run = RunRecord("tiny-1", tmp_path, load_recipe(RECIPE), history)
    return Session(run, PreflightReport(), cast(Supervisor, supervisor), {})


def test_a_foreign_cluster_that_answers_late_does_not_keep_the_devices(
    session: Session, supervisor: FakeSupervisor
) -> None:
    ray = BusyRay(supervisor.ended)
    session.cluster = Cluster("http://elsewhere:8265", None, owned=False)
    session.job = StudentJob(ray, "tiny-1")
    assert end_run(session, "completed", went_wrong=False).cause == "completed"
    assert ray.stopped == ["tiny-1"]


def test_whatever_goes_wrong_on_the_way_the_run_is_ended(
    session: Session, supervisor: FakeSupervisor, tmp_path: Path
) -> None:
    session.cluster = Cluster("", None, owned=True, temp_dir=cast(Path, "no path"))
    assert end_run(session, "ValueError", went_wrong=True).cause == "ValueError"


def test_rays_logs_are_kept_as_far_as_they_are_short(session: Session, tmp_path: Path) -> None:
    logs = tmp_path / "ray" / "session_2030" / "logs"
    (logs / "old").mkdir(parents=True)
    (logs / "old" / "short.out").write_text("said")
    with (logs / "long.err").open("wb") as log:
        log.truncate(3 * ending.MOST_OF_A_LOG)
        log.seek(0, 2)
        log.write(b"end")
    session.cluster = Cluster("", None, owned=True, temp_dir=tmp_path / "ray")
    keep_ray_logs(session)
    kept = tmp_path / "logs" / "ray"
    assert (kept / "old" / "short.out").read_text() == "said"
    assert (kept / "long.err").stat().st_size == ending.MOST_OF_A_LOG
    assert (kept / "long.err").read_bytes().endswith(b"end")


def test_a_reader_that_went_away_does_not_make_a_good_run_fail(
    session: Session, supervisor: FakeSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TERMINAL, "summary_json", True)
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        how = Ended("completed", None, 0.0)
        end_experiment(session, how, cast(Tracker, FakeTracker()), None)
        monkeypatch.undo()
    assert supervisor.settled_with == [True]
    assert session.summary["mlflow_run_id"] == "mlflow-1"
