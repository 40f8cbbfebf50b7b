"""The notifications as they are shipped."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prefect.events.schemas.automations import AutomationCore
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.automations import FILE, register_automations
from deployments.serve import deployments
from opd_core.errors import ConfigError
from tasks.unclean import UNCLEAN

SHIPPED: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["automations"]


def test_each_is_an_automation_of_prefect_that_notifies() -> None:
    automations = [AutomationCore.model_validate(each) for each in SHIPPED]
    assert [action.type for each in automations for action in each.actions] == [
        "send-notification"
    ] * len(automations)
    assert len({each.name for each in automations}) == len(automations)


def test_they_watch_over_every_flow_that_is_deployed() -> None:
    flows = {deployment.flow_name for deployment in deployments()}
    watched = [
        set(each["trigger"]["match_related"]["prefect.resource.name"])
        for each in SHIPPED
        if "match_related" in each["trigger"]
    ]
    assert watched
    assert all(flows <= names for names in watched)


def test_what_a_run_left_is_told_by_the_event_that_one_of_them_expects() -> None:
    assert [UNCLEAN] in [each["trigger"]["expect"] for each in SHIPPED]


class Empty(http.server.BaseHTTPRequestHandler):
    """A server that has nothing of what it is asked for."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


def test_without_the_address_of_a_server_it_is_the_address_that_is_missing() -> None:
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(ConfigError, match="in PREFECT_API_URL, it is not set"),
    ):
        register_automations("slack-webhook/alerts")


@pytest.fixture
def empty_server() -> Iterator[str]:
    """The address of its API."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()
        thread.join()


def test_a_missing_block_is_told_with_the_server_that_lacks_it(empty_server: str) -> None:
    with (
        temporary_settings({PREFECT_API_URL: empty_server}),
        pytest.raises(ConfigError, match=f"on the Prefect server at {empty_server}"),
    ):
        register_automations("slack-webhook/alerts")
