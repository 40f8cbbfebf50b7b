"""Tracking of a run whose flow has died: the whole journal once more, for whoever lacks some of it.

Nothing is sent twice: MLflow takes only points that its history lacks, TensorBoard's files are
written anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from opd_core.tracking.journal import JournalRecord
from opd_core.tracking.mlflow_sink import MlflowRun, MlflowSink, find_run
from opd_core.tracking.sink import Ending, Sink
from tasks.environment import RunRecord
from tasks.mlflow_run import ATTEMPTS_TAG, STATUS_TAG, mlflow_run, mlflow_status
from tasks.tracking import Tracker


class CompleteSink:
    """An MLflow run that has everything already: nothing of it is touched."""

    dropped = 0

    def __init__(self, run_id: str) -> None:
        self.reference = run_id

    def log(self, records: Sequence[JournalRecord]) -> None:
        """It has them."""

    def finish(self, ending: Ending) -> tuple[str, ...]:
        """It has that too."""
        return ()

    def close(self) -> None:
        """Nothing is open."""


def track_late(run: RunRecord, status: str) -> Tracker:
    """Start to bring everywhere what is lacking there of a run that ended with this status."""
    return Tracker.through(run, partial(_sink, mlflow_run(run), status))


def _sink(run: MlflowRun, status: str) -> Sink:
    found = find_run(run)
    if found is not None and _is_complete(found, run, status):
        return CompleteSink(str(found.info.run_id))
    return MlflowSink(run)


def _is_complete(found: Any, run: MlflowRun, status: str) -> bool:
    """The status is the last thing that a run is given, so whoever has that has everything."""
    tags = found.data.tags
    told = (found.info.status, tags.get(STATUS_TAG), tags.get(ATTEMPTS_TAG))
    return told == (mlflow_status(status), status, run.tags[ATTEMPTS_TAG])
