"""The student's job: a dead one is started again in its run directory, any other end is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from opd_core.errors import TrainingError
from opd_core.lifecycle.handle import Supervisor
from opd_core.preflight import PreflightReport
from opd_core.recipe import load_recipe
from opd_core.tracking.journal import Journal
from opd_core.training.attempts import Attempt, RunHistory
from opd_core.training.results import RunResult
from tasks.console import TERMINAL
from tasks.environment import RunRecord
from tasks.session import Cluster, Session
from tasks.student import run_jobs

RECIPE = Path(__file__).parents[2] / "deployments" / "recipes" / "tiny.yaml"
DIED = RunResult("failed", "ActorLost", "a training actor died", restartable=True)
DONE = RunResult("completed")


@dataclass
class FakeRay:
    """A cluster whose jobs end at once, each as ``plan`` says: with a result, or without one and
    with this status. ``submitted`` are the ids of this session's jobs."""

    run_dir: Path
    plan: Iterator[RunResult | str]
    jobs: dict[str, str] = field(default_factory=dict)
    submitted: list[str] = field(default_factory=list)
    found: list[set[str]] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)

    def list_jobs(self) -> list[Any]:
        return [SimpleNamespace(submission_id=job) for job in self.jobs]

    def submit_job(self, entrypoint: str, submission_id: str) -> None:
        self.found.append({path.name for path in self.run_dir.iterdir()})
        self.submitted.append(submission_id)
        end = next(self.plan)
        self.jobs[submission_id] = end if isinstance(end, str) else "SUCCEEDED"
        if isinstance(end, RunResult):
            end.write(self.run_dir)

    def get_job_status(self, job: str) -> Any:
        return SimpleNamespace(value=self.jobs[job])

    def get_job_logs(self, job: str) -> str:
        return f"what {job} wrote"

    def stop_job(self, job: str) -> None:
        self.stopped.append(job)
        self.jobs[job] = "STOPPED"


@dataclass
class FakeLedger:
    """A supervisor that takes notes, each with the jobs that were submitted before it."""

    ray: FakeRay
    notes: list[tuple[str, dict[str, Any], list[str]]] = field(default_factory=list)

    def note(self, event: str, **facts: Any) -> None:
        self.notes.append((event, facts, list(self.ray.submitted)))

    def raise_if_dead(self, *names: str, but: Any = ()) -> None:
        pass


Jobs = Callable[..., tuple[FakeRay, Session]]


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    (tmp_path / "logs").mkdir()

    def make(*plan: RunResult | str) -> tuple[FakeRay, Session]:
        config = load_recipe(RECIPE, ["opd=null", "task.group_size=2", "training.steps=5"])
        run = RunRecord("tiny-1", tmp_path, config, RunHistory("tiny-1", (Attempt(1.0),), {}))
        ray = FakeRay(tmp_path, iter(plan))
        return ray, Session(run, PreflightReport(), cast(Supervisor, FakeLedger(ray)), {})

    return make


def test_a_killed_job_and_one_whose_actor_died_are_started_again_from_the_same_directory(
    jobs: Jobs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ray, session = jobs("FAILED", DIED, DONE)
    (tmp_path / "scoring.json").write_text("{}")
    with caplog.at_level("WARNING", "opd"):
        run_jobs(session, ray)
    assert ray.submitted == ["tiny-1", "tiny-1-2", "tiny-1-3"]
    assert session.job_restarts == 2
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs == {
        "student.log": "what tiny-1 wrote",
        "student-job-2.log": "what tiny-1-2 wrote",
        "student-job-3.log": "what tiny-1-3 wrote",
    }
    assert [record.getMessage() for record in caplog.records] == [
        "the student's job died (it ended (FAILED) without a result); starting it again from its "
        "last checkpoint, 1 of 2",
        "the student's job died (ActorLost: a training actor died); starting it again from its "
        "last checkpoint, 2 of 2",
    ]
    # A job must not find how another one ended, nor how it scored.
    assert ray.found == [{"logs"}] * 3


def test_a_job_on_a_cluster_that_outlives_the_run_stands_in_the_ledger_before_it_exists(
    jobs: Jobs,
) -> None:
    ray, session = jobs("FAILED", DONE)
    session.cluster = Cluster("http://elsewhere:8265", None, owned=False)
    run_jobs(session, ray)
    assert cast(FakeLedger, session.supervisor).notes == [
        ("ray_job", {"address": "http://elsewhere:8265", "job_id": "tiny-1"}, []),
        ("ray_job", {"address": "http://elsewhere:8265", "job_id": "tiny-1-2"}, ["tiny-1"]),
    ]
    ray, session = jobs(DONE)
    session.cluster = Cluster("http://127.0.0.1:8265", "token", owned=True)
    run_jobs(session, ray)
    assert cast(FakeLedger, session.supervisor).notes == []


def test_a_job_that_dies_too_often_ends_the_run_with_its_last_reason(jobs: Jobs) -> None:
    ray, session = jobs(DIED, DIED, "FAILED", DONE)
    with pytest.raises(TrainingError) as raised:
        run_jobs(session, ray)
    said = str(raised.value)
    assert "ended (FAILED) without a result:\nwhat tiny-1-3 wrote" in said
    assert "started again 2 times already (training.max_restarts)" in said


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (RunResult("failed", "SurvivorError", "too few"), "SurvivorError: too few"),
        ("STOPPED", r"ended \(STOPPED\) without a result"),
    ],
)
def test_any_other_end_is_final(jobs: Jobs, end: RunResult | str, told: str) -> None:
    ray, session = jobs(end, DONE)
    with pytest.raises(TrainingError, match=told):
        run_jobs(session, ray)
    assert ray.submitted == ["tiny-1"]


def test_a_job_that_a_killed_flow_left_running_is_stopped_first(jobs: Jobs) -> None:
    ray, session = jobs(DONE)
    ray.jobs = {"tiny-1": "RUNNING", "tiny-10": "RUNNING", "tiny-1-2": "FAILED"}
    run_jobs(session, ray)
    assert ray.stopped == ["tiny-1"]
    assert ray.submitted == ["tiny-1-3"]


def test_a_cluster_that_cannot_be_asked_is_told(jobs: Jobs) -> None:
    ray, session = jobs(DONE)
    ray.list_jobs = lambda: (_ for _ in ()).throw(ConnectionError("gone"))  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="jobs cannot be asked for: gone"):
        run_jobs(session, ray)


def test_a_journal_that_cannot_be_read_is_an_error_of_the_training(
    jobs: Jobs, tmp_path: Path
) -> None:
    """A DataError would say that nothing was started."""
    (tmp_path / "metrics.jsonl").write_text("no journal\n")
    ray, session = jobs(DONE)
    with pytest.raises(TrainingError, match="the metrics journal cannot be read"):
        run_jobs(session, ray)


def test_what_earlier_attempts_reached_is_not_told_again(
    jobs: Jobs, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TERMINAL, "lines", True)
    ray, session = jobs("FAILED", DONE)
    with Journal(tmp_path / "metrics.jsonl") as journal:
        journal.append(3, {"eval/accuracy": 0.25, "eval/accuracy_stderr": 0.1})

        def submit(entrypoint: str, submission_id: str) -> None:
            journal.append(4, {"eval/accuracy": 0.5, "eval/accuracy_stderr": 0.1})
            FakeRay.submit_job(ray, entrypoint, submission_id)

        ray.submit_job = submit  # type: ignore[method-assign]
        run_jobs(session, ray)
    shown = capsys.readouterr().err
    assert "25.0%" not in shown
    assert shown.count("step 4: held-out accuracy 50.0%") == 2  # one of each job
