"""Find and kill whatever is left of a run, and nothing else.

A process belongs to a run if it descends from the supervisor, or if it was started with the run's
markers in its environment, wherever it hangs in the process tree by now. Descent finds a process
that cleared its environment; the markers find one that was re-parented past the supervisor.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .process import (
    ProcessId,
    carries,
    descendants,
    executable_name,
    is_running,
    kill_exactly,
    process_table,
)
from .records import CHILD_MARKER, RUN_MARKER, Survivor

_PAUSE_S = 0.03
_LEAST_S = 1.0


def markers(run_id: str, child: str | None = None) -> tuple[bytes, ...]:
    """Return the environment entries that mark a run's processes, or only those of one child."""
    entries = [f"{RUN_MARKER}={run_id}"] + ([f"{CHILD_MARKER}={child}"] if child else [])
    return tuple(entry.encode() for entry in entries)


def find(
    marks: tuple[bytes, ...], *, root: int | None, spare: frozenset[ProcessId]
) -> frozenset[ProcessId]:
    """Return the running processes that carry all `marks` or descend from pid `root`.

    Those in `spare` (the searcher, the owner and the owner's ancestors) are never among them.
    """
    table = process_table()
    family = frozenset() if root is None else descendants(root, table)
    return frozenset(
        stat.identity
        for stat in table.values()
        if stat.running
        and stat.identity not in spare
        and (stat.pid in family or carries(stat.pid, marks))
    )


def sweep(
    marks: tuple[bytes, ...],
    *,
    root: int | None,
    spare: frozenset[ProcessId],
    deadline: float,
    pause: Callable[[float], None],
    adopter: int | None = None,
) -> tuple[Survivor, ...]:
    """SIGKILL all that `find` finds until it finds none; return what is left at the deadline.

    `deadline` is a `time.monotonic()` value; the sweep takes at least a second if it needs it.
    `pause` waits that many seconds, and reaps where the caller has children to reap. A process that
    dies shows no environment any more while it still holds devices and ports: the killed are waited
    for, and so are the dying children of `adopter`, whosever they were.
    """
    deadline = max(deadline, time.monotonic() + _LEAST_S)
    looks_without_find = 0
    killed: set[ProcessId] = set()
    # Two looks, since a process in the middle of execve shows no environment for a moment.
    while looks_without_find < 2:
        found = find(marks, root=root, spare=spare) | _dying(adopter)
        found |= {process for process in killed if is_running(process)}
        looks_without_find = 0 if found else looks_without_find + 1
        if found and time.monotonic() >= deadline:
            return tuple(
                Survivor(process.pid, executable_name(process.pid))
                for process in sorted(found, key=lambda process: process.pid)
                if is_running(process)
            )
        for process in found:
            kill_exactly(process)
        killed |= found
        pause(_PAUSE_S)
    return ()


def _dying(parent: int | None) -> frozenset[ProcessId]:
    """Return the children of that process that have no memory any more, and still run."""
    if parent is None:
        return frozenset()
    children = (stat for stat in process_table().values() if stat.parent == parent)
    return frozenset(stat.identity for stat in children if stat.running and not stat.memory)
