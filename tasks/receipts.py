"""A run's receipt where a person looks for it: terminal, Prefect's log and artifacts."""

from __future__ import annotations

import contextvars
import threading

from prefect.artifacts import create_markdown_artifact
from prefect.exceptions import MissingContextError

from opd_core.lifecycle.receipt_text import left_over, receipt_markdown, receipt_text
from opd_core.lifecycle.records import Receipt
from tasks.console import CONSOLE, TERMINAL, announce, logger, warn

RECEIPT_KEY = "receipt"
"""Prefect's key of the artifact."""
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
        create_markdown_artifact(receipt_markdown(receipt), RECEIPT_KEY, "What was ended, and how")
    except MissingContextError:
        return  # not in a Prefect run
    except Exception as error:  # the file in the run directory tells the same
        logger().warning(f"the receipt could not be kept as an artifact: {error}")
