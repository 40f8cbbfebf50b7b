"""A Prefect server for the length of one command, where none is configured.

Prefect starts one by itself, but ends it from ``atexit`` only: after SIGTERM or SIGKILL it would
run on for ever. This one is bound to the process that started it by the kernel (parent-death
signal).
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO

from opd_core.errors import ServingError
from opd_core.lifecycle.bond import bound
from opd_core.lifecycle.ports import reserve_ports

START_LIMIT_S = 180.0
POLL_S = 0.2
LOG_TAIL_BYTES = 4000

_for_the_process = ExitStack()
_started: list[int] = []
"""The port of this process's server, once it answers."""


def lasting_api() -> str:
    """Where Prefect's API answers also after this process; empty where only a temporary server
    does, which another process has to start for itself."""
    from prefect.settings import PREFECT_API_URL

    return "" if _started else PREFECT_API_URL.value() or ""


@contextmanager
def configured_api(api: str) -> Iterator[None]:
    """Take what :func:`lasting_api` said in another process for what is configured here."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: api or None}):
        yield


def ensure_prefect_api(limit_s: float = START_LIMIT_S) -> None:
    """Nothing to do if ``PREFECT_API_URL`` is set (environment or profile); else start a server on
    loopback, over the user's own Prefect database, that ends with this process.

    For the main thread: the server dies with the thread that started it. Raises
    :class:`ServingError` if it does not start within ``limit_s``.
    """
    # Registered before Prefect's own exit functions, so called after them: they still send logs.
    ending = ExitStack()
    atexit.register(ending.close)
    from prefect.settings import PREFECT_API_URL, temporary_settings

    if PREFECT_API_URL.value():
        return
    with reserve_ports(1) as reserved:
        (port,) = reserved.ports
    log = ending.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (closed by ending)
    server = _start(port, log)
    ending.callback(server.terminate)
    _await(server, f"http://127.0.0.1:{port}/api/health", log, limit_s)
    _started.append(port)
    _for_the_process.enter_context(
        temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api"})
    )


def _start(port: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    return subprocess.Popen(
        bound([*command, "--lifespan", "on"]),
        env=os.environ | {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # Ctrl-C is for us: the run's last states are still to be stored
    )


def _await(server: subprocess.Popen[bytes], url: str, log: IO[bytes], limit_s: float) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + limit_s
    while True:
        try:
            with opener.open(url, timeout=5) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        if server.poll() is not None or time.monotonic() > deadline:
            log.seek(0)
            tail = log.read()[-LOG_TAIL_BYTES:].decode("utf-8", "replace")
            raise ServingError(
                "Prefect's temporary server did not start; set PREFECT_API_URL to a server, or "
                f"look at what it said:\n{tail}"
            )
        time.sleep(POLL_S)
