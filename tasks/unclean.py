"""A run that left something is told as an event of Prefect, for automations that notify somebody.

Its state does not say it: a run may be cancelled, or fail for another reason, and leave something.
"""

from __future__ import annotations

from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.events import Event

from opd_core.lifecycle.receipt_text import left_over
from opd_core.lifecycle.records import Receipt

UNCLEAN = "opd.run.unclean"


def tell_unclean(client: SyncPrefectClient, flow_run_id: UUID | str, receipt: Receipt) -> None:
    """The event of a receipt that is not clean; nothing of one that is. Raises what the client
    raises: it is sent at once, as the process may have no later."""
    if receipt.clean:
        return
    event = Event(
        event=UNCLEAN,
        resource={
            "prefect.resource.id": f"opd.run.{receipt.run_id}",
            "prefect.resource.name": receipt.run_id,
        },
        related=[
            {
                "prefect.resource.id": f"prefect.flow-run.{flow_run_id}",
                "prefect.resource.role": "flow-run",
            }
        ],
        payload={"cause": receipt.cause, "left": left_over(receipt)},
    )
    client.request("POST", "/events", json=[event.model_dump(mode="json")])
