"""What a registration leaves as it is, and when a worker was last heard of."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import cast
from uuid import uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.schedules import CronSchedule
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_CSRF_SUPPORT_ENABLED,
    temporary_settings,
)

from deployments.registering import keep_schedules, last_heartbeat
from deployments.serve import deployments

HEARD = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
WORKER = {"id": str(uuid4()), "name": "mine", "work_pool_id": str(uuid4()), "status": "ONLINE"}


class Workers(http.server.BaseHTTPRequestHandler):
    """Answers every request with one worker, of which it has heard."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        answer = json.dumps([{**WORKER, "last_heartbeat_time": HEARD.isoformat()}]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


@pytest.fixture
def server() -> Iterator[None]:
    """The one that Prefect's settings name."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Workers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}/api"
        settings = {PREFECT_API_URL: address, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: False}
        with temporary_settings(settings):
            yield
        server.shutdown()
        thread.join()


def test_a_worker_is_known_by_its_last_heartbeat_whatever_its_status(server: None) -> None:
    assert last_heartbeat("mine") == HEARD
    assert last_heartbeat("another") is None


def test_a_schedule_that_is_there_is_kept_with_all_that_was_set() -> None:
    changed = DeploymentSchedule(
        slug="nightly",
        schedule=CronSchedule(cron="30 3 * * *"),
        active=True,
        max_scheduled_runs=7,
        parameters={"request": {"seeds": [1]}},
    )
    known = SimpleNamespace(read_deployment_by_name=lambda _: SimpleNamespace(schedules=[changed]))
    rerun = next(each for each in deployments() if each.name == "rerun")
    keep_schedules(rerun, cast("SyncPrefectClient", known))
    nightly, weekly = rerun.schedules or []
    fields = {"slug", "schedule", "active", "max_scheduled_runs", "parameters"}
    assert nightly.model_dump(include=fields) == changed.model_dump(include=fields)
    assert weekly.slug == "weekly"
