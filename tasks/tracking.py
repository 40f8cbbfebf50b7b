"""The run's journal on its way to MLflow and TensorBoard, and what is kept there beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from opd_core.lifecycle.ledger import LEDGER_FILE
from opd_core.lifecycle.records import RECEIPT_FILE
from opd_core.recipe import load_recipe
from opd_core.tracking.journal import JournalReader
from opd_core.tracking.mlflow_sink import MlflowSink, bound_http_waits
from opd_core.tracking.shipper import Shipper, ShippingReport, SinkFactory
from opd_core.tracking.sink import Artifact, Ending
from opd_core.tracking.tensorboard_sink import TensorBoardSink
from opd_core.training.attempts import read_history
from opd_core.training.files import (
    CONFIG_FILE,
    EVALUATIONS_FOLDER,
    JOURNAL_FILE,
    LOGS_FOLDER,
    MODEL_CARD_FILE,
    PROVENANCE_FILE,
    REPORT_FILE,
    RESULT_FILE,
    RUN_FILE,
    SUMMARY_FILE,
)
from opd_core.training.forks import name_of
from tasks.console import warn
from tasks.environment import RunRecord
from tasks.mlflow_run import STATUS_TAG, mlflow_run, mlflow_status

SHIP_WITHIN_S = 60.0
KEPT = (
    *(CONFIG_FILE, JOURNAL_FILE, RESULT_FILE, SUMMARY_FILE, MODEL_CARD_FILE, REPORT_FILE),
    *(RUN_FILE, PROVENANCE_FILE, LEDGER_FILE, RECEIPT_FILE, EVALUATIONS_FOLDER, LOGS_FOLDER),
)
"""What MLflow keeps of a run directory as artifacts."""


class Tracker:
    """The run's journal on its way to MLflow and TensorBoard.

    ``lacking`` is what has not arrived, known after :meth:`finish`.
    """

    def __init__(self, run: RunRecord, shipper: Shipper) -> None:
        self._run = run
        self._shipper = shipper
        self._opened: list[MlflowSink] = []
        self._finished = False
        self.lacking: tuple[str, ...] = ("tracking is not at its end",)

    @classmethod
    def start(cls, run: RunRecord) -> Tracker:
        """Start shipping in the background; returns at once."""
        kept, opened = mlflow_run(run, over=False), list[MlflowSink]()

        def sink() -> MlflowSink:
            opened.append(MlflowSink(kept))
            return opened[-1]

        tracker = cls.through(run, sink if run.config.tracking.mlflow else None)
        tracker._opened = opened
        return tracker

    @classmethod
    def through(cls, run: RunRecord, mlflow: SinkFactory | None) -> Tracker:
        """Start shipping, to MLflow through this sink."""
        bound_http_waits()
        sinks: dict[str, SinkFactory] = {}
        if mlflow is not None:
            sinks["mlflow"] = mlflow
        if run.config.tracking.tensorboard:
            sinks["tensorboard"] = partial(TensorBoardSink, run.directory / "tensorboard")
        shipper = Shipper(JournalReader(run.directory / JOURNAL_FILE), sinks)
        shipper.start()
        return cls(run, shipper)

    @property
    def mlflow_run_id(self) -> str | None:
        """MLflow's id of the run, once it has one."""
        sink = self.report().sinks.get("mlflow")
        return sink.reference if sink else None

    def place(self) -> tuple[str, str]:
        """MLflow's ids of the run and of its experiment; empty until it has them."""
        for sink in self._opened:
            return sink.run_id, sink.experiment_id
        return "", ""

    def report(self) -> ShippingReport:
        """What has arrived by now."""
        return self._shipper.report()

    @property
    def complete(self) -> bool:
        """Whether everything has arrived everywhere; known after :meth:`finish`."""
        return self.report().complete

    @property
    def told(self) -> dict[str, dict[str, Any]]:
        """What a summary says of each sink; whether it is complete is known after
        :meth:`finish`."""
        return {
            name: {
                "shipped": sink.shipped,
                "failed_attempts": sink.failed_attempts,
                "cpu_s": round(sink.cpu_s, 3),
                "last_error": sink.last_error,
                "complete": sink.complete if self._finished else None,
            }
            for name, sink in self.report().sinks.items()
        }

    def finish(
        self,
        summary: Mapping[str, Any],
        within_s: float = SHIP_WITHIN_S,
        *,
        kept: Sequence[str] = KEPT,
        progress: Callable[[ShippingReport], None] = lambda report: None,
    ) -> str | None:
        """Ship the rest, the ``kept`` files of the run directory and the final status; never
        raises. Returns MLflow's run id; what did not arrive is then in :attr:`lacking`."""
        run = self._run
        status = str(summary["status"])
        ending = Ending(
            status=mlflow_status(status),
            tags={STATUS_TAG: status, "opd.student_path": summary["student_path"]},
            artifacts=tuple(
                Artifact(run.directory / name) for name in kept if (run.directory / name).exists()
            ),
            at_s=_ended_at(run.directory),
        )
        report = self._shipper.close(within_s, ending, progress)
        self._finished = True
        self.lacking = tuple(_lacking(run.directory, report))
        for lacking in self.lacking:
            warn(lacking)
        return self.mlflow_run_id


def _lacking(directory: Path, report: ShippingReport) -> Iterator[str]:
    """What has not arrived; a journal that cannot be read is told once, not for each sink."""
    later = f"later `opd sync {name_of(directory)}` brings it"
    lacking = {name: sink for name, sink in report.sinks.items() if not sink.complete}
    if lacking and report.journal_error is not None:
        yield f"the journal cannot be read to its end: {report.journal_error}; {later}"
    for name, sink in lacking.items():
        if report.journal_error is None or sink.last_error != report.journal_error:
            yield (
                f"{name} is incomplete ({sink.shipped} of {report.records_read} records; "
                f"{sink.last_error}); {directory / JOURNAL_FILE} holds everything, and {later}"
            )


def _ended_at(directory: Path) -> float | None:
    """Unix time at which all that the run had started was ended."""
    try:
        return (directory / RECEIPT_FILE).stat().st_mtime
    except OSError:
        return None


def load_run(directory: Path) -> RunRecord:
    """The run in ``directory``, as it was started last. Raises
    :class:`~opd_core.errors.ConfigError`."""
    history = read_history(directory)
    return RunRecord(history.run_id, directory, load_recipe(directory / CONFIG_FILE), history)
