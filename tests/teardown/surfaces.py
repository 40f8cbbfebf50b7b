"""The doors through which a run is started: command line, script, process worker, served flow."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import uuid4

import pytest

from deployments.drill.rehearsal import MARK
from deployments.drill.watching import RunView, living, run_in
from opd_core.lifecycle.process import ProcessId, identify, is_running
from tests.teardown.stage import ROOT, START_LIMIT_S, Prefect, Stage, wait_until

RECIPE = "deployments/recipes/tiny.yaml"


class Door:
    """A process through which one run is started. ``mark`` is in the environment of all that comes
    of it."""

    name = ""

    def __init__(self, stage: Stage, folder: Path, prefect: Prefect | None = None) -> None:
        self.stage, self.folder = stage, folder
        self.prefect = prefect or stage.prefect
        self.mark = f"{MARK}={uuid4().hex}"
        self.log = folder / "door.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._flow: ProcessId | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The door itself."""
        assert self._process is not None, "not opened"
        return self._process

    @property
    def is_open(self) -> bool:
        """Whether it was opened, and nobody has ended it."""
        return self._process is not None and self._process.poll() is None

    def open(self, settings: Sequence[str]) -> None:
        """Start the run."""
        raise NotImplementedError

    def spawn(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        """Start the door's process."""
        own = environment or self.stage.environment_for(self.prefect, self.mark)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Tests that are run in the background inherit an ignored Ctrl-C.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def root(self) -> Path:
        """The run root of the one run."""
        return self.folder / "runs"

    def overrides(self, settings: Sequence[str]) -> list[str]:
        """The settings with the run root."""
        return [*settings, f"run.root={self.root}"]

    def await_run(self) -> RunView:
        """The run, once its supervisor watches it."""

        def begun() -> RunView | None:
            found = run_in(self.root)
            self.assert_lives()
            return found if found and found.events("run_started") else None

        run: RunView = wait_until(begun, "the run directory", START_LIMIT_S, pause_s=0.005)
        self._flow = identify(run.owner())
        return run

    def assert_lives(self) -> None:
        """The door is open and the flow runs, as long as nobody has ended them."""
        assert self.is_open, f"ended too early:\n{self.output()}"
        if self._flow is not None:
            assert is_running(self._flow), f"the flow ended too early:\n{self.output()}"

    def flow_is_gone(self) -> bool:
        """Whether the flow's process has ended; a worker collects it."""
        if self._flow is None:
            return not self.is_open
        return not is_running(self._flow)

    def strays(self) -> dict[int, str]:
        """What came of the door and lives, but for the door itself."""
        found = living(self.mark)
        return {pid: command for pid, command in found.items() if pid != self.process.pid}

    def output(self) -> str:
        """The end of what was printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])

    def close(self) -> None:
        """End whatever a failed cell has left."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        for pid in self.strays():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class CommandLine(Door):
    """``opd run``."""

    name = "command line"

    def open(self, settings: Sequence[str], *arguments: str) -> None:
        command = [sys.executable, "-m", "deployments.cli", "run", *(arguments or ["tiny"])]
        for setting in self.overrides(settings):
            command += ["--set", setting]
        self.spawn(command)


class Terminal(CommandLine):
    """``opd run`` in a terminal that can be closed."""

    name = "terminal"

    def spawn(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._master, slave = pty.openpty()

        def take_terminal() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=self.stage.environment_for(self.prefect, self.mark),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._copy, daemon=True)
        self._reader.start()

    def _copy(self) -> None:
        with self.log.open("ab") as log, contextlib.suppress(OSError):
            while chunk := os.read(self._master, 4096):
                log.write(chunk)
                log.flush()

    def close_terminal(self) -> None:
        """As its window's button does."""
        os.close(self._master)


class Script(Door):
    """A flow of the user's own; see ``own_flows``."""

    name = "script"

    def __init__(
        self, stage: Stage, folder: Path, mode: str = "plain", timeout_s: float = 0.0
    ) -> None:
        super().__init__(stage, folder)
        self._arguments = (mode, str(timeout_s))

    def open(self, settings: Sequence[str]) -> None:
        command = [sys.executable, "-m", "tests.teardown.own_flows", *self._arguments]
        self.spawn([*command, *self.overrides(settings)])


class Deployed(Door):
    """A run that a process takes from Prefect."""

    flow_run_id = ""

    def open(self, settings: Sequence[str]) -> None:
        deployment = self.serve()
        request = {"recipe_file": str(ROOT / RECIPE), "overrides": self.overrides(settings)}
        self.flow_run_id = self.prefect.start_run(deployment, request)

    def serve(self) -> str:
        """Start the process; the id of the deployment that it serves."""
        raise NotImplementedError


class Worker(Deployed):
    """``prefect worker start``, one process worker; it may serve one cell after another."""

    name = "process worker"

    def begin(self, folder: Path) -> None:
        """Serve another cell."""
        self.folder, self._flow = folder, None

    def serve(self) -> str:
        pool = "opd"
        deployment = self.prefect.deployment(f"distill-{pool}") or self.prefect.deploy(pool)
        if not self.is_open:
            command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool]
            self.spawn([*command, "--type", "process", "--name", uuid4().hex])
        return deployment


class Served(Deployed):
    """``python -m deployments.serve``."""

    name = "served"

    def serve(self) -> str:
        if earlier := self.prefect.deployment("distill"):
            # A killed runner's place in the deployment stays taken for five minutes.
            self.prefect.ask("DELETE", f"/deployments/{earlier}")
        self.spawn([sys.executable, "-m", "deployments.serve"])

        def ready() -> str | None:
            assert self.is_open, self.output()
            return self.prefect.deployment("distill") if "being served" in self.output() else None

        return str(wait_until(ready, "the served flow", START_LIMIT_S))


def skip_without_mounts(folder: Path, size: str) -> Callable[[], None]:
    """A small file system in ``folder``; what takes it away again."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")

    def unmount() -> None:
        for _ in range(20):
            if subprocess.run(["umount", str(folder)], check=False).returncode == 0:
                return
            time.sleep(0.5)
        pytest.fail(f"{folder} is still in use")

    return unmount
