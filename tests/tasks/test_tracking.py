"""What is told of a run is what happened, however it ended."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from opd_core.lifecycle.receipt_text import left_over
from opd_core.lifecycle.records import Receipt, Survivor
from opd_core.preflight import PreflightReport
from opd_core.recipe import load_recipe
from opd_core.tracking.journal import Journal
from opd_core.tracking.sink import Sink
from opd_core.training.attempts import Attempt, RunHistory
from opd_core.training.files import JOURNAL_FILE
from opd_core.training.forks import ForkPoint
from opd_core.training.results import RunResult
from tasks.console import TERMINAL
from tasks.environment import RunRecord
from tasks.mlflow_run import mlflow_run
from tasks.provenance import git_commit
from tasks.summary import build_summary, show_summary, write_model_card, write_summary
from tasks.tracking import Tracker

RECIPE = Path(__file__).parents[2] / "deployments" / "recipes" / "tiny.yaml"


HISTORY = RunHistory("tiny-1", (Attempt(1.0),), {})


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    return RunRecord("tiny-1", tmp_path, load_recipe(RECIPE), HISTORY)


def receipt(*survivors: Survivor) -> Receipt:
    return Receipt("tiny-1", "completed", not survivors, 0.1, (), survivors, (), ())


def write_result(run: RunRecord) -> None:
    """Two evaluations around one train step, as the driver leaves them."""
    with Journal(run.directory / JOURNAL_FILE) as journal:
        journal.append(0, {"eval/accuracy": 0.4, "eval/accuracy_stderr": 0.01})
        journal.append(
            1,
            {
                "opd_reverse_kl": 0.3,
                "opd_reverse_kl_stderr": 0.02,
                "response_tokens": 100.0,
                "groups/completed": 5.0,
                "groups/filtered": 1.0,
                "groups/failed": 2.0,
                "lost/timeout": 2.0,
                "time/step_s": 4.0,
                "time/sampling_s": 1.0,
                "time/scoring_s": 0.0,
                "time/training_s": 3.0,
                "time/weight_sync_s": 0.0,
            },
        )
        journal.append(1, {"eval/accuracy": 0.7, "eval/accuracy_stderr": 0.02})
    RunResult("completed", student_path="/somewhere/student").write(run.directory)


def test_a_completed_run_is_told_in_full(run: RunRecord) -> None:
    write_result(run)
    summary = build_summary(run, receipt(), {"teardown": 1.0}, error=None)
    assert summary["status"] == "completed"
    assert summary["accuracy"]["after"] == 0.7
    assert summary["opd_reverse_kl"]["before"] == 0.3
    assert summary["opd_reverse_kl"]["after"] is None  # one step has no before and after
    assert summary["groups"] == {"completed": 5, "filtered": 1, "failed": 2}
    assert summary["lost"] == {"timeout": 2}
    assert summary["seconds"]["teardown"] == 1.0
    assert summary["seconds"]["training"] == 3.0


def test_known_failures_are_in_the_summary_and_in_the_table(
    run: RunRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    same = {"opd_abs_logprob_diff": 1e-9, "response_tokens": 2000.0, "time/step_s": 1.0}
    with Journal(run.directory / JOURNAL_FILE) as journal:
        journal.append(1, same)
    summary = build_summary(run, receipt(), {}, error=None)
    (found,) = summary["findings"]
    assert (found["name"], found["train_step"]) == ("teacher_equals_student", 1)
    monkeypatch.setattr(TERMINAL, "lines", True)
    show_summary(summary)
    assert "error: teacher_equals_student" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("no"), "failed"), (KeyboardInterrupt(), "cancelled"), (SystemExit(), "cancelled")],
)
def test_a_run_that_was_ended_is_not_called_completed(
    run: RunRecord, error: BaseException, status: str
) -> None:
    write_result(run)
    summary = build_summary(run, receipt(), {}, error)
    assert summary["status"] == status
    assert type(error).__name__ in summary["error"]


def test_an_unclean_teardown_is_a_failure_that_names_what_is_left(run: RunRecord) -> None:
    write_result(run)
    left = receipt(Survivor(77, "python"))
    assert build_summary(run, left, {}, error=None)["status"] == "failed"
    assert "process 77 (python)" in left_over(left)


def test_a_job_that_left_no_result_has_a_summary_too(run: RunRecord) -> None:
    summary = build_summary(run, receipt(), {}, RuntimeError("gone"))
    assert summary["status"] == "failed"
    assert summary["train_steps"] == 0
    assert summary["accuracy"]["before"] is None
    write_summary(run, summary)
    assert json.loads((run.directory / "summary.json").read_text()) == summary


def test_a_run_that_was_ended_keeps_the_numbers_of_its_journal(run: RunRecord) -> None:
    write_result(run)
    (run.directory / "result.json").unlink()
    summary = build_summary(run, receipt(), {}, KeyboardInterrupt())
    assert summary["train_steps"] == 1
    assert summary["accuracy"]["after"] == 0.7
    assert summary["groups"]["completed"] == 5


def test_files_that_cannot_be_read_do_not_hide_how_the_run_ended(run: RunRecord) -> None:
    (run.directory / "result.json").write_text("{")
    (run.directory / JOURNAL_FILE).write_text("nonsense\n")
    summary = build_summary(run, receipt(), {}, ValueError("the real reason"))
    assert "the real reason" in summary["error"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("result.json", '{"status": "completed", "seconds": null}'),
        (JOURNAL_FILE, '{"train_step": 1, "time": 0, "metrics": {"groups/completed": NaN}}\n'),
    ],
)
def test_files_of_nonsense_do_not_keep_a_run_from_its_summary(
    run: RunRecord, name: str, content: str
) -> None:
    (run.directory / name).write_text(content)
    summary = build_summary(run, receipt(), {}, ValueError("no"))
    assert (summary["status"], summary["error"]) == ("failed", "ValueError: no")


def test_a_summary_that_nobody_takes_is_told_and_does_not_fail_again_at_the_very_end() -> None:
    script = "from tasks.console import print_result\n"
    script += "try: print_result('{}')\nexcept OSError: raise SystemExit(7)"
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=RECIPE.parents[2], stdout=write, timeout=60
        )
    finally:
        os.close(write)
    assert done.returncode == 7


def test_losses_are_shown_with_the_survivor_table_line_by_line(
    run: RunRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TERMINAL, "lines", True)
    monkeypatch.setenv("COLUMNS", "60")
    survivors = f"kept  {'9 ' * 60}\n  timeout: 2 (e.g. [/no] markup)"
    write_result(run)
    RunResult("completed", survivors=survivors).write(run.directory)
    summary = build_summary(run, receipt(), {}, error=None)
    assert summary["survivors"] == survivors
    show_summary(summary)
    shown = capsys.readouterr().err
    assert "2 timeout" in shown
    assert survivors in shown


def test_an_ended_run_says_how_to_go_on_where_there_is_something_to_go_on_from(
    run: RunRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TERMINAL, "lines", True)
    monkeypatch.setattr(TERMINAL, "summary_json", True)

    def shown(error: BaseException | None) -> list[str]:
        show_summary(build_summary(run, receipt(), {}, error))
        captured = capsys.readouterr()
        assert json.loads(captured.out)["run_id"] == "tiny-1"
        return [line for line in captured.err.splitlines() if "opd run --resume" in line]

    assert shown(KeyboardInterrupt()) == []
    (run.directory / "batches").mkdir()
    (run.directory / "batches" / "step-000001.json").touch()
    assert shown(KeyboardInterrupt()) == [f"continue it with: opd run --resume {run.directory}"]
    assert shown(None) == []


def test_a_resumed_run_counts_the_whole_run_and_the_seconds_of_this_attempt(
    run: RunRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_result(run)
    later = RunHistory("tiny-1", (Attempt(1.0), Attempt(time.time() + 60)), {})
    summary = build_summary(replace(run, history=later), receipt(), {}, error=None)
    assert summary["attempts"] == 2
    assert summary["train_steps"] == 1
    assert summary["seconds"]["training"] == 0.0
    monkeypatch.setattr(TERMINAL, "lines", True)
    show_summary(summary)
    assert re.search(r"attempts +│ 2 ", capsys.readouterr().err)


def test_an_early_stop_restarts_and_pass_at_k_are_shown_only_where_there_were_any(
    run: RunRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TERMINAL, "lines", True)
    write_result(run)
    show_summary(build_summary(run, receipt(), {}, error=None))
    shown = capsys.readouterr().err
    for words in ("stopped early", "started again", "pass@", "attempts"):
        assert words not in shown
    with Journal(run.directory / JOURNAL_FILE) as journal:
        journal.append(1, {"eval/pass_at_4": 0.75, "eval/pass_at_16": 0.875})
    RunResult("completed", stopped="eval/accuracy is [0.7]").write(run.directory)
    show_summary(build_summary(run, receipt(), {}, error=None) | {"job_restarts": 2})
    shown = capsys.readouterr().err
    assert re.search(r"stopped early +│ eval/accuracy is \[0.7\]", shown)
    assert re.search(r"job started again +│ 2 ", shown)
    assert "pass@4 0.750, pass@16 0.875" in shown


def test_a_fork_says_where_it_comes_from(run: RunRecord) -> None:
    write_result(run)
    forked = replace(run, history=replace(HISTORY, forked_from=ForkPoint("tiny-0", 20)))
    tags = mlflow_run(forked).tags
    assert (tags["opd.forked_from"], tags["opd.forked_at_step"]) == ("tiny-0", "20")
    write_model_card(forked, PreflightReport(), build_summary(run, receipt(), {}, error=None))
    assert "train step 20 of tiny-0" in (run.directory / "model_card.md").read_text()
    assert "opd.forked_from" not in mlflow_run(run).tags


def test_each_sink_tells_what_it_got_and_what_that_cost(
    run: RunRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_result(run)
    away = FailingSink()
    tracker = Tracker.through(run, away)
    summary = build_summary(run, receipt(), {}, error=None)
    assert away.called.wait(20.0)
    assert tracker.report().lag.records == 3
    tracker.finish(summary, within_s=5.0)
    told = tracker.told
    assert told["tensorboard"] | {"cpu_s": 0} == {
        "shipped": 3,
        "failed_attempts": 0,
        "cpu_s": 0,
        "last_error": None,
        "complete": True,
    }
    assert told["tensorboard"]["cpu_s"] > 0
    assert (told["mlflow"]["shipped"], told["mlflow"]["complete"]) == (0, False)
    assert tracker.report().lag.records == 3
    (lacking,) = tracker.lacking
    assert f"opd sync {run.directory}" in lacking
    monkeypatch.setattr(TERMINAL, "lines", True)
    show_summary(json.loads(json.dumps(summary | {"tracking": told})))
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert re.search(r"tracking: tensorboard everything, \d+\.\d s of CPU", shown)
    assert re.search(r"tracking: mlflow INCOMPLETE, 0 records, .* \d+ failed attempts", shown)


class FailingSink:
    """A factory of a sink that cannot be made."""

    def __init__(self) -> None:
        self.called = threading.Event()

    def __call__(self) -> Sink:
        self.called.set()
        raise ConnectionError("nobody listens")


def test_a_tracked_run_says_what_it_is_and_when_it_began(run: RunRecord) -> None:
    tracked = mlflow_run(run, over=False)
    assert tracked.tags["opd.kind"] == "run"
    assert (tracked.began_at_s, tracked.over) == (1.0, False)
    assert tracked.artifact_root == run.directory.parent / "mlartifacts"
    other = mlflow_run(run, uri="http://elsewhere")
    assert (other.tracking_uri, other.artifact_root) == ("http://elsewhere", None)


def test_the_model_card_says_how_it_was_measured(run: RunRecord) -> None:
    write_result(run)
    write_model_card(run, PreflightReport(), build_summary(run, receipt(), {}, error=None))
    card = (run.directory / "model_card.md").read_text()
    assert "0.400 ± 0.010 → 0.700 ± 0.020" in card
    assert "torch" in card


@pytest.mark.parametrize(
    ("recorded", "told"),
    [
        ([{"git_commit": "0" * 40, "git_changes": ""}], "0" * 12),
        ([{}, {"git_commit": "1" * 40, "git_changes": "f00"}], "1" * 12 + "+changes"),
        ([{"git_commit": "", "git_changes": ""}], "unknown"),
        ([], ""),
    ],
)
def test_the_commit_is_that_of_the_latest_attempt(
    tmp_path: Path, recorded: list[dict[str, str]], told: str
) -> None:
    (tmp_path / "provenance.json").write_text(json.dumps({"attempts": recorded}))
    assert git_commit(tmp_path) == told


def test_a_run_that_is_tracked_late_has_the_tags_that_its_flow_gave_it(run: RunRecord) -> None:
    prints = {"the student": "aa", "teacher 'teacher'": "bb", "data.train": "cc"}
    made = replace(run, history=replace(HISTORY, fingerprints=prints))
    recorded = [{"git_commit": "0" * 40, "git_changes": "f00"}]
    (run.directory / "provenance.json").write_text(json.dumps({"attempts": recorded}))
    late = mlflow_run(made).tags
    assert mlflow_run(made, over=False).tags == {**late, "prefect.deployment_id": ""}
    assert late["opd.student_fingerprint"] == "aa"
    assert late["opd.teacher_fingerprint.teacher"] == "bb"
    assert late["git.commit"] == "0" * 12 + "+changes"


def test_a_journal_that_is_damaged_lacks_in_tracking_and_is_summarised_up_to_there(
    run: RunRecord, caplog: pytest.LogCaptureFixture
) -> None:
    write_result(run)
    with (run.directory / JOURNAL_FILE).open("a") as journal:
        journal.write("nonsense\n")
    summary = build_summary(run, receipt(), {}, error=None)
    assert summary["accuracy"]["after"] == 0.7
    assert "line 4" in caplog.text
    tracker = Tracker.through(run, None)
    tracker.finish(summary, within_s=1.0)
    (lacking,) = tracker.lacking
    assert re.search(
        r"cannot be read to its end: .*line 4: .*mend the line; later `opd sync", lacking
    )
    assert not tracker.told["tensorboard"]["complete"]
