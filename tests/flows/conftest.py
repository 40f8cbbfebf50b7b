"""Whole runs, started the way a user starts them: the ``opd`` command in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deployments.drill.watching import living
from tests.teardown.stage import Prefect

ROOT = Path(__file__).parents[2]
WAIT_S = 240.0


@dataclass
class OpdRun:
    """One ``opd run`` process and the run directory that it makes."""

    process: subprocess.Popen[str]
    home: Path
    root: Path
    log: Path

    def directory(self) -> Path:
        """The run directory, once it is there."""
        return self.wait_for(lambda: next(iter(self.root.glob("tiny-*/")), None), "run directory")

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait for a truthy value; fail with the process's output if it ends before."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if found := condition():
                return found
            if self.process.poll() is not None and not condition():
                pytest.fail(f"ended ({self.process.returncode}) before {what}:\n{self.output()}")
            time.sleep(0.1)
        pytest.fail(f"no {what} after {WAIT_S:.0f} s:\n{self.output()}")

    def journal(self) -> list[dict[str, Any]]:
        """The records written so far."""
        path = self.directory() / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def trained_steps(self) -> int:
        """Train steps in the journal."""
        return sum("time/step_s" in record["metrics"] for record in self.journal())

    def finish(self) -> int:
        """The exit status, once it has ended."""
        return self.process.wait(timeout=WAIT_S)

    def output(self) -> str:
        """All that it has printed."""
        return self.log.read_text()

    def json_file(self, name: str) -> dict[str, Any]:
        """A JSON file of the run directory."""
        return dict(json.loads((self.directory() / name).read_text()))

    def pids_of(self, child: str) -> list[int]:
        """Process ids of all processes of that name which the run has started, the last one
        last."""
        ledger = (self.directory() / "ledger.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in ledger]
        return [e["pid"] for e in entries if e["event"] == "child_started" and e["name"] == child]

    def processes(self) -> list[int]:
        """Living processes that carry the run's mark in their environment."""
        return list(living(f"OPD_RUN_ID={self.directory().name}"))

    def strays(self) -> list[int]:
        """Living processes that were started by the command or by what it started."""
        return [pid for pid in living(f"PREFECT_HOME={self.home}") if pid != self.process.pid]


def wait_until(condition: Callable[[], Any], what: str, seconds: float = WAIT_S) -> None:
    """Wait for a truthy value, or fail."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


@pytest.fixture
def opd(tmp_path: Path, prefect_api: str) -> Iterator[Callable[..., OpdRun]]:
    """Starts ``opd run tiny`` with overrides, or with other ``arguments``, or a ``script`` that
    gets the overrides; whatever still runs at the end is killed."""
    runs: list[OpdRun] = []

    def start(
        *overrides: str,
        api: str | None = prefect_api,
        recipe: str = "tiny",
        arguments: tuple[str, ...] = (),
        script: str = "",
    ) -> OpdRun:
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")},
            "PREFECT_HOME": str(tmp_path / "prefect"),
            "OMP_NUM_THREADS": "1",
            **({"PREFECT_API_URL": api} if api else {}),
        }
        command = [sys.executable, "-m", "deployments.cli", "run", "--json"]
        command = [sys.executable, "-c", script] if script else [*command, *(arguments or [recipe])]
        for override in (f"run.root={tmp_path / 'runs'}", *overrides):
            command += [override] if script else ["--set", override]
        log = tmp_path / f"opd-{len(runs)}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                # Tests that are run in the background inherit an ignored Ctrl-C.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        runs.append(OpdRun(process, tmp_path / "prefect", tmp_path / "runs", log))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGKILL)
            run.process.wait(timeout=30)
            wait_until(lambda run=run: not run.strays(), "the supervisor to end the run", 90)


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Prefect server on SQLite, for all runs of the session."""
    server = Prefect(tmp_path_factory.mktemp("prefect-server"))
    try:
        server.start()
        yield server.url
    finally:
        server.close()
