"""Ends what dead runs have left on this machine: a few seconds, every quarter of an hour.

A run whose flow was killed is ended by its supervisor at once. This is for what outlives even
that: both were killed, the machine was started anew, or MLflow was away when the run's end was
to be told.
"""

from __future__ import annotations

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

    Raises :class:`~tasks.reaping.NotReaped` if something could not be ended or written.
    """
    report = reap_dead_runs(dry_run)
    for line in report.lines:
        tell = warn if line.left else announce
        tell(f"{line.run}: {line.state} ({line.found}): {line.done}")
    create_markdown_artifact(report.markdown(), JANITOR, "Janitor")
    report.raise_left()
    return report.to_json()
