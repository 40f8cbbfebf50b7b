"""One drill: start a cheap run, wait for the moment, end it, look what is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from deployments.drill.catalogue import QUICK, Ending, Moment
from deployments.drill.resuming import resumes_from, why_not_resumable
from deployments.drill.striking import DrillError, strike
from deployments.drill.watching import Leftovers, RunView, living, run_in, wait_for
from opd_core.lifecycle.records import Receipt

START_LIMIT_S = 600.0
RECOVERY_LIMIT_S = 300.0
SETTLE_LIMIT_S = 180.0
"""Beside the run's own teardown: for the final states in Prefect and MLflow."""
TEARDOWN_S = 60.0
STEPS_AFTER = 3
"""Train steps that prove a recovery: what was under way at the blow may still be told."""
LOOK_PAUSE_S = 0.005
MARK = "OPD_DRILL"
"""In the environment of all that a drill starts, directly or not."""

Tell = Callable[[str], None]


@dataclass(slots=True)
class DrillReport:
    """What a drill came to. ``timeline`` holds what happened and after how many seconds."""

    ending: str
    moment: str
    run_directory: str = ""
    timeline: list[tuple[float, str]] = field(default_factory=list)
    receipt: Receipt | None = None
    left: Leftovers = field(default_factory=Leftovers)
    settled: bool = False
    exit_status: int | None = None
    not_resumable: str = ""
    resumes_from: int = 0

    @property
    def clean(self) -> bool:
        """Whether nothing is left, everything is written, and the run can go on."""
        ended = self.receipt is not None and self.receipt.clean and self.settled
        return ended and self.left.none and not self.not_resumable

    def to_json(self) -> dict[str, Any]:
        """All of it, with the verdict."""
        return {**asdict(self), "clean": self.clean}


class Drill:
    """A drill under way; ``folder`` is its own, and holds everything of it."""

    def __init__(self, ending: Ending, moment: Moment, folder: Path, tell: Tell) -> None:
        self.report = DrillReport(ending.name, moment.name)
        self._ending, self._moment, self._folder, self._tell = ending, moment, folder, tell
        self._began = time.monotonic()
        self._mark = f"{MARK}={uuid4().hex}"
        self._process: subprocess.Popen[bytes]

    def hold(self, recipe: str, overrides: Sequence[str]) -> DrillReport:
        """All of it. Raises :class:`DrillError` if the run does not come to its moment."""
        with self._running(recipe, overrides):
            run = self._await_moment()
            self.report.run_directory = str(run.directory)
            steps = run.trained_steps()
            strike(self._ending.name, run)
            self._note(f"{self._ending.name}: {self._ending.meaning}")
            if self._ending.survived:
                self._await_recovery(run, steps)
                os.kill(run.owner(), signal.SIGINT)
                self._note("the run goes on, as it should; now SIGINT ends it")
            self._await_end(run)
        self._judge(run)
        return self.report

    @contextmanager
    def _running(self, recipe: str, overrides: Sequence[str]) -> Iterator[None]:
        command = [sys.executable, "-m", "deployments.cli", "run", recipe]
        settings = (*QUICK, *self._moment.settings, *self._ending.settings)
        for setting in (*settings, f"run.root={self._folder / 'runs'}", *overrides):
            command += ["--set", setting]
        with (self._folder / "output.log").open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A drill in the background of a shell has Ctrl-C ignored, and would hand that on.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        self._note(f"started: opd run {recipe}")
        try:
            yield
        finally:
            if self._process.poll() is None:  # the supervisor then ends the rest
                self._process.kill()
                self._process.wait()

    def environment(self) -> dict[str, str]:
        """Of the run, and of what ends it: with a list of unfinished runs that is the drill's
        own."""
        name, _, value = self._mark.partition("=")
        return {**os.environ, name: value, "XDG_STATE_HOME": str(self._folder / "state")}

    def _await_moment(self) -> RunView:
        root = self._folder / "runs"
        run = self._wait(lambda: run_in(root), "run directory")
        self._note("run directory made")
        if self._ending.name != "deadline":
            moment = self._moment.name
            self._wait(partial(run.reached, moment), f"moment {moment!r}", LOOK_PAUSE_S)
            self._note(f"{self._moment.name}: {self._moment.meaning}")
        found: RunView = run
        return found

    def _await_recovery(self, run: RunView, steps: int) -> None:
        def recovered() -> bool:
            return run.trained_steps() >= steps + STEPS_AFTER

        if not wait_for(recovered, RECOVERY_LIMIT_S, in_vain=self._has_ended):
            raise DrillError(f"the run did not recover:\n{self.output()}")

    def _await_end(self, run: RunView) -> None:
        """Note what happens until nothing more is to come."""
        signs: dict[str, Callable[[], Any]] = {
            "teardown begun": lambda: run.events("teardown_begun"),
            "flow process gone": self._has_ended,
            "receipt written": run.receipt,
            "nothing of it is left": lambda: run.leftovers().none,
            "final states written": lambda: self._settled(run),
        }
        if self._ending.name == "kill-both":
            self._process.wait()
            self._reap()
        limit_s = START_LIMIT_S if self._ending.name == "deadline" else TEARDOWN_S + SETTLE_LIMIT_S
        give_up_at = time.monotonic() + limit_s
        while signs and time.monotonic() < give_up_at:
            for sign in [sign for sign, is_there in signs.items() if is_there()]:
                self._note(sign)
                del signs[sign]
            time.sleep(0.1)

    def _has_ended(self) -> bool:
        return self._process.poll() is not None

    def _settled(self, run: RunView) -> bool:
        """Nobody has anything to write any more: no entry in the list, no process of the drill."""
        entry = self._folder / "state" / "opd-lab" / "runs" / f"{run.run_id}.json"
        return run.receipt() is not None and not entry.exists() and not living(self._mark)

    def _reap(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "deployments.cli", "reap"],
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        self._note(f"opd reap, status {done.returncode}")

    def _judge(self, run: RunView) -> None:
        report = self.report
        report.exit_status = self._process.returncode
        report.receipt = run.receipt()
        left = run.leftovers()
        strays = tuple(f"{pid} {command}" for pid, command in living(self._mark).items())
        report.left = Leftovers((*left.processes, *strays), left.ports, left.folders)
        report.settled = self._settled(run)
        report.not_resumable = why_not_resumable(run.directory)
        report.resumes_from = resumes_from(run.directory)

    def _wait(self, condition: Callable[[], Any], what: str, pause_s: float = 0.1) -> Any:
        found = wait_for(condition, START_LIMIT_S, pause_s=pause_s, in_vain=self._has_ended)
        if not found:
            raise DrillError(f"the run did not come to its {what}:\n{self.output()}")
        return found

    def output(self) -> str:
        """The last lines that the run has printed."""
        lines = (self._folder / "output.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-30:])

    def _note(self, what: str) -> None:
        seconds = round(time.monotonic() - self._began, 1)
        self.report.timeline.append((seconds, what))
        self._tell(f"{seconds:7.1f} s  {what}")


def hold_drill(
    ending: Ending, moment: Moment, recipe: str, overrides: Sequence[str], tell: Tell
) -> DrillReport:
    """A drill in a folder of its own, which stays only if something went wrong.

    Raises :class:`DrillError`.
    """
    folder = Path(tempfile.mkdtemp(prefix="opd-drill-"))
    drill = Drill(ending, moment, folder, tell)
    try:
        report = drill.hold(recipe, overrides)
    except BaseException:
        tell(f"everything about this drill is in {folder}")
        raise
    if report.clean:
        shutil.rmtree(folder, ignore_errors=True)
    return report
