"""The journal's writing end: nothing twice, and what waiting for it costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from opd_core.errors import DataError
from opd_core.training.step_log import TRAINED, StepLog


def test_the_metrics_of_a_train_step_are_known_after_a_restart_too(tmp_path: Path) -> None:
    with StepLog(tmp_path / "metrics.jsonl") as log:
        log.record(0, {"eval/accuracy": 0.5})
        log.record(1, {TRAINED: 2.0, "total/money": 3.0}, TRAINED)
    with StepLog(tmp_path / "metrics.jsonl") as log:
        assert log.of_training(1)["total/money"] == 3.0
        assert log.of_training(0) == {}, "it was evaluated, not trained"
        assert log.of_training(2) == {}


def test_a_journal_that_cannot_be_read_to_its_end_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with StepLog(path) as log:
        log.record(1, {TRAINED: 2.0}, TRAINED)
    path.write_text(path.read_text() + "nonsense\n")
    with pytest.raises(DataError, match="line 2"):
        StepLog(path)


def test_the_time_that_a_run_waits_for_what_is_only_kept_is_counted_once(tmp_path: Path) -> None:
    with StepLog(tmp_path / "metrics.jsonl") as log:
        log.record(1, {TRAINED: 2.0}, TRAINED)
        appended = log.tracking_s
        assert appended > 0
        log.record(1, {TRAINED: 2.0}, TRAINED)
        assert log.tracking_s == appended, "nothing was written"
        with log.tracking():
            (tmp_path / "other").write_text("kept")
        assert log.take_tracking_s() > appended
        assert log.take_tracking_s() == 0
