"""Run a settle command: what writes a run's final state where its owner could not.

It is no part of the run: it carries a marker of its own instead of the run's, so that no sweep of a
run takes it for one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from .bond import bound
from .children import environment_without_marks
from .logs import log_tail
from .process import with_ancestors
from .sweep import sweep

SETTLE_S = 120.0
_MARKER = "OPD_SETTLING"
_REASON_LINES = 5
_DEATH_S = 10.0


def settle_log(run_dir: Path) -> Path:
    """Where the output of its latest try goes."""
    return run_dir / "logs" / "settle.log"


def run_settle_command(command: tuple[str, ...], run_dir: Path, limit_s: float = SETTLE_S) -> str:
    """Run it and wait, `limit_s` at most; "" means settled, else why it is not.

    Whatever it has started ends with it, also when the waiting is interrupted. It dies with the
    calling thread. No command has nothing to write.
    """
    if not command:
        return ""
    log = settle_log(run_dir)
    mark = os.urandom(8).hex()
    try:
        log.parent.mkdir(exist_ok=True)  # a run folder that was removed stays so
        with log.open("wb") as output:
            process = subprocess.Popen(
                bound(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=run_dir,
                env=environment_without_marks() | {_MARKER: mark},
                start_new_session=True,
            )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"{command[0]} could not be started in {run_dir}: {error}"
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"it took more than {limit_s:g} s; read {log}"
    finally:
        _end(process, f"{_MARKER}={mark}".encode())
    return "" if status == 0 else log_tail(log, _REASON_LINES) or f"it ended with status {status}"


def _end(process: subprocess.Popen[bytes], mark: bytes) -> None:
    """Kill the command, if it still runs, and what it has started."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_DEATH_S)
    deadline = time.monotonic() + _DEATH_S
    sweep(
        (mark,), root=None, spare=with_ancestors(os.getpid()), deadline=deadline, pause=time.sleep
    )
