"""The metrics journal of a run: one JSON line per record, written before anything else sees it.

One process appends (the training driver), others read at the same time. A line is
``{"train_step": 3, "time": 1760000000.25, "metrics": {"opd_reverse_kl": 0.5}}``; a value that is
not finite is kept as it is (``NaN``, ``Infinity``). Standard library only.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from opd_core.errors import DataError

TAIL_BLOCK = 65536


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """Metrics of one train step, e.g. ``JournalRecord(3, 1760000000.25, {"opd_reverse_kl": 0.5})``.

    ``time_s`` is unix time in seconds. A step may have several records (training, evaluation).
    """

    train_step: int
    time_s: float
    metrics: Mapping[str, float]


class Journal:
    """The writing end. One writer at a time; the next one continues the file.

    A half-written last line, left by a writer that was killed, is cut off on opening: its record
    was never acknowledged, and a line glued to it would be unreadable.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError where the file cannot be opened."""
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._size = _end_of_whole_lines(self._file)
        os.ftruncate(self._file, self._size)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the file's name must survive a power cut as well
        finally:
            os.close(directory)

    def append(self, train_step: int, metrics: Mapping[str, float]) -> None:
        """Write one record and wait until the disk has it.

        Raises:
            OSError: it could not be written whole, and nothing of it is left, so that the journal
                stays readable and a later record can be appended; or the disk did not confirm it.
        """
        record = {
            "train_step": int(train_step),
            "time": time.time(),
            "metrics": {name: float(value) for name, value in metrics.items()},
        }
        line = (json.dumps(record, separators=(",", ":")) + "\n").encode("ascii")
        written = os.write(self._file, line)
        if written != len(line):
            os.ftruncate(self._file, self._size)
            raise OSError(
                f"expected to write a record of {len(line)} bytes, {written} went in: "
                "make room on the disk of the run directory"
            )
        self._size += len(line)
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file; the journal takes no further record."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JournalReader:
    """The reading end: each call to :meth:`read` continues where the last one stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._lines = 0

    def read(self) -> list[JournalRecord]:
        """Records added since the last call, oldest first; none while there is no file.

        A last line without its newline is still being written: it is left for the next call.
        Whole records before a malformed line are returned; the next call then raises:
        :func:`read_all` calls until then.

        Raises:
            DataError: a malformed line (names file and line), or a file that lost what was read.
            OSError: the file is there and cannot be read.
        """
        try:
            added = self._added_bytes()
        except FileNotFoundError:
            return []
        records: list[JournalRecord] = []
        for line in added.split(b"\n")[:-1]:
            try:
                records.append(_parse(line))
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                if records:
                    break
                raise DataError(
                    f"{self.path}, line {self._lines + 1}: expected a record with 'train_step', "
                    f"'time' and 'metrics', got {line[:80]!r} ({error}); remove or mend the line"
                ) from None
            self._offset += len(line) + 1
            self._lines += 1
        return records

    def _added_bytes(self) -> bytes:
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < self._offset:
                raise DataError(
                    f"{self.path}: expected at least {self._offset} bytes, which were read before, "
                    f"got {size}: the journal was cut or replaced; read it from the start"
                )
            file.seek(self._offset)
            return file.read()


def read_all(path: Path) -> Iterator[JournalRecord]:
    """Every record of the journal as it stands, oldest first; none while there is no file.

    A malformed line raises after all records before it were given. Raises as
    :meth:`JournalReader.read`.
    """
    reader = JournalReader(path)
    while records := reader.read():
        yield from records


def _parse(line: bytes) -> JournalRecord:
    data = json.loads(line)
    train_step, time_s, metrics = data["train_step"], data["time"], data["metrics"]
    if type(train_step) is not int:
        raise TypeError(f"train_step is {train_step!r}")
    if not isinstance(metrics, dict) or not math.isfinite(_number(time_s)):
        raise TypeError(f"time is {time_s!r}, metrics are of type {type(metrics).__name__}")
    numbers = {name: _number(value) for name, value in metrics.items()}
    return JournalRecord(train_step, _number(time_s), numbers)


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _end_of_whole_lines(file: int) -> int:
    """Position after the last newline."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(end - TAIL_BLOCK, 0)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
