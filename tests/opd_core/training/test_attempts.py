"""The attempts of a run: only one is alive, and each leaves what is its own beside the next."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path, PosixPath
from typing import Any

import pytest

from opd_core.errors import ConfigError, PreflightError, ServingError
from opd_core.lifecycle.handle import Supervisor
from opd_core.lifecycle.ledger import read_ledger
from opd_core.lifecycle.process import boot_id, identify, open_pidfd, read_stat, wait_pidfd
from opd_core.lifecycle.records import ChildSpec
from opd_core.scoring.facts import Canary, TeacherFacts, facts_to_json
from opd_core.training.alone import alone
from opd_core.training.attempts import (
    Attempt,
    RunHistory,
    await_ending,
    check_external_teachers,
    continue_run,
    end_attempt,
    find_flow_run,
    read_history,
)

KILLED = Attempt(1.0, "first-flow")
OF_THE_FIRST = ("result.json", "summary.json", "report.html", "teachers.json")
PRINTS = {"the student": "aa", "data.train": "bb"}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that was killed, with something of every kind in its directory."""
    folder = tmp_path / "run-1"
    (folder / "logs").mkdir(parents=True)
    (folder / "checkpoints" / "step-000002").mkdir(parents=True)
    for name in (*OF_THE_FIRST, "config.json", "metrics.jsonl"):
        (folder / name).write_text(f"{name} of the first")
    (folder / "logs" / "student.log").write_text("the first job")
    RunHistory("run-1", (KILLED,), PRINTS).write(folder)
    return folder


def test_what_is_of_one_attempt_is_put_aside_and_the_rest_stays(run_dir: Path) -> None:
    history = continue_run(run_dir, PRINTS, "second-flow", 10.0)
    assert history == read_history(run_dir)
    assert [attempt.flow_run_id for attempt in history.attempts] == ["first-flow", "second-flow"]
    aside = run_dir / "attempts" / "1"
    assert {path.name for path in aside.iterdir()} == {*OF_THE_FIRST, "config.json", "logs"}
    assert (aside / "logs" / "student.log").read_text() == "the first job"
    stays = {"config.json", "metrics.jsonl", "checkpoints", "run.json", "attempts"}
    assert {path.name for path in run_dir.iterdir()} == stays


def test_a_third_attempt_leaves_the_first_as_it_was(run_dir: Path) -> None:
    continue_run(run_dir, PRINTS, "", 10.0)
    (run_dir / "result.json").write_text("of the second")
    end_attempt(run_dir, "failed")
    history = continue_run(run_dir, PRINTS, "", 10.0)
    assert [attempt.status for attempt in history.attempts] == ["", "failed", ""]
    results = [(run_dir / "attempts" / n / "result.json").read_text() for n in "12"]
    assert results == ["result.json of the first", "of the second"]


def of_parent(**changes: object) -> Attempt:
    """An attempt of a process that is alive and not this one."""
    parent = identify(os.getppid())
    assert parent is not None
    attempt = Attempt(1.0, "", "", parent.pid, parent.start_ticks, boot_id())
    return replace(attempt, **changes)  # type: ignore[arg-type]


def test_a_run_whose_flow_is_alive_is_not_touched(run_dir: Path) -> None:
    RunHistory("run-1", (of_parent(),), PRINTS).write(run_dir)
    with pytest.raises(ConfigError, match=rf"run-1 is still running \(pid {os.getppid()}\)"):
        continue_run(run_dir, PRINTS, "", 10.0)
    assert not (run_dir / "attempts").exists()


@pytest.mark.parametrize(
    "changes", [{"status": "failed"}, {"boot_id": "another"}, {"start_ticks": 1}]
)
def test_an_ended_attempt_another_boot_and_a_reused_pid_are_not_alive(
    run_dir: Path, changes: dict[str, object]
) -> None:
    RunHistory("run-1", (of_parent(**changes),), PRINTS).write(run_dir)
    assert len(continue_run(run_dir, PRINTS, "", 10.0).attempts) == 2


def test_a_run_whose_supervisor_is_still_ending_it_is_not_touched(run_dir: Path) -> None:
    told: list[float] = []
    with Supervisor.start(run_dir=run_dir, run_id="run-1"):
        with pytest.raises(ConfigError, match="its supervisor is ending what it started"):
            continue_run(run_dir, PRINTS, "", 10.0)
        with pytest.raises(ConfigError, match="still at work"):
            await_ending(run_dir, 0.3, told.append)
    assert told
    await_ending(run_dir, 0.3, told.append)
    assert len(continue_run(run_dir, PRINTS, "", 10.0).attempts) == 2


def test_two_processes_cannot_take_a_run_up_at_once(run_dir: Path) -> None:
    folder = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is taking this run up"):
            continue_run(run_dir, PRINTS, "", 10.0)
    finally:
        os.close(folder)
    assert not (run_dir / "attempts").exists()


