"""Event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from opd_core.tracking.journal import JournalRecord
from opd_core.tracking.names import accepted_name
from opd_core.tracking.sink import Ending
from opd_core.tracking.tensorboard_sink import TensorBoardSink

ODD = "opd_reverse_kl/math/中文 (a=b)"


def read(log_dir: Path) -> dict[str, list[tuple[int, float, float]]]:
    """(train_step, wall time, value) of every scalar."""
    events = EventAccumulator(str(log_dir))
    events.Reload()
    return {
        tag: [(e.step, e.wall_time, e.value) for e in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_scalars_keep_name_step_value_and_the_records_time(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "tensorboard")
    sink.log([JournalRecord(1, 1000.5, {"opd_reverse_kl": 0.5, ODD: -2.0})])
    sink.log([JournalRecord(2, 1001.5, {"opd_reverse_kl": 0.25})])
    assert sink.finish(Ending("FINISHED")) == ()
    sink.close()
    assert read(tmp_path / "tensorboard") == {
        "opd_reverse_kl": [(1, 1000.5, 0.5), (2, 1001.5, 0.25)],
        accepted_name(ODD): [(1, 1000.5, -2.0)],
    }
    assert sink.reference == str(tmp_path / "tensorboard")


def test_each_batch_is_in_the_file_before_the_call_returns(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.log([JournalRecord(1, 1.0, {"a": 1.0})])
    assert read(tmp_path) == {"a": [(1, 1.0, 1.0)]}
    sink.close()


def test_values_that_are_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.log([JournalRecord(1, 1.0, {"a": math.nan, "b": 1.0, "c": -math.inf})])
    sink.close()
    assert sink.dropped == 2
    assert read(tmp_path) == {"b": [(1, 1.0, 1.0)]}


def test_a_replay_replaces_the_event_files_of_an_earlier_process(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    for _ in range(2):
        sink = TensorBoardSink(tmp_path)
        sink.log([JournalRecord(1, 1.0, {"a": 1.0})])
        sink.close()
    assert read(tmp_path) == {"a": [(1, 1.0, 1.0)]}
    assert (tmp_path / "notes.txt").exists()


def test_after_a_failed_write_the_batch_goes_to_a_new_file_and_is_there_once(
    tmp_path: Path,
) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.log([JournalRecord(1, 1.0, {"a": 1.0})])
    third = JournalRecord(3, 3.0, {"a": 3.0})
    with pytest.raises(ValueError, match="range"):
        sink.log([third, JournalRecord(2**70, 2.0, {"a": math.nan})])
    sink.log([third])
    sink.close()
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2
    assert sink.dropped == 0  # counted once the batch is through
    values = EventAccumulator(str(tmp_path))
    values.Reload()
    assert [(e.step, e.value) for e in values.Scalars("a")] == [(1, 1.0), (3, 3.0)]


def test_a_new_file_is_read_after_the_one_before_it(tmp_path: Path) -> None:
    """Files of one second are ordered by a counter as text, where 10 comes before 9."""
    sink = TensorBoardSink(tmp_path)
    with pytest.raises(ValueError, match="range"):
        sink.log([JournalRecord(2**70, 2.0, {"a": 1.0})])
    sink.log([JournalRecord(1, 1.0, {"a": 1.0})])
    sink.close()
    seconds = [path.name.split(".")[3] for path in tmp_path.iterdir()]
    assert len(set(seconds)) == 2
