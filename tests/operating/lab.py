"""A lab of its own: ``opd up`` as a user starts it, with ports, folders and databases of its
own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Scheduled

from deployments.up import READY
from opd_core.lifecycle.ports import reserve_ports
from opd_core.lifecycle.process import carries, process_table
from tests.teardown.stage import wait_until

PROJECT = Path(__file__).parents[2]
START_LIMIT_S = 240.0
STOP_LIMIT_S = 280.0
FINAL = ("Completed", "Failed", "Crashed", "Cancelled", "TimedOut")
NOT_INHERITED = ("PREFECT_", "MLFLOW_", "OPD_RUNS", "OPD_RUN_")


class Lab:
    """One ``opd up``. ``environment`` is added to this process's."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None) -> None:
        with reserve_ports(2) as reserved:
            self.port, self.mlflow_port = reserved.ports
        self.folder, self.root = folder, folder / "runs"
        self.log = folder / "opd-up.log"
        """What the command prints; the servers' logs are in ``root / "opd-up"``."""
        self.ui_url = f"http://127.0.0.1:{self.port}"
        self.api_url = f"{self.ui_url}/api"
        self.mlflow_url = f"http://127.0.0.1:{self.mlflow_port}"
        self._own = {
            **{key: value for key, value in os.environ.items() if not _is_foreign(key)},
            "PREFECT_HOME": str(folder / "prefect"),
            "XDG_STATE_HOME": str(folder / "state"),
            "OPD_LEASES": str(folder / "leases"),
            "OPD_RUNS": str(self.root),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """For further commands that are to use this lab's servers and runs."""
        return {
            **self._own,
            "PREFECT_API_URL": self.api_url,
            "MLFLOW_TRACKING_URI": self.mlflow_url,
        }

    def start(self, *arguments: str) -> None:
        """Return when runs can be started; ``arguments`` are further ones of the command line, such
        as ``--at-once 2``. It may be started again after a stop."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        command = [sys.executable, "-m", "deployments.cli", "up", *arguments]
        command += ["--port", str(self.port), "--mlflow-port", str(self.mlflow_port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=PROJECT,
                env=self._own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_until(self._is_up, "opd up", START_LIMIT_S)

    def _is_up(self) -> bool:
        assert self.process is not None
        said = self.log.read_text()
        assert self.process.poll() is None, said
        return READY in said

    def stop(self, signum: signal.Signals = signal.SIGINT) -> int:
        """Stop it as Ctrl-C does; the exit status. A second call does nothing."""
        if self.process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signum)
        try:
            return self.process.wait(STOP_LIMIT_S)
        finally:
            self.process.kill()
            self.process = None

    @contextmanager
    def client(self) -> Iterator[SyncPrefectClient]:
        """Prefect's client for this lab's server."""
        with (
            temporary_settings({PREFECT_API_URL: self.api_url}),
            get_client(sync_client=True) as client,
        ):
            yield client

    def deployment_id(self, name: str) -> UUID:
        """Of ``distill``, ``compare`` …, which is short for ``distill/distill``."""
        with self.client() as client:
            full_name = name if "/" in name else f"{name}/{name}"
            return client.read_deployment_by_name(full_name).id

    def start_run(self, deployment: str, request: dict[str, Any] | None = None) -> str:
        """Start a flow run of a deployment, as the form does; its id. ``request`` is what the form
        holds, None where a flow has no request."""
        parameters = {} if request is None else {"request": request}
        deployment_id = self.deployment_id(deployment)
        with self.client() as client:
            run = client.create_flow_run_from_deployment(
                deployment_id, parameters=parameters, state=Scheduled()
            )
        return str(run.id)

    def run(self, flow_run_id: str) -> FlowRun:
        """All that Prefect knows of a flow run."""
        with self.client() as client:
            return client.read_flow_run(UUID(flow_run_id))

    def state(self, flow_run_id: str) -> str:
        """The name of a flow run's state, such as ``AwaitingConcurrencySlot``."""
        state = self.run(flow_run_id).state
        return state.name or "" if state is not None else ""

    def wait_for(self, flow_run_id: str, *names: str, within_s: float = 400.0) -> str:
        """Return the state's name once it is one of ``names`` (if none is named: a final one).

        Fails after ``within_s``, and at once in a final state that is not among them.
        """
        wanted: Sequence[str] = names or FINAL

        def reached() -> str | None:
            state = self.run(flow_run_id).state
            name = state.name or "" if state is not None else ""
            if state is not None and name in FINAL and name not in wanted:
                pytest.fail(f"expected {wanted}, got {name}: {state.message}\n{self.said()}")
            return name if name in wanted else None

        found = wait_until(reached, f"{wanted} of {flow_run_id}", within_s)
        assert found is not None
        return found

    def ask_mlflow(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One request to MLflow's REST API: ``runs/search`` …; GET where there is no body."""
        url = f"{self.mlflow_url}/api/2.0/mlflow/{path}"
        answer = httpx.request("GET" if body is None else "POST", url, json=body, timeout=30)
        answer.raise_for_status()
        return dict(answer.json())

    def left(self) -> dict[int, str]:
        """Every process that came of this lab and runs, by pid."""
        mark = f"PREFECT_HOME={self._own['PREFECT_HOME']}".encode()
        table = process_table().values()
        marked = [stat.pid for stat in table if stat.running and carries(stat.pid, [mark])]
        return {pid: _command(pid) for pid in marked}

    def said(self) -> str:
        """The ends of all logs, for a failure's message."""
        logs = [self.log, *sorted((self.root / "opd-up").glob("*.log"))]
        return "\n".join(f"== {log.name}\n" + "\n".join(_tail(log)) for log in logs)


def _is_foreign(variable: str) -> bool:
    return variable.startswith(NOT_INHERITED)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def _tail(log: Path, lines: int = 40) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-lines:] if log.exists() else []
