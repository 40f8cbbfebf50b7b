"""What there is, seen with the test's own eyes: /proc, the kernel's table of sockets, locks."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from opd_core.lifecycle.process import ProcessId, identify, is_running


def marked(run_id: str) -> list[ProcessId]:
    """Return the running processes that carry this run's marker."""
    marker = f"OPD_RUN_ID={run_id}".encode()
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    found = [identify(pid) for pid in pids if marker in _environment(pid)]
    return [process for process in found if process is not None and is_running(process)]


def ports_listened_at() -> set[int]:
    """Return the ports in use, without binding them: the supervisor does that at the same time."""
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(fields[1].partition(":")[2], 16) for fields in sockets if fields[3] == "0A"}


def is_locked(path: Path) -> bool:
    """Return whether a process holds a lock on this file."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _environment(pid: int) -> list[bytes]:
    """Return the entries; none where the process has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
