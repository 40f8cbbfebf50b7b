"""What all cells on the real stack share: a Prefect server, foreign processes, an environment."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from opd_core.lifecycle.ports import reserve_ports

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 240.0
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def wait_until(
    condition: Callable[[], Any], what: str, seconds: float, pause_s: float = 0.1
) -> Any:
    """The first truthy value of ``condition``; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        if found := condition():
            return found
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:g} s in vain for {what}")
        time.sleep(pause_s)


class Prefect:
    """A real Prefect server on SQLite, at one port for life; it may be killed and started again."""

    def __init__(self, home: Path) -> None:
        self._home = home
        with reserve_ports(1) as reserved:
            self._port = reserved.ports[0]
        self.url = f"http://127.0.0.1:{self._port}/api"
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx.Client(base_url=self.url, trust_env=False, timeout=30.0)

    def start(self) -> None:
        """Return once it answers."""
        self._home.mkdir(exist_ok=True, parents=True)
        environment = {**os.environ, "PREFECT_HOME": str(self._home)}
        environment["PREFECT_SERVER_ANALYTICS_ENABLED"] = "0"
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1"]
        with (self._home / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self._port)],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(self._answers, "the Prefect server", START_LIMIT_S)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._home / "server.log").read_text()
        with contextlib.suppress(httpx.TransportError):
            return self._client.get("/health").status_code == 200
        return False

    def kill(self) -> None:
        """SIGKILL to all of it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """End it for good."""
        self.kill()
        self._client.close()

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """One request; its JSON. SQLite may be busy for a moment."""
        for _ in range(5):
            answer = self._client.request(method, path, json=body)
            if answer.status_code != 503:
                break
            time.sleep(1)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def state_of(self, flow_run_id: str) -> str:
        """The type of a flow run's state."""
        return str(self.ask("GET", f"/flow_runs/{flow_run_id}")["state"]["type"])

    def cancel(self, flow_run_id: str) -> None:
        """Ask for it as the UI does."""
        body = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
        self.ask("POST", f"/flow_runs/{flow_run_id}/set_state", body)

    def deploy(self, pool: str) -> str:
        """A deployment of ``distill`` for a process work pool; its id."""
        self.ask("POST", "/work_pools/", {"name": pool, "type": "process"})
        flow_id = self.ask("POST", "/flows/", {"name": "distill"})["id"]
        step = {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}
        deployment = {
            "name": f"distill-{pool}",
            "flow_id": flow_id,
            "entrypoint": "flows/distill.py:distill",
            "work_pool_name": pool,
            "pull_steps": [step],
        }
        return str(self.ask("POST", "/deployments/", deployment)["id"])

    def deployment(self, name: str) -> str | None:
        """The id of ``distill/NAME``, once it is there."""
        answer = self._client.get(f"/deployments/name/distill/{name}")
        return str(answer.json()["id"]) if answer.status_code == 200 else None

    def start_run(self, deployment_id: str, request: dict[str, Any]) -> str:
        """A flow run of a deployment; its id."""
        body = {"parameters": {"request": request}, "state": {"type": "SCHEDULED"}}
        run = self.ask("POST", f"/deployments/{deployment_id}/create_flow_run", body)
        return str(run["id"])


@dataclass
class Foreigners:
    """Processes that no run started, and that no ending may touch."""

    http: subprocess.Popen[bytes]
    port: int
    ray: subprocess.Popen[bytes]
    jobs: Any

    def assert_alive(self) -> None:
        """Both run, and answer."""
        assert self.http.poll() is None, "the foreign HTTP server was ended"
        assert httpx.get(f"http://127.0.0.1:{self.port}/", trust_env=False).status_code == 200
        assert self.ray.poll() is None, "the foreign Ray cluster was ended"
        assert self.jobs.list_jobs() == []


@contextmanager
def foreigners(folder: Path) -> Iterator[Foreigners]:
    """A plain HTTP server and a Ray cluster."""
    from opd_core.recipe import load_recipe
    from opd_core.training.head import PORT_FLAGS, head_command, write_token
    from opd_core.training.jobs import connect_jobs

    temp_dir = Path(tempfile.mkdtemp(prefix="foreign-"))
    token = write_token(temp_dir / "token")
    with reserve_ports(len(PORT_FLAGS) + 1) as reserved:
        port, *ray_ports = reserved.ports
    recipe = load_recipe(str(ROOT / "deployments" / "recipes" / "tiny.yaml"))
    head = head_command(recipe, tuple(ray_ports), temp_dir, temp_dir / "token")
    server = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    with (folder / "foreign.log").open("wb") as log:
        http = subprocess.Popen(server, cwd=folder, stdout=log, stderr=log)
        ray = subprocess.Popen(head.argv, env={**os.environ, **head.env}, stdout=log, stderr=log)

    def still_alive() -> None:
        assert ray.poll() is None, (folder / "foreign.log").read_text()

    try:
        jobs = connect_jobs(head.dashboard, token, limit_s=120, still_alive=still_alive)
        yield Foreigners(http, port, ray, jobs)
    finally:
        for process in (http, ray):
            process.terminate()
            try:
                process.wait(timeout=60)
            finally:
                process.kill()
        shutil.rmtree(temp_dir, ignore_errors=True)


@dataclass
class Stage:
    """Where cells are played. ``folder`` is short-lived and on a disk with room."""

    folder: Path
    prefect: Prefect
    foreigners: Foreigners
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def registry(self) -> Path:
        """Where unfinished runs stand."""
        return Path(self.environment["XDG_STATE_HOME"]) / "opd-lab" / "runs"

    def environment_for(self, prefect: Prefect, mark: str) -> dict[str, str]:
        """Of everything that one cell starts."""
        name, _, value = mark.partition("=")
        return {**self.environment, "PREFECT_API_URL": prefect.url, name: value}

    def reap(self, prefect: Prefect) -> str:
        """``opd reap``, as a user calls it; what it says."""
        done = subprocess.run(
            [sys.executable, "-m", "deployments.cli", "reap"],
            cwd=ROOT,
            env={**self.environment_for(prefect, "OPD_DRILL=reap"), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


def environment_in(folder: Path) -> dict[str, str]:
    """The environment of runs whose state, leases and profile are the tests' own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "OPD_"))}
    return {
        **kept,
        "XDG_STATE_HOME": str(folder / "state"),
        "OPD_LEASES": str(folder / "leases"),
        "PREFECT_HOME": str(folder / "profile"),
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_RUNNER_POLL_FREQUENCY": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
