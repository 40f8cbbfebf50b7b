"""Where ``opd up`` finds a server, or the room for one of its own."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from deployments.local_servers import Server
from opd_core.errors import ConfigError
from opd_core.lifecycle.ports import reserve_ports


class Healthy(http.server.BaseHTTPRequestHandler):
    """Answers ``/health``, and nothing else."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
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
