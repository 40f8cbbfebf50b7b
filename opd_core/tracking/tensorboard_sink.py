"""TensorBoard event files, written by tensorboard's own writer: no torch, no tensorflow."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from opd_core.tracking.journal import JournalRecord
from opd_core.tracking.names import finite_points
from opd_core.tracking.sink import Ending

EVENT_FILES = "events.out.tfevents.*"


class TensorBoardSink:
    """Scalars under the same names and train steps as in MLflow, at the record's wall time.

    Every shipper replays the journal from its start, so event files that an earlier process left
    in ``log_dir`` are replaced. Values are float32, as TensorBoard keeps them. After a failed write
    the file is cut back to the last whole batch, and a new one is begun.
    """

    def __init__(self, log_dir: Path) -> None:
        """``log_dir`` belongs to this run; it is created where missing. Raises OSError."""
        log_dir.mkdir(parents=True, exist_ok=True)
        for stale in log_dir.glob(EVENT_FILES):
            stale.unlink()
        self._log_dir = log_dir
        self._dropped = 0
        self._writer: Any = None
        self._file, self._whole = log_dir, 0
        self._begin()

    @property
    def reference(self) -> str:
        """The directory to point TensorBoard at."""
        return str(self._log_dir)

    @property
    def dropped(self) -> int:
        """Values that were left out because they are not finite."""
        return self._dropped

    def log(self, records: Sequence[JournalRecord]) -> None:
        """Write one event per record and flush it to the file. Raises OSError."""
        if self._writer is None:
            self._begin()
        try:
            dropped = _write(self._writer, records)
        except Exception:
            self.close()
            os.truncate(self._file, self._whole)  # what arrived of this batch comes again
            raise
        self._whole = os.path.getsize(self._file)
        self._dropped += dropped

    def finish(self, ending: Ending) -> tuple[str, ...]:
        """Nothing: event files hold numbers only, and each batch is flushed already."""
        return ()

    def close(self) -> None:
        """Close the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(Exception):  # every batch that counted was flushed before
                writer.close()

    def _begin(self) -> None:
        """Begin a new event file."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        there = set(self._log_dir.glob(EVENT_FILES))
        if there:  # readers take files by name, which orders them by the second only
            time.sleep(1.0 - time.time() % 1.0)
        self._writer = EventFileWriter(str(self._log_dir))
        (self._file,) = set(self._log_dir.glob(EVENT_FILES)) - there
        self._whole = os.path.getsize(self._file)


def _write(writer: Any, records: Iterable[JournalRecord]) -> int:
    """Add the records and flush; the number of values left out."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    total_dropped = 0
    for record in records:
        points, dropped = finite_points([record])
        total_dropped += dropped
        values = [Summary.Value(tag=point.name, simple_value=point.value) for point in points]
        writer.add_event(
            Event(wall_time=record.time_s, step=record.train_step, summary=Summary(value=values))
        )
    writer.flush()
    return total_dropped
