"""What ``opd up`` starts: a Prefect server, an MLflow server, a worker."""

from __future__ import annotations

import hashlib
import http.client
import os
import platform
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_DATABASE_CONNECTION_URL,
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_SERVER_API_AUTH_STRING,
    temporary_settings,
)

from deployments.registering import POOL, last_heartbeat, register
from opd_core.errors import ConfigError, ServingError
from opd_core.lifecycle.handle import Supervisor
from opd_core.lifecycle.locks import lock_now
from opd_core.lifecycle.logs import log_tail
from opd_core.lifecycle.ports import LOOPBACK, port_is_free
from opd_core.lifecycle.records import ChildSpec
from opd_core.tracking.mlflow_sink import SQLITE, artifact_root
from opd_core.tracking.shipper import without_credentials

START_LIMIT_S = 180.0
POLL_S = 0.3
RUNS_MAY_TAKE_S = 200.0
"""The worker's time to stop: runs under way end, and their final states are written."""
TALKATIVE = {"PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO"}
"""The command line has Prefect be quiet; a server's log is there to be read."""
LEASES_IN_FILES = "prefect.server.concurrency.lease_storage.filesystem"
"""By default a server that is started again has forgotten who holds a deployment's slots: they
would never be free again."""
SERVER_MAY_TAKE_S = 15.0
SECOND_LAB = (
    "A second lab needs --root, --port, --mlflow-port and a PREFECT_HOME of its own; a second "
    "worker of the same lab needs --root and PREFECT_API_URL at the first one's server"
)
LOCK_FILE = "opd-up.lock"
"""In PREFECT_HOME, locked while an own server uses the SQLite database there."""


@dataclass(frozen=True)
class Server:
    """A server's address. ``own``: it is to be started here."""

    url: str
    own: bool

    @classmethod
    def find(cls, named: str | None, own: str, variable: str, flag: str) -> Self:
        """The one that the environment's ``variable`` names, if any; else an own one.

        Raises :class:`ConfigError` if no healthy server answers there, or somebody has the own
        one's port.
        """
        if named:
            named = named.rstrip("/")
            answer = _answer_of_named(named, variable)
            if answer == HTTPStatus.OK:
                return cls(named, own=False)
            if answer is not None or named != own:
                came = f"its /health answers {answer}: have it answer 200 without a login"
                if answer is None:
                    came = "nobody answers: start it"
                raise ConfigError(
                    f"expected a server at {without_credentials(named)}, which {variable} names, "
                    f"{came}, or unset {variable}, and `opd up` starts one of its own"
                )
        port = int(own.removesuffix("/api").rpartition(":")[2])
        if not port_is_free(port):
            raise ConfigError(
                f"expected port {port} to be free, another program listens there: choose another "
                f"one with {flag}, or set {variable}={own} if it is the server to use"
            )
        return cls(own, own=True)


