"""The processes a supervisor has started: start, signal, reap. Used by the supervisor alone.

A child that has ended but is not yet reaped keeps its pid, and with it its process group's number.
So a group is killed between seeing its leader's end and reaping it, and cannot be someone else's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

from .bond import bind_to
from .errors import ChildNotStarted
from .process import ProcessId, identify
from .records import CHILD_MARKER, RUN_MARKER, ChildEnd, ChildSpec

_MARKERS = (RUN_MARKER, CHILD_MARKER)
# setproctitle (SGLang, LMDeploy and Ray use it) overwrites the environment that /proc shows, and
# the run's marker with it, unless this variable is set.
_KEEP_ENVIRONMENT_READABLE = {"SPT_NOENV": "1"}


class StartedChild:
    """One child from its start to its end. `serial` counts the children of one supervisor."""

    def __init__(self, spec: ChildSpec, popen: subprocess.Popen[bytes], serial: int) -> None:
        self.spec = spec
        self.serial = serial
        self.pid = popen.pid
        self.started_at = time.time()
        self.ended_at: float | None = None
        self.returncode: int | None = None
        self.how = "exited"
        self.killed_at: float | None = None
        """`time.monotonic()` of the first SIGKILL, None before."""
        self._popen = popen
        # Not yet reaped, so there is such a process even if it has ended already.
        self.identity = identify(popen.pid) or ProcessId(popen.pid, -1)

    @property
    def living(self) -> bool:
        return self.returncode is None

    def ask_to_stop(self) -> None:
        """Send the spec's stop signal to the main process, once: a second one means "hurry"."""
        if self.living and self.how == "exited":
            self.how = self.spec.stop_signal
            # One that has taken another user's rights goes on to the SIGKILL, or is a survivor.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.Signals[self.spec.stop_signal])

    def kill(self) -> None:
        """SIGKILL the whole process group."""
        if self.living:
            self.how = "SIGKILL"
            self.killed_at = self.killed_at or time.monotonic()
            self._kill_group()

    def reap(self) -> None:
        """Collect the ended main process, after ending what is left of its group."""
        self._kill_group()
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self.ended_at = time.time()
        # Else Popen would wait for this pid again, when it may be another process.
        self._popen.returncode = self.returncode

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def to_end(self) -> ChildEnd:
        """Return this child's line of the receipt."""
        return ChildEnd(
            name=self.spec.name,
            kind=self.spec.kind,
            pid=self.pid,
            started_at=round(self.started_at, 3),
            ended_at=None if self.ended_at is None else round(self.ended_at, 3),
            how=self.how,
            returncode=self.returncode,
        )


class Children:
    """All children of one supervisor, in the order of their start."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._started: list[StartedChild] = []

    def all(self) -> tuple[StartedChild, ...]:
        return tuple(self._started)

    def latest(self, name: str) -> StartedChild | None:
        """Return the child of that name that was started last, living or not."""
        return next((child for child in reversed(self._started) if child.spec.name == name), None)

    def start(self, spec: ChildSpec) -> StartedChild:
        """Start a child. Raises ChildNotStarted with the operating system's reason."""
        try:
            os.makedirs(spec.log.parent, exist_ok=True)
            with spec.log.open("ab") as log:
                popen = subprocess.Popen(
                    spec.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=spec.cwd,
                    env=self._environment(spec),
                    start_new_session=True,
                    preexec_fn=bind_to(os.getpid()),
                )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise ChildNotStarted(
                f"child {spec.name!r}: expected to start {spec.argv[0]!r} in {spec.cwd}, got: "
                f"{error}. Check that the program exists and may be executed, that the folder "
                f"exists, and that {spec.log} can be written"
            ) from None
        child = StartedChild(spec, popen, serial=len(self._started))
        self._started.append(child)
        return child

    def reap(self) -> list[StartedChild]:
        """Collect every ended child and adopted orphan; return the children that ended."""
        by_pid = {child.pid: child for child in self._started if child.living}
        ended: list[StartedChild] = []
        while True:
            try:
                zombie = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return ended
            if zombie is None:
                return ended
            child = by_pid.get(zombie.si_pid)
            if child is None:
                os.waitpid(zombie.si_pid, 0)
            else:
                child.reap()
                ended.append(child)

    def _environment(self, spec: ChildSpec) -> dict[str, str]:
        marks = {RUN_MARKER: self._run_id, CHILD_MARKER: spec.name}
        return {**os.environ, **_KEEP_ENVIRONMENT_READABLE, **spec.env, **marks}


def environment_without_marks() -> dict[str, str]:
    """Return this process's environment as something that is no part of the run gets it."""
    return {name: value for name, value in os.environ.items() if name not in _MARKERS}