def test_a_run_that_another_process_settles_or_synchronises_is_not_continued(
    run_dir: Path,
) -> None:
    (run_dir / "receipt.json").write_text("{}")
    with alone(run_dir):
        with pytest.raises(ConfigError, match="another process is settling, synchronising"):
            continue_run(run_dir, PRINTS, "", 10.0)
        assert not (run_dir / "attempts").exists()
        assert len(read_history(run_dir).attempts) == 1
    assert len(continue_run(run_dir, PRINTS, "", 10.0).attempts) == 2
    with pytest.raises(ConfigError, match="has not ended yet"), alone(run_dir):
        pass


class MovedOnOpening(PosixPath):
    """Its files are opened a moment before another process moves them away."""

    def open(self, *how: Any, **more: Any) -> Any:
        file = super().open(*how, **more)
        self.rename(self.with_suffix(".moved"))
        return file


def test_whoever_locks_a_receipt_that_was_just_moved_away_has_locked_nothing(run_dir: Path) -> None:
    (run_dir / "receipt.json").write_text("{}")
    with pytest.raises(ConfigError, match="has not ended yet"), alone(MovedOnOpening(run_dir)):
        pass


def test_what_a_killed_attempt_left_is_ended_before_its_ledger_goes_aside(
    run_dir: Path, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    supervisor = Supervisor.start(run_dir=run_dir, run_id="run-1")
    order = ChildSpec(
        name="teacher",
        kind="teacher",
        argv=(sys.executable, "-c", "import time; time.sleep(600)"),
        cwd=tmp_path,
        log=tmp_path / "log",
        scratch=(scratch,),
    )
    child = supervisor.spawn(order)
    dying = open_pidfd(supervisor.pid)
    os.kill(supervisor.pid, signal.SIGKILL)
    assert wait_pidfd(dying, 30)
    os.close(dying)
    continue_run(run_dir, PRINTS, "", 10.0)
    assert not _living(child.pid)
    assert not scratch.exists()
    events = [record.event for record in read_ledger(run_dir / "attempts" / "1" / "ledger.jsonl")]
    assert events[-1] == "receipt"
    assert not (run_dir / "ledger.jsonl").exists()
    supervisor.end()


def _living(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.running


def test_a_changed_model_stops_the_run_and_is_named(run_dir: Path) -> None:
    now = PRINTS | {"the student": "other", "teacher 'late'": "cc"}
    with pytest.raises(PreflightError, match="fingerprint aa then, other now"):
        continue_run(run_dir, now, "", 10.0)
    with pytest.raises(PreflightError, match=r"opd run --fork .*run-1"):
        continue_run(run_dir, {"the student": "aa"}, "", 10.0)
    assert not (run_dir / "attempts").exists()


def test_an_external_teacher_must_score_as_it_did_when_the_run_began(run_dir: Path) -> None:
    known = TeacherFacts(9, canaries=(Canary((1, 2, 3), ((-1.0, -2.0), (-1.5, -2.5))),))

    def scoring(*replicas: tuple[float, float]) -> dict[str, TeacherFacts]:
        return {"t": replace(known, canaries=(Canary((1, 2, 3), replicas),))}

    check_external_teachers(run_dir, scoring((-7.0, -7.0)))  # nobody heard it before
    (run_dir / "attempts" / "1").mkdir(parents=True)  # this one ended before it was ready
    for number, facts in (("2", known), ("10", scoring((-9.0, -9.0), (-9.0, -9.0))["t"])):
        (run_dir / "attempts" / number).mkdir()
        (run_dir / "attempts" / number / "teachers.json").write_text(facts_to_json({"t": facts}))
    check_external_teachers(run_dir, scoring((-1.0, -2.0005), (-1.5, -2.5)))
    with pytest.raises(ServingError, match=r"teacher 't' is not what it was .* --fork .*run-1"):
        check_external_teachers(run_dir, scoring((-1.0, -2.0), (-1.5, -2.6)))
    launched = {"t": replace(known, fingerprint="weights-and-how-they-are-served")}
    (run_dir / "attempts" / "2" / "teachers.json").write_text(facts_to_json(launched))
    check_external_teachers(run_dir, scoring((-7.0, -7.0), (-7.0, -7.0)))


def test_a_damaged_ledger_is_told(run_dir: Path) -> None:
    (run_dir / "ledger.jsonl").write_text('nonsense\n{"event": "receipt", "at": 1}\n')
    with pytest.raises(PreflightError, match=r"JSON record in line 1 of .*ledger.jsonl"):
        continue_run(run_dir, PRINTS, "", 10.0)


def test_a_folder_that_is_no_run_is_refused_clearly(run_dir: Path) -> None:
    (run_dir / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run.json cannot be read"):
        read_history(run_dir)
    (run_dir / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no config.json: it is not a run directory"):
        read_history(run_dir)


def test_a_flow_run_finds_the_run_of_any_of_its_attempts(run_dir: Path) -> None:
    (run_dir.parent / "other").mkdir()
    (run_dir.parent / "other" / "run.json").write_text(json.dumps({"attempts": 3}))
    continue_run(run_dir, PRINTS, "second-flow", 10.0)
    assert find_flow_run(run_dir.parent, "first-flow") == run_dir
    assert find_flow_run(run_dir.parent, "second-flow") == run_dir
    assert find_flow_run(run_dir.parent, "third-flow") is None
