"""The temporary Prefect server ends with the process that started it, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STARTER = """
import os, time
from tasks.temporary_server import configured_api, ensure_prefect_api, lasting_api
with configured_api("http://elsewhere:4200/api"):
    assert lasting_api() == "http://elsewhere:4200/api"
assert lasting_api() == ""
# In a process with threads no code of its own may run between fork and exec.
os.register_at_fork(after_in_child=lambda: os._exit(9))
ensure_prefect_api()
assert lasting_api() == ""  # nobody finds it there later
from prefect.client.orchestration import get_client
with get_client(sync_client=True) as client:
    print(client.hello().text, client.api_url.port, flush=True)
time.sleep(60)
"""


def listens(port: int) -> bool:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    listening = {line.split()[1].partition(":")[2] for line in lines if line.split()[3] == "0A"}
    return f"{port:04X}" in listening


@pytest.mark.slow
def test_it_answers_and_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    environment |= {"PREFECT_HOME": str(tmp_path), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert starter.stdout is not None
    try:
        hello, port = starter.stdout.readline().split()
        assert "👋" in hello
        assert listens(int(port))
    finally:
        starter.kill()
        starter.wait()
        starter.stdout.close()
    deadline = time.monotonic() + 10
    while listens(int(port)):
        assert time.monotonic() < deadline, "the server outlived its starter"
        time.sleep(0.05)
