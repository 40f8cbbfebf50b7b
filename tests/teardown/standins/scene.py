"""One cell from the test's side: the flow is started, led to its moment, ended, and searched for.

`acts.py` has the endings, `look.py` what is looked at.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import resource
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from opd_core.lifecycle.ledger import LEDGER_FILE
from opd_core.lifecycle.process import ProcessId, is_running, kill_exactly
from opd_core.lifecycle.registry import Registry
from tests.teardown.standins import servers
from tests.teardown.standins.flow import PATIENCE_S, Part, born
from tests.teardown.standins.look import is_locked, marked, ports_listened_at
from tests.teardown.standins.matrix import DEADLINE_S, SUPERVISOR_DIES, TEARDOWN, Ending

_REPOSITORY = Path(__file__).parents[3]
POLL_S = 0.01


class Scene:
    """One run, its worker and its files. `close` ends what a failed cell left."""

    def __init__(
        self, folder: Path, run_id: str, ports: tuple[int, ...], ending: Ending, moment: str
    ) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.run_id = run_id
        self.ports = ports
        self.ending = ending
        self.moment = moment
        self.registry = Registry(folder / "state" / "opd-lab" / "runs")
        self._worker: subprocess.Popen[bytes] | None = None
        self._terminal: int | None = None

    # --- the start

    def start(self) -> None:
        """Start the flow, and return when it is at its moment."""
        name = self.ending.name
        if name == "teacher deaf":
            (self.folder / servers.DEAF).touch()
        if name not in SUPERVISOR_DIES:
            (self.folder / servers.BARE).touch()
        flow = self._flow_command(
            Part(
                folder=str(self.folder),
                run_id=self.run_id,
                moment=self.moment,
                ports=self.ports,
                teardown_s=self.ending.teardown_s,
                margin_s=self.ending.margin_s,
                deadline_s=DEADLINE_S if name == "deadline" else None,
                handles_sigterm=name in ("cancel", "worker killed, guard"),
            )
        )
        if name == "terminal closed":
            self._start_in_terminal(flow)
        else:
            worker = str(Path(__file__).with_name("worker.py"))
            self._popen([sys.executable, "-I", "-S", worker, str(self.folder / "worker"), *flow])
        self.wait_for(self.folder / "at", "the flow to reach its moment")
        if self.moment == TEARDOWN:
            self.wait_for(self.folder / servers.HEARD, "the teardown to begin")

    def _flow_command(self, part: Part) -> list[str]:
        module = "tests.teardown.standins.flow"
        return [sys.executable, "-S", "-m", module, json.dumps(asdict(part))]

    def _start_in_terminal(self, command: list[str]) -> None:
        """As from a shell: the flow leads its session, and the terminal is its own."""
        self._terminal, slave = pty.openpty()

        def take_terminal() -> None:
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        self._popen(command, start_new_session=True, preexec_fn=take_terminal)
        os.close(slave)

    def _popen(
        self,
        command: list[str],
        start_new_session: bool = False,
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        places = {"XDG_STATE_HOME": self.folder / "state", "OPD_LEASES": self.folder / "leases"}
        environment = {**os.environ, **{name: str(place) for name, place in places.items()}}
        with (self.folder / "flow.log").open("wb") as log:
            self._worker = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=_REPOSITORY,
                env=environment,
                start_new_session=start_new_session,
                preexec_fn=preexec_fn,
            )

    def wait_for(self, path: Path, what: str) -> None:
        """Wait for a file; fail if it does not come or the flow is gone."""
        give_up_at = time.monotonic() + PATIENCE_S
        while not path.exists():
            if time.monotonic() > give_up_at or (self._worker and self._worker.poll() is not None):
                raise AssertionError(f"waited in vain for {what}; logs:\n{self.logs()}")
            time.sleep(POLL_S)

    # --- the end

    def order(self, what: str) -> None:
        """Tell the flow what to do, unless it is ending already and does not listen."""
        if self.moment != TEARDOWN:
            temporary = self.folder / "order.tmp"
            temporary.write_text(what)
            temporary.rename(self.folder / "order")

    def send(self, name: str, signum: signal.Signals) -> None:
        """Send a signal to one process of the run."""
        os.kill(self.born()[name].pid, signum)

    def signal_worker(self, signum: signal.Signals) -> None:
        assert self._worker is not None
        self.wait_for(self.folder / "worker", "the worker to be ready")
        self._worker.send_signal(signum)

    def close_terminal(self) -> None:
        assert self._terminal is not None
        os.close(self._terminal)
        self._terminal = None

    def leave_room(self, size: int) -> None:
        """No file of the supervisor may grow beyond this: to it, that is a full disk."""
        pid = self.born()["supervisor"].pid
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, most))

    # --- what is left

    def born(self) -> dict[str, ProcessId]:
        """Return every process that the run had, by name."""
        entries = [line.split() for line in born(self.folder)]
        found = {name: ProcessId(int(pid), int(ticks)) for name, pid, ticks in entries}
        supervisor = _recorded_supervisor(self.run_dir / LEDGER_FILE)
        return {**found, "supervisor": supervisor} if supervisor else found

    def left(self) -> list[str]:
        """Return what is left of the run, in words."""
        found = [f"process {name}" for name, each in self.born().items() if is_running(each)]
        found += [f"process {each.pid}, by its environment" for each in marked(self.run_id)]
        found += [f"port {port}" for port in sorted(set(self.ports) & ports_listened_at())]
        found += [f"folder {path.name}" for path in self.folder.glob("scratch-*")]
        found += [f"lock {path.name}" for path in self.locks() if is_locked(path)]
        return found + [f"registry entry {run.run_id}" for run in self.registry.runs()]

    def locks(self) -> list[Path]:
        """Return the files of the run's device locks."""
        return sorted((self.folder / "leases").glob("*.lock"))

    def held_locks(self) -> list[str]:
        """Return the names of the files that are locked now."""
        return [path.name for path in self.locks() if is_locked(path)]

    def await_nothing(self, give_up_at: float) -> list[str]:
        """Wait until nothing is left; return what still is at `give_up_at`."""
        while (left := self.left()) and time.monotonic() < give_up_at:
            time.sleep(POLL_S)
        return left

    def worker_status(self) -> int:
        """Return the exit status of the worker, or of the flow where it has none."""
        assert self._worker is not None
        return self._worker.wait(PATIENCE_S)

    def logs(self) -> str:
        """Return what the flow and the supervisor wrote."""
        files = (self.folder / "flow.log", self.run_dir / "supervisor.log")
        return "".join(
            f"--- {file.name}\n{file.read_text(errors='replace')}"
            for file in files
            if file.exists()
        )

    def close(self) -> None:
        """End everything that this cell started, after a failure too."""
        for process in (*self.born().values(), *marked(self.run_id)):
            kill_exactly(process)
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait()
        if self._terminal is not None:
            os.close(self._terminal)


def _recorded_supervisor(ledger: Path) -> ProcessId | None:
    """The first run's supervisor, from the ledger's first line."""
    try:
        first = json.loads(ledger.read_bytes().partition(b"\n")[0])
    except (OSError, ValueError):
        return None
    return ProcessId(first["supervisor_pid"], first["supervisor_start_ticks"])
