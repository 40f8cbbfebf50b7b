"""`ledger.jsonl`: one line per fact of a run, each on the disk before the next thing happens.

    {"event": "child_starting", "at": 1767225600.0, "name": "teacher", "ports": [30000], ...}

Events, in order of a run's life: run_started; child_starting (before the child exists), then
child_started or child_not_started; child_ended; teardown_begun; receipt; settled or not_settled;
and the owner's notes. `at` is seconds since the epoch. One supervisor writes at a time. An
exclusive `flock` on the ledger itself decides that: the kernel releases it at the holder's
death, however it dies, and no pid has to be trusted. A supervisor that finds the lock free and
lines in the file continues the ledger of a dead one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import LedgerBusy, LedgerDamaged
from .locks import lock_now
from .records import JsonObject, fsync_folder

LEDGER_FILE = "ledger.jsonl"
EVENTS = frozenset(
    {
        "run_started",
        "child_starting",
        "child_started",
        "child_not_started",
        "child_ended",
        "teardown_begun",
        "receipt",
        "settled",
        "not_settled",
    }
)
"""What a supervisor, or a reaper, writes; an owner's notes have other names."""
_LOOK_S = 0.5


@dataclass(frozen=True)
class LedgerRecord:
    """One line. `facts` are the event's own fields."""

    event: str
    at: float
    facts: JsonObject


class Ledger:
    """The ledger, open and locked for writing. Create with `Ledger.open`."""

    def __init__(self, path: Path, descriptor: int, before: tuple[LedgerRecord, ...]) -> None:
        self.path = path
        self.before = before
        """What earlier supervisors of the same run wrote; empty for a new run."""
        self._descriptor = descriptor

    @classmethod
    def open(cls, path: Path, run_id: str) -> Ledger:
        """Create the ledger, or continue that of a dead supervisor of the same run.

        Raises LedgerBusy if another process holds it, LedgerDamaged if it cannot be continued, and
        OSError if it cannot be written.
        """
        is_new = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            _lock(descriptor, path)
            _cut_torn_line(descriptor)
            before = read_ledger(path)
            owners = {record.facts["run_id"] for record in before if record.event == "run_started"}
            if owners - {run_id}:
                raise LedgerDamaged(
                    f"{path} belongs to run {sorted(owners)}, expected {run_id!r}; "
                    "give every run a folder of its own"
                )
            if is_new:
                fsync_folder(path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, before)

    def append(self, event: str, **facts: Any) -> None:
        """Write one record and wait until it is on the disk. Raises OSError if it is not; then no
        part of it is there."""
        record = {**facts, "event": event, "at": round(time.time(), 3)}
        line = json.dumps(record).encode() + b"\n"
        size = os.fstat(self._descriptor).st_size
        try:
            if os.write(self._descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            os.fsync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, size)
            raise

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


def read_ledger(path: Path) -> tuple[LedgerRecord, ...]:
    """Read all whole records of a ledger, whoever is writing it; no file gives no records.

    A last line without an end is left out: it is being written, or its writer died. Raises
    LedgerDamaged for any other unreadable line, OSError if the file cannot be read.
    """
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return ()
    parsed = [_parse(line) for line in lines]
    if None in parsed:
        raise LedgerDamaged(
            f"expected a JSON record in line {parsed.index(None) + 1} of {path}, got something "
            "else; restore the file, or move it away after making sure that nothing of the run is "
            "left"
        )
    return tuple(record for record in parsed if record is not None)


def _parse(line: bytes) -> LedgerRecord | None:
    try:
        data = json.loads(line)
        return LedgerRecord(event=data.pop("event"), at=data.pop("at"), facts=data)
    except (ValueError, KeyError, AttributeError, TypeError):
        return None


def _lock(descriptor: int, path: Path) -> None:
    give_up_at = time.monotonic() + _LOOK_S
    while not lock_now(descriptor):
        if time.monotonic() < give_up_at:  # somebody may only be looking whether it is held
            time.sleep(_LOOK_S / 10)
            continue
        started = [record for record in read_ledger(path) if record.event == "run_started"]
        holder = started[-1].facts.get("supervisor_pid") if started else "unknown"
        raise LedgerBusy(
            f"{path} is held by a live supervisor (pid {holder}); end that run first, "
            "or give this one a folder of its own"
        ) from None


def _cut_torn_line(descriptor: int) -> None:
    """A line without an end was being written when its writer died, and says nothing."""
    whole = os.pread(descriptor, os.fstat(descriptor).st_size, 0).rfind(b"\n") + 1
    os.ftruncate(descriptor, whole)


def is_held(path: Path) -> bool:
    """Return whether a living process writes this ledger. Raises OSError if nobody can know."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        return not lock_now(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)
