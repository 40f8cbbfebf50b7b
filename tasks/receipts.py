"""A run's receipt where a person looks for it: terminal, Prefect's log and artifacts."""

from __future__ import annotations

import contextvars
import logging
import threading
from uuid import UUID

from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.context import get_run_context
from prefect.exceptions import MissingContextError
from prefect.runtime import flow_run

from opd_core.lifecycle.receipt_text import left_over, receipt_markdown, receipt_text
from opd_core.lifecycle.records import Receipt
from tasks.console import CONSOLE, TERMINAL, announce, log, warn
from tasks.unclean import tell_unclean

RECEIPT_KEY = "receipt"
"""Prefect's key of the artifact."""
DESCRIPTION = "What was ended, and how"
ARTIFACT_S = 10.0
"""The end of a run waits no longer for Prefect's API, which may be away."""


def show_receipt(receipt: Receipt) -> None:
    """A line where nothing is left, else what is, with the whole receipt; in a Prefect run also an
    artifact."""
    if receipt.clean:
        count = len(receipt.children)
        announce(
            f"all ended: {count} processes, ports free, nothing left ({receipt.seconds:.1f} s)"
        )
    else:
        warn(left_over(receipt))
        if TERMINAL.lines:
            CONSOLE.print(receipt_text(receipt), markup=False, soft_wrap=True)
    context = contextvars.copy_context()
    # A daemon: an API that hangs does not keep the process.
    keeping = threading.Thread(target=context.run, args=(_keep, receipt), daemon=True)
    keeping.start()
    keeping.join(ARTIFACT_S)


def _keep(receipt: Receipt) -> None:
    try:
        get_run_context()
        create_markdown_artifact(receipt_markdown(receipt), RECEIPT_KEY, DESCRIPTION)
        with get_client(sync_client=True) as client:
            tell_unclean(client, str(flow_run.id), receipt)
    except MissingContextError:
        return  # not in a Prefect run
    except Exception as error:  # the file in the run directory tells the same
        log(logging.WARNING, f"the receipt could not be kept as an artifact: {error}")


def keep_late(client: SyncPrefectClient, flow_run_id: UUID, receipt: Receipt) -> None:
    """The artifact of a flow run that died before it made it. Raises what the client raises."""
    of_this_run = ArtifactFilter(
        flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]),
        key=ArtifactFilterKey(any_=[RECEIPT_KEY]),
    )
    if not client.read_artifacts(artifact_filter=of_this_run):
        artifact = ArtifactCreate(
            key=RECEIPT_KEY,
            type="markdown",
            description=DESCRIPTION,
            data=receipt_markdown(receipt),
            flow_run_id=flow_run_id,
        )
        client.create_artifact(artifact)
        tell_unclean(client, flow_run_id, receipt)
