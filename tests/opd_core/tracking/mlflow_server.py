"""A real MLflow server in processes of its own, which can be killed, put to sleep and started
again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from opd_core.lifecycle.ports import reserve_ports

START_S = 120.0


def _free_port() -> int:
    with reserve_ports(1) as reserved:
        return reserved.ports[0]


@dataclass
class MlflowServer:
    """SQLite and artifacts in ``folder``, always the same port."""

    folder: Path
    port: int = field(default_factory=_free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.folder / "server.log").read_text()

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.folder / 'mlflow.db'}"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, **quiet, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self.process.poll() is None, f"it ended:\n{self.log}"
            assert time.monotonic() < deadline, f"it does not answer:\n{self.log}"
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL for all of it."""
        if self.process is not None:
            self._send(signal.SIGKILL)
            self.process.wait(30)
            self.process = None

    def sleep(self) -> None:
        """From now on it accepts connections and answers nothing."""
        self._send(signal.SIGSTOP)

    def wake(self) -> None:
        """It goes on, with all that was asked meanwhile."""
        self._send(signal.SIGCONT)

    def _send(self, sent: signal.Signals) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, sent)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False
