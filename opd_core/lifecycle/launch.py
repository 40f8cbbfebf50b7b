"""Start a supervisor process for this process, and hold on to it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys

from .bond import isolated
from .errors import LifecycleError, SupervisorNotStarted
from .order import RunOrder
from .process import open_pidfd, signal_pidfd, wait_pidfd
from .records import RUN_MARKER, check_name

SUPERVISOR_LOG = "supervisor.log"
_DEATH_S = 10.0


class SupervisorLaunch:
    """The running supervisor process, as its parent sees it."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid
        self.pidfd = open_pidfd(popen.pid)

    def has_ended(self) -> bool:
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Return True once it has ended, False after `timeout_s`."""
        return wait_pidfd(self.pidfd, timeout_s)

    def kill(self) -> None:
        """SIGKILL it if it still runs, and wait for its death; its children die with it."""
        signal_pidfd(self.pidfd, signal.SIGKILL)
        self.wait(_DEATH_S)

    def close(self) -> None:
        """Collect the ended process and let its descriptor go."""
        self._popen.wait(_DEATH_S)
        os.close(self.pidfd)


def check_start(run_id: str, teardown_s: float, deadline_s: float | None) -> None:
    """Raise LifecycleError if no supervisor could watch a run of this name from this process."""
    check_name(run_id, "run id")
    if not (math.isfinite(teardown_s) and teardown_s > 0):
        raise LifecycleError(
            f"expected teardown_s to be more than 0 seconds, got {teardown_s}; 60 suits most runs"
        )
    if deadline_s is not None and not deadline_s > 0:
        raise LifecycleError(
            f"expected deadline_s to be more than 0 seconds, got {deadline_s}; None is without end"
        )
    if sys.platform != "linux":
        raise LifecycleError(
            f"expected Linux (pidfd, subreaper, /proc), got {sys.platform}; run in a container"
        )
    if os.environ.get(RUN_MARKER) == run_id:
        raise LifecycleError(
            f"{RUN_MARKER}={run_id} is in the environment of this process, so everything it starts "
            "would be taken for a part of the run and killed; unset it or choose another run id"
        )


def launch(order: RunOrder, interpreter: str) -> SupervisorLaunch:
    """Start the supervisor with its end of the control line, in a session of its own.

    Raises SupervisorNotStarted if the interpreter cannot be started.
    """
    command = isolated(interpreter, "supervisor", json.dumps(order.to_wire()))
    try:
        with (order.run_dir / SUPERVISOR_LOG).open("ab") as log:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=order.run_dir,
                start_new_session=True,
                pass_fds=(order.control_fd, *order.lease_fds),
            )
    except OSError as error:
        raise SupervisorNotStarted(
            f"expected {interpreter!r} to start the supervisor in {order.run_dir}, got: {error}; "
            "name a Python 3.11 or later that may be executed, and a folder that may be written"
        ) from None
    return SupervisorLaunch(popen)
