"""Where ``opd up`` finds a server, or the room for one of its own."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import (
    PREFECT_API_DATABASE_CONNECTION_URL,
    PREFECT_API_URL,
    PREFECT_HOME,
    temporary_settings,
)

from deployments.local_servers import LocalServers, Server
from opd_core.errors import ConfigError
from opd_core.lifecycle.ports import reserve_ports


class Healthy(http.server.BaseHTTPRequestHandler):
    """Answers ``/health``, and nothing else."""

    def do_GET(self) -> None:
        self.send_response({"/health": 200, "/private/health": 401}.get(self.path, 404))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


@pytest.fixture
def running() -> Iterator[str]:
    """The address of a server that is healthy."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def free() -> str:
    """An address at which nobody listens."""
    with reserve_ports(1) as reserved:
        return f"http://127.0.0.1:{reserved.ports[0]}"


def find(named: str | None, own: str) -> Server:
    return Server.find(named, own, "PREFECT_API_URL", "--port")


def test_a_server_that_the_environment_names_is_used(running: str, free: str) -> None:
    assert find(f"{running}/", free) == Server(running, own=False)


def test_a_named_server_that_does_not_answer_is_an_error(free: str) -> None:
    with pytest.raises(ConfigError, match="nobody answers: start it, or unset PREFECT_API_URL"):
        find(free, "http://127.0.0.1:1")


def test_an_own_server_is_started_where_none_is_named(free: str) -> None:
    assert find(None, free) == Server(free, own=True)


def test_an_own_server_is_started_where_its_own_address_is_named(free: str) -> None:
    assert find(free, free) == Server(free, own=True)


def test_somebodys_server_at_the_own_port_is_not_taken_unasked(running: str) -> None:
    with pytest.raises(ConfigError, match=r"choose another one with --port, or set PREFECT_API_U"):
        find(None, running)


def test_a_password_in_an_address_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        find("http://me:planted@127.0.0.1:1/api", "http://127.0.0.1:2")
    assert "http://127.0.0.1:1/api" in str(caught.value)
    assert "planted" not in str(caught.value)


def test_a_named_server_that_is_not_healthy_is_told_with_its_answer(
    running: str, free: str
) -> None:
    with pytest.raises(ConfigError, match="its /health answers 401"):
        find(f"{running}/private", free)


@pytest.mark.parametrize("named", ["file:///runs", "postgresql://me:planted@host/db", "databricks"])
def test_what_is_no_servers_address_is_refused_as_such(named: str, free: str) -> None:
    with pytest.raises(
        ConfigError, match="expected the http address of a server in PREF"
    ) as caught:
        find(named, free)
    assert "planted" not in str(caught.value)


def plan(root: Path, port: int, mlflow_port: int) -> LocalServers:
    return LocalServers.plan(port, mlflow_port, root, root / "logs")


@pytest.fixture
def own_prefect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A PREFECT_HOME with the default database; no server is named."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    unset = {PREFECT_API_URL, PREFECT_API_DATABASE_CONNECTION_URL}
    with temporary_settings({PREFECT_HOME: tmp_path / "home"}, restore_defaults=unset):
        yield tmp_path / "home"


def test_two_servers_at_one_port_are_refused_by_the_names_of_the_flags(
    own_prefect: Path, free: str
) -> None:
    port = int(free.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"--port and --mlflow-port are both {port}"):
        plan(own_prefect, port, port)


def test_a_second_lab_over_the_same_prefect_database_is_refused(
    own_prefect: Path, tmp_path: Path
) -> None:
    with reserve_ports(4) as reserved:
        ports = reserved.ports
    first, second = plan(tmp_path / "a", *ports[:2]), plan(tmp_path / "b", *ports[2:])
    with first.alone():
        with pytest.raises(ConfigError, match=f"PREFECT_HOME={own_prefect}, another is there"):
            second.alone().__enter__()
        with temporary_settings({PREFECT_HOME: tmp_path / "other"}), second.alone():
            pass
    with second.alone():
        pass


def test_each_root_has_a_worker_of_its_own_name(own_prefect: Path, tmp_path: Path) -> None:
    with reserve_ports(2) as reserved:
        ports = reserved.ports
    names = [plan(tmp_path / root, *ports).worker_name for root in ("a", "a", "b")]
    assert names[0] == names[1] != names[2]
