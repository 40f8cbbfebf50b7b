"""Tracking of a run that has ended: the whole journal once more, for whoever lacks some of it.

Nothing is sent twice: MLflow takes only points that its history lacks, TensorBoard's files are
written anew. Used by ``tasks.settle``, which leaves alone what is marked as complete, and by
``tasks.sync``, which compares every point.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from opd_core.analysis.report import write_report
from opd_core.errors import OPDError
from opd_core.lifecycle.records import Receipt
from opd_core.tracking.journal import JournalRecord
from opd_core.tracking.mlflow_sink import COMPLETE_TAG, MlflowRun, MlflowSink, find_run
from opd_core.tracking.sink import Ending, Sink
from opd_core.training.attempts import end_attempt
from opd_core.training.files import REPORT_FILE, RUN_FILE, SUMMARY_FILE
from tasks.console import warn
from tasks.environment import RunRecord
from tasks.mlflow_run import ATTEMPTS_TAG, STATUS_TAG, mlflow_run, mlflow_status
from tasks.summary import late_summary, read_summary, write_summary
from tasks.tracking import Tracker


class Reasons(list[str]):
    """Why a run is not settled. One part that fails does not keep the others from their turn."""

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Take down what goes wrong in here."""
        try:
            yield
        except Exception as error:
            first, *_ = str(error).strip().splitlines() or [""]
            kind = "" if isinstance(error, OPDError) else f"{type(error).__name__}: "
            self.append(f"{what}: {kind}{first}")


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


@dataclass(frozen=True, slots=True)
class LateTracking:
    """A run's summary and report, written where nobody did, on their way to everywhere."""

    run: RunRecord
    summary: dict[str, Any]
    tracker: Tracker

    @classmethod
    def believing(cls, run: RunRecord, receipt: Receipt, reasons: Reasons) -> LateTracking:
        """Start to bring what is lacking. An MLflow that says that it has everything is believed,
        and nothing of the run is touched there."""
        summary = _summary(run, receipt, reasons)
        sink = partial(_believing_sink, mlflow_run(run), str(summary["status"]))
        return cls(run, summary, Tracker.through(run, sink if run.config.tracking.mlflow else None))

    @classmethod
    def comparing(
        cls, run: RunRecord, receipt: Receipt, reasons: Reasons, mlflow: MlflowRun | None
    ) -> LateTracking:
        """Start to bring what is lacking, point by point, to this MLflow or to none."""
        summary = _summary(run, receipt, reasons)
        sink = None if mlflow is None else partial(MlflowSink, mlflow)
        return cls(run, summary, Tracker.through(run, sink))

    def write_report(self) -> None:
        """Where nobody did, and before :meth:`finish`, so that MLflow gets it. A run is settled
        without one too: what stands in its way is told."""
        try:
            if not (self.run.directory / REPORT_FILE).exists():
                write_report(self.run.directory)
        except Exception as error:
            warn(f"the report could not be written: {type(error).__name__}: {error}")

    def finish(self, within_s: float, reasons: Reasons, **how: Any) -> str | None:
        """Ship the rest, as :meth:`Tracker.finish` does. Returns MLflow's run id."""
        mlflow_run_id = self.tracker.finish(self.summary, within_s, **how)
        reasons.extend(self.tracker.lacking)
        return mlflow_run_id

    def write_down(self, mlflow_run_id: str | None, reasons: Reasons) -> None:
        """Let the run's own summary tell what it did not know: where the run is tracked, and that
        what was lacking has come."""
        known = mlflow_run_id in (None, self.summary["mlflow_run_id"])
        if known and all(sink["complete"] for sink in self.summary.get("tracking", {}).values()):
            return
        told = {"mlflow_run_id": mlflow_run_id or self.summary["mlflow_run_id"]}
        with reasons.of(SUMMARY_FILE):
            write_summary(self.run, self.summary | told | {"tracking": self.tracker.told})


def _summary(run: RunRecord, receipt: Receipt, reasons: Reasons) -> dict[str, Any]:
    """The run's summary, written where nobody did, with the attempt's status."""
    summary = read_summary(run.directory)
    if summary is None:
        summary = late_summary(run, receipt)
        with reasons.of(SUMMARY_FILE):
            write_summary(run, summary)
    if not run.history.attempts[-1].status:
        with reasons.of(RUN_FILE):
            end_attempt(run.directory, str(summary["status"]))
    return summary


def _believing_sink(run: MlflowRun, status: str) -> Sink:
    found = find_run(run)
    if found is not None and _is_complete(found, run, status):
        return CompleteSink(str(found.info.run_id))
    return MlflowSink(run)


def _is_complete(found: Any, run: MlflowRun, status: str) -> bool:
    """Whoever ended it as it ended, in its latest attempt, and said that everything is there."""
    tags = found.data.tags
    told = (found.info.status, *map(tags.get, (STATUS_TAG, ATTEMPTS_TAG, COMPLETE_TAG)))
    return told == (mlflow_status(status), status, run.tags[ATTEMPTS_TAG], "true")
