"""A run that left something is an event of Prefect; one that did not is none."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

from prefect.client.orchestration import SyncPrefectClient

from opd_core.lifecycle.records import PortState, Receipt
from tasks.unclean import UNCLEAN, tell_unclean

CLEAN = Receipt("tiny-1", "cancelled", True, 1.0, (), (), (), ())
UNCLEAN_RECEIPT = replace(CLEAN, clean=False, ports=(PortState(13141, free=False),))
FLOW_RUN = "68300457-96f3-49e5-ad52-a490a0c06d07"


@dataclass
class Recorder:
    sent: list[dict[str, Any]] = field(default_factory=list)

    def request(self, method: str, path: str, json: list[dict[str, Any]]) -> None:
        assert (method, path) == ("POST", "/events")
        self.sent += json


def told(receipt: Receipt) -> list[dict[str, Any]]:
    client = Recorder()
    tell_unclean(cast(SyncPrefectClient, client), FLOW_RUN, receipt)
    return client.sent


def test_what_is_left_is_told_of_the_run_and_its_flow_run() -> None:
    (event,) = told(UNCLEAN_RECEIPT)
    assert event["event"] == UNCLEAN
    assert event["resource"]["prefect.resource.id"] == "opd.run.tiny-1"
    assert event["related"][0]["prefect.resource.id"] == f"prefect.flow-run.{FLOW_RUN}"
    assert "port 13141" in event["payload"]["left"]


def test_a_clean_receipt_is_no_event() -> None:
    assert told(CLEAN) == []
