"""TensorBoard event files, written by tensorboard's own writer: no torch, no tensorflow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from opd_core.tracking.journal import JournalRecord
from opd_core.tracking.names import finite_points
from opd_core.tracking.sink import Ending


class TensorBoardSink:
    """Scalars under the same names and train steps as in MLflow, at the record's wall time.

    Every shipper replays the journal from its start, so event files that an earlier process left
    in ``log_dir`` are replaced. Values are float32, as TensorBoard keeps them. After a failed write
    a new file is begun; points of that batch may then stand in both, one on top of the other.
    """

    def __init__(self, log_dir: Path) -> None:
        """``log_dir`` belongs to this run; it is created where missing. Raises OSError."""
        log_dir.mkdir(parents=True, exist_ok=True)
        for stale in log_dir.glob("events.out.tfevents.*"):
            stale.unlink()
        self._log_dir = log_dir
        self._dropped = 0
        self._writer: Any = _writer(log_dir)

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
            self._writer = _writer(self._log_dir)
        try:
            dropped = _write(self._writer, records)
        except Exception:
            self.close()
            raise
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


def _writer(log_dir: Path) -> Any:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    return EventFileWriter(str(log_dir))


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
