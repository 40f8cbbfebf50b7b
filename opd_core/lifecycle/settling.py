"""Run a settle command: what writes a run's final state where its owner could not.

It is no part of the run: it does not carry the run's marker, so that no sweep takes it for one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from .children import bind_to, environment_without_marks
from .logs import log_tail

SETTLE_S = 120.0
_REASON_LINES = 5
_DEATH_S = 10.0


def settle_log(run_dir: Path) -> Path:
    """Where the output of its latest try goes."""
    return run_dir / "logs" / "settle.log"


def run_settle_command(command: tuple[str, ...], run_dir: Path, limit_s: float = SETTLE_S) -> str:
    """Run it and wait, `limit_s` at most; "" means settled, else why it is not. Never raises.

    Its whole session is killed when the time is over, and it dies with the calling thread. No
    command has nothing to write.
    """
    if not command:
        return ""
    log = settle_log(run_dir)
    try:
        log.parent.mkdir(exist_ok=True)  # a run folder that was removed stays so
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=run_dir,
                env=environment_without_marks(),
                start_new_session=True,
                preexec_fn=bind_to(os.getpid()),
            )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"{command[0]} could not be started in {run_dir}: {error}"
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_DEATH_S)
        return f"it took more than {limit_s:g} s; read {log}"
    return "" if status == 0 else log_tail(log, _REASON_LINES) or f"it ended with status {status}"