@dataclass(frozen=True)
class LocalServers:
    """What is to be started, and where. ``store`` is the SQLite file of an own MLflow server, the
    one that runs use without a server; ``root`` holds the runs, ``logs`` what the servers say."""

    prefect: Server
    mlflow: Server
    store: str
    root: Path
    logs: Path

    @classmethod
    def plan(cls, port: int, mlflow_port: int, root: Path, logs: Path) -> Self:
        """Raises :class:`ConfigError`; starts nothing."""
        tracking = os.environ.get("MLFLOW_TRACKING_URI", "")
        own_api, own_mlflow = f"http://{LOOPBACK}:{port}/api", f"http://{LOOPBACK}:{mlflow_port}"
        file = tracking if tracking.startswith(SQLITE) else ""
        servers = cls(
            Server.find(PREFECT_API_URL.value(), own_api, "PREFECT_API_URL", "--port"),
            Server.find(
                None if file else tracking, own_mlflow, "MLFLOW_TRACKING_URI", "--mlflow-port"
            ),
            file or f"{SQLITE}{root / 'mlflow.db'}",
            root,
            logs,
        )
        if servers.prefect.own and servers.mlflow.own and port == mlflow_port:
            raise ConfigError(
                f"expected two ports, --port and --mlflow-port are both {port}: choose another one"
            )
        return servers

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep a second `opd up` from starting a second server over the same SQLite database.

        Raises :class:`ConfigError` while there is one already. Another kind of database is its
        administrator's to share.
        """
        database = PREFECT_API_DATABASE_CONNECTION_URL.value() or ""
        if not self.prefect.own or not database.startswith("sqlite"):
            yield
            return
        home = Path(PREFECT_HOME.value())
        home.mkdir(parents=True, exist_ok=True)
        with (home / LOCK_FILE).open("wb") as lock:
            if not lock_now(lock.fileno()):
                raise ConfigError(
                    f"expected one `opd up` with a server of its own for PREFECT_HOME={home}, "
                    f"another is there already: use or stop it. {SECOND_LAB}"
                )
            yield

    @property
    def worker_name(self) -> str:
        """One per host and root: a worker that is started again is the same in the UI, and no other
        worker of the pool has its name."""
        digest = hashlib.sha256(str(self.root).encode()).hexdigest()[:6]
        return f"opd-up-{platform.node()}-{digest}"

    def start(self, supervisor: Supervisor, at_once: int, tell: Callable[[str], None]) -> None:
        """Start all of it; return when runs can be started. Raises :class:`ServingError`."""
        tell("starting, which takes about half a minute")
        specs = [self._prefect_server()] if self.prefect.own else []
        specs += [self._mlflow_server()] if self.mlflow.own else []
        for spec in specs:
            supervisor.spawn(spec)
        auth = PREFECT_API_AUTH_STRING.value() or PREFECT_SERVER_API_AUTH_STRING.value()
        own = {PREFECT_API_URL: self.prefect.url, PREFECT_API_AUTH_STRING: auth}
        with temporary_settings(own):
            _await(supervisor, lambda: answers(f"{self.prefect.url}/health"), "the Prefect server")
            names = self._register(at_once)
            _await(supervisor, lambda: answers(f"{self.mlflow.url}/health"), "MLflow")
            heard = last_heartbeat(self.worker_name)
            supervisor.spawn(self._worker(auth or ""))
            _await(supervisor, lambda: last_heartbeat(self.worker_name) != heard, "the worker")
        self._tell_where(names, at_once, tell)

    def _register(self, at_once: int) -> list[str]:
        try:
            return register(at_once, Path.cwd())
        except PrefectHTTPStatusError as error:
            raise ServingError(
                f"the Prefect server at {without_credentials(self.prefect.url)} refused the "
                f"deployments: {str(error)[:400]} …; where it asks for a login, set "
                "PREFECT_API_AUTH_STRING"
            ) from None

    def _tell_where(self, names: list[str], at_once: int, tell: Callable[[str], None]) -> None:
        page = f"{without_credentials(self.prefect.url).removesuffix('/api')}"
        running = "" if self.prefect.own else "  (runs already: left as it is)"
        tell(f"Prefect  {page}{running}\n         {', '.join(names)}")
        running = "" if self.mlflow.own else "  (runs already: left as it is)"
        tell(f"MLflow   {without_credentials(self.mlflow.url)}{running}")
        tell(f"runs     {self.root}; the servers' logs are in {self.logs}")
        waits = "further ones wait" if at_once == 1 else "as far as devices are free"
        tell(f"at once  {at_once} experiment{'s' if at_once > 1 else ''}; {waits}")

    def _prefect_server(self) -> ChildSpec:
        port = self.prefect.url.removesuffix("/api").rpartition(":")[2]
        return ChildSpec(
            name="prefect-server",
            kind="server",
            argv=_program("prefect", "server", "start", "--host", LOOPBACK, "--port", port),
            cwd=Path.cwd(),
            log=self.logs / "prefect-server.log",
            env={
                "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASES_IN_FILES,
                "PREFECT_UI_URL": f"http://{LOOPBACK}:{port}",  # for links in notifications
                "PREFECT_SERVER_UI_API_URL": "/api",  # else its pages ask port 4200
                "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
                **TALKATIVE,
            },
            grace_s=SERVER_MAY_TAKE_S,
            stop_order=2,
            ports=(int(port),),
        )

    def _mlflow_server(self) -> ChildSpec:
        """Artifacts are read and written in place, so that they are found with and without it."""
        port = self.mlflow.url.rpartition(":")[2]
        serve = ("--backend-store-uri", self.store, "--workers", "1", "--no-serve-artifacts")
        return ChildSpec(
            name="mlflow",
            kind="server",
            argv=(
                *_program("mlflow", "server", "--host", LOOPBACK, "--port", port, *serve),
                *("--default-artifact-root", str(artifact_root(self.store))),
            ),
            cwd=Path.cwd(),
            log=self.logs / "mlflow.log",
            # Its job runner would be eight more processes that nothing here uses.
            env={"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            grace_s=SERVER_MAY_TAKE_S,
            stop_order=1,
            ports=(int(port),),
        )

    def _worker(self, auth: str) -> ChildSpec:
        """A worker whose runs use these servers and this root."""
        worker = _program("prefect", "worker", "start", "--pool", POOL, "--type", "process")
        env = {
            "PREFECT_API_URL": self.prefect.url,
            "MLFLOW_TRACKING_URI": self.mlflow.url,
            "OPD_RUNS": str(self.root),
            **TALKATIVE,
            "PREFECT_WORKER_QUERY_SECONDS": os.environ.get("PREFECT_WORKER_QUERY_SECONDS", "3"),
        }
        return ChildSpec(
            name="worker",
            kind="worker",
            argv=_program("deployments.worker", *worker, "--name", self.worker_name),
            cwd=Path.cwd(),
            log=self.logs / "worker.log",
            env={**env, **({"PREFECT_API_AUTH_STRING": auth} if auth else {})},
            grace_s=RUNS_MAY_TAKE_S,
        )


def answers(url: str) -> bool:
    """Whether somebody answers this address with a success."""
    return _status(url) == HTTPStatus.OK


def _answer_of_named(url: str, variable: str) -> int | None:
    """The status of its health, None where nobody answers. Raises :class:`ConfigError` for what is
    no server's address."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(
            f"expected the http address of a server in {variable}, got "
            f"{without_credentials(url)!r}: name one, or unset {variable}, and `opd up` starts one "
            "of its own"
        )
    return _status(f"{url}/health")


def _status(url: str) -> int | None:
    """The HTTP status with which somebody answers, None where nobody does."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(without_credentials(url), timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError, http.client.HTTPException):
        return None


def _program(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)


def _await(supervisor: Supervisor, ready: Callable[[], bool], who: str) -> None:
    """Raises :class:`ServingError` if it takes too long, a lifecycle error if a child has died."""
    deadline = time.monotonic() + START_LIMIT_S
    while not ready():
        supervisor.raise_if_dead()
        if time.monotonic() > deadline:
            tails = "\n".join(log_tail(log, 10) for log in sorted(supervisor.run_dir.glob("*.log")))
            raise ServingError(
                f"expected {who} to be ready within {START_LIMIT_S:g} s, it is not; read the logs "
                f"in {supervisor.run_dir}. Their last lines:\n{tails}"
            )
        time.sleep(POLL_S)
