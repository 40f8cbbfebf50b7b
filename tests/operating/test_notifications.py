"""Automations that are made known by the documented command reach whoever listens."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.events import Event
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Running

from deployments.automations import FILE, register_automations
from flows.distill import distill
from opd_core.lifecycle.records import Receipt
from tasks.unclean import tell_unclean
from tests.operating.lab import PROJECT, Lab
from tests.teardown.stage import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

BLOCK = "custom-webhook/opd-alerts"
WITHIN_S = 90.0


class Receiver:
    """Somebody who listens: the notifications so far, each as its subject and body."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.url = f"http://127.0.0.1:{server.server_port}/"
        self.got: list[dict[str, str]] = []

    def about(self, word: str) -> dict[str, str]:
        """The first with this word in its subject."""
        found = wait_until(
            lambda: next((each for each in self.got if word in each["subject"]), None),
            f"a notification about {word}",
            WITHIN_S,
        )
        assert found is not None
        return found


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            listens.got.append(json.loads(self.rfile.read(length)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listens = Receiver(server)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield listens
    server.shutdown()
    thread.join()
    server.server_close()


@contextmanager
def notifying(lab: Lab, receiver: Receiver) -> Iterator[SyncPrefectClient]:
    """The block, and the automations by the command; both gone afterwards."""
    told = {"subject": "{{subject}}", "body": "{{body}}"}
    with temporary_settings({PREFECT_API_URL: lab.api_url}), lab.client() as client:
        block = CustomWebhookNotificationBlock(name="opd", url=receiver.url, json_data=told)
        block_id = block.save("opd-alerts", overwrite=True)
        done = subprocess.run(
            [sys.executable, "-m", "deployments.cli", "automations", BLOCK],
            cwd=PROJECT,
            env=lab.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        try:
            yield client
        finally:
            for automation in client.read_automations():
                client.delete_automation(automation.id)
            client.delete_block_document(block_id)


def running(client: SyncPrefectClient) -> FlowRun:
    """A flow run that nobody executes."""
    return client.create_flow_run(distill, name="nobodys", state=Running())


def test_failed_unclean_and_silent_runs_are_told(
    lab: Lab, receiver: Receiver, tmp_path: Path
) -> None:
    with notifying(lab, receiver) as client:
        failing = {"recipe": "tiny", "overrides": ["opd.teachers.0.launch.model=/nowhere"]}
        flow_run = lab.start_run("distill", failing)
        lab.wait_for(flow_run, "Failed")
        told = receiver.about("Failed")
        assert "/nowhere" in told["body"]
        assert f"{lab.ui_url}/runs/flow-run/{flow_run}" in told["body"]

        silent = running(client)
        tell_unclean(client, silent.id, Receipt("tiny-1", "cancelled", False, 1.0, (), (), (), ()))
        told = receiver.about("left something")
        assert "teardown of tiny-1 was not clean" in told["body"]
        assert f"/runs/flow-run/{silent.id}" in told["body"]

        impatient = tmp_path / "automations.yaml"
        impatient.write_text(FILE.read_text().replace("within: 900", "within: 10"))
        register_automations(BLOCK, impatient)
        _heartbeat(client, silent)
        assert f"/runs/flow-run/{silent.id}" in receiver.about("nobodys is silent")["body"]
        client.delete_flow_run(silent.id)


def test_what_was_switched_off_stays_off(lab: Lab, receiver: Receiver) -> None:
    with notifying(lab, receiver) as client:
        first, *others = client.read_automations()
        client.pause_automation(first.id)
        on = register_automations(BLOCK)
        assert sorted(on) == sorted(automation.name for automation in others)
        assert len(client.read_automations()) == 1 + len(others)


def _heartbeat(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    """As the engine of a flow run sends it."""
    event = Event(
        event="prefect.flow-run.heartbeat",
        resource={
            "prefect.resource.id": f"prefect.flow-run.{flow_run.id}",
            "prefect.resource.name": flow_run.name,
        },
        related=[
            {
                "prefect.resource.id": f"prefect.flow.{flow_run.flow_id}",
                "prefect.resource.role": "flow",
                "prefect.resource.name": "distill",
            }
        ],
    )
    client.request("POST", "/events", json=[event.model_dump(mode="json")])
