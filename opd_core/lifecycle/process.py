"""Facts about processes, from Linux: identity, family, environment, death signal, pidfd.

A bare pid is never an identity, since the kernel gives numbers out again. `ProcessId` adds the
start time in clock ticks since boot (proc(5), /proc/<pid>/stat, field 22); with the boot id it is
unique for ever on one machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# From <linux/prctl.h> and the system call table; these calls have one number on all machines.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SYS_PIDFD_SEND_SIGNAL = 424
_SYS_PIDFD_OPEN = 434

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class ProcessId:
    """One process, told apart from every other that had or will have the same pid.

    Example: `ProcessId(pid=4711, start_ticks=880123)`.
    """

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class ProcessStat:
    """The fields of /proc/<pid>/stat that are used here. `state` is one letter; Z is a zombie."""

    pid: int
    state: str
    parent: int
    group: int
    threads: int
    start_ticks: int
    memory: int
    """Bytes of its address space; 0 for a process that is dying and has let go of that already."""

    @property
    def identity(self) -> ProcessId:
        return ProcessId(self.pid, self.start_ticks)

    @property
    def running(self) -> bool:
        """False for a zombie: it holds no memory, port or device, only its number.

        The state is that of the main thread. While other threads outlive it (one that hangs in a
        driver after SIGKILL, say), the process still holds everything.
        """
        return self.state not in "ZX" or self.threads > 1


def read_stat(pid: int) -> ProcessStat | None:
    """Return the process's stat line, or None if there is no such process."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name stands in parentheses and may itself hold spaces and parentheses.
    fields = line.rpartition(b")")[2].split()
    return ProcessStat(
        pid=pid,
        state=fields[0].decode(),
        parent=int(fields[1]),
        group=int(fields[2]),
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
        memory=int(fields[20]),
    )


def identify(pid: int) -> ProcessId | None:
    """Return the identity of the process that has this pid now, or None."""
    stat = read_stat(pid)
    return None if stat is None else stat.identity


def is_running(process: ProcessId) -> bool:
    """Return whether exactly this process still exists and is no zombie."""
    stat = read_stat(process.pid)
    return stat is not None and stat.identity == process and stat.running


def boot_id() -> str:
    """Return the identity of this boot: processes recorded under another one are gone."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_table() -> dict[int, ProcessStat]:
    """Return every process of this pid namespace, by pid."""
    found = (read_stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return {stat.pid: stat for stat in found if stat is not None}


def descendants(root: int, table: Mapping[int, ProcessStat]) -> frozenset[int]:
    """Return the pids of all children of `root`, their children, and so on; not `root` itself."""
    children: dict[int, list[int]] = {}
    for stat in table.values():
        children.setdefault(stat.parent, []).append(stat.pid)
    found: set[int] = set()
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if pid not in found:
                found.add(pid)
                waiting.append(pid)
    return frozenset(found - {root})


def with_ancestors(pid: int) -> frozenset[ProcessId]:
    """Return the process, its parent, and so on up to the first process."""
    found: set[ProcessId] = set()
    while pid > 0 and (stat := read_stat(pid)) is not None and stat.identity not in found:
        found.add(stat.identity)
        pid = stat.parent
    return frozenset(found)


def carries(pid: int, markers: Iterable[bytes]) -> bool:
    """Return whether the environment the process was started with holds all of `markers`.

    A marker is one whole entry (b"NAME=value"). A process of another user, or one that has ended,
    carries nothing.
    """
    for folder in _folders(pid):
        try:
            entries = (folder / "environ").read_bytes().split(b"\0")
        except PermissionError:
            return False
        except OSError:
            continue
        if entries != [b""]:
            return all(marker in entries for marker in markers)
    return False


def executable_name(pid: int) -> str:
    """Return the file name of the program, without its arguments (they may hold a secret)."""
    for folder in _folders(pid):
        with contextlib.suppress(OSError):
            return (folder / "exe").readlink().name
    return "unknown"


def _folders(pid: int) -> Iterator[Path]:
    """The process's folder in /proc, then its threads': a main thread that has ended shows nothing
    in the first."""
    yield Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        yield from Path(f"/proc/{pid}/task").iterdir()


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of process 1 (prctl(2)).

    Raises OSError where the kernel refuses.
    """
    _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, *_longs(1, 0, 0, 0)))


def die_with_parent() -> None:
    """Have the kernel SIGKILL this process when the *thread* that forked it ends (prctl(2)).

    Safe only where the parent is single-threaded. Raises OSError where the kernel refuses.
    """
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, *_longs(signal.SIGKILL, 0, 0, 0)))


def open_pidfd(pid: int) -> int:
    """Return a file descriptor that stands for the process and becomes readable when it ends.

    By system call, since `os.pidfd_open` is missing from a Python built against old headers.
    Raises ProcessLookupError if there is no such process, OSError on a kernel older than 5.3.
    """
    return _checked(_libc.syscall(*_longs(_SYS_PIDFD_OPEN, pid, 0)))


def signal_pidfd(pidfd: int, signum: int) -> bool:
    """Send a signal to exactly that process; return False if it has ended or is not ours."""
    try:
        _checked(_libc.syscall(*_longs(_SYS_PIDFD_SEND_SIGNAL, pidfd, signum, 0, 0)))
    except (ProcessLookupError, PermissionError):
        return False
    return True


def wait_pidfd(pidfd: int, timeout_s: float) -> bool:
    """Return True once the process has ended (a zombie counts), False after `timeout_s`."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(max(0.0, timeout_s) * 1000))


def kill_exactly(process: ProcessId) -> bool:
    """SIGKILL that process and no later one with its pid; return whether a signal was sent."""
    try:
        pidfd = open_pidfd(process.pid)
    except OSError:
        return False
    try:
        # The descriptor pins whoever has the pid now; only then is it worth asking who that is.
        return identify(process.pid) == process and signal_pidfd(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)


def _longs(*values: int) -> tuple[ctypes.c_long, ...]:
    """Variadic C calls read whole registers, so every argument is passed as a long."""
    return tuple(ctypes.c_long(value) for value in values)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{errno.errorcode.get(number, number)}: {os.strerror(number)}")
    return result
