"""Ends what dead runs have left on this machine: a few seconds, every quarter of an hour.

A run whose flow was killed is ended by its supervisor at once. This is for what outlives even
that: both were killed, the machine was started anew, or MLflow was away when the run's end was
to be told. Each host needs one of its own, under each user whose runs it is to look after.
"""

from __future__ import annotations

import getpass
import platform
from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact

from tasks.console import announce, warn
from tasks.reaping import reap_dead_runs

JANITOR = "janitor"
"""Prefect's key of the artifact with what was done."""


@flow(name="janitor")
def janitor(dry_run: bool = False) -> list[dict[str, Any]]:
    """End what is left of this user's dead runs; returns every unsettled run and what was done.

    Raises :class:`~tasks.reaping.NotReaped` if processes of one could not be ended; a final state
    that could not be written is a warning.
    """
    report = reap_dead_runs(dry_run)
    where = f"{getpass.getuser()}@{platform.node()}"
    announce(f"{where}: {len(report.lines)} runs are not settled")
    for line in report.lines:
        tell = warn if line.left else announce
        tell(f"{line.run}: {line.state} ({line.found}): {line.done}")
    try:
        create_markdown_artifact(report.markdown(), JANITOR, f"Janitor of {where}")
    finally:
        report.raise_left()
    return report.to_json()
