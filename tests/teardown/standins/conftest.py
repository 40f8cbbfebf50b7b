"""Processes that are no part of any run, and must not be touched by one that ends."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from opd_core.lifecycle.ports import reserve_ports
from tests.teardown.standins.servers import IDLE

Foreigners = Callable[..., AbstractContextManager[Callable[[], list[str]]]]


@contextmanager
def living(command: list[str], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def foreign_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], int]]:
    """A web server of somebody else's; ask it for the status of its front page."""
    folder = str(tmp_path_factory.mktemp("foreign"))
    with reserve_ports(1) as reservation:
        (port,) = reservation.ports
    command = [sys.executable, "-u", "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    server = subprocess.Popen(
        [*command, "--directory", folder], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )

    def ask() -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status
        finally:
            connection.close()

    assert server.stdout is not None
    try:
        assert server.stdout.readline(), "it serves"
        yield ask
    finally:
        server.kill()
        server.communicate()


@pytest.fixture
def foreigners(foreign_server: Callable[[], int]) -> Foreigners:
    """Start processes of others that look like the run's; ask which of them do not live on."""

    @contextmanager
    def start(run_id: str, teacher: tuple[str, ...]) -> Iterator[Callable[[], list[str]]]:
        # The longer run id begins with this run's: a careless comparison takes one for the other.
        with (
            living([*teacher], OPD_RUN_ID=f"{run_id}-2", **{IDLE: "1"}) as other_run,
            living([*teacher], **{IDLE: "1"}) as namesake,
        ):
            processes = {"other run": other_run, "namesake": namesake}

            def not_living() -> list[str]:
                ended = [name for name, each in processes.items() if each.poll() is not None]
                return ended if foreign_server() == 200 else [*ended, "web server"]

            yield not_living

    return start
