"""``opd sync``: a run that has ended once more into MLflow and TensorBoard, from its journal.

For a run whose MLflow was away, and to bring a run into another MLflow. It does not believe that
anything is there: every point of the journal is compared with MLflow's, before and after.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from opd_core.config import TrackingConfig
from opd_core.errors import ConfigError, OPDError
from opd_core.lifecycle.ledger import LEDGER_FILE, is_held
from opd_core.lifecycle.records import Receipt, read_receipt
from opd_core.lifecycle.registry import Registry
from opd_core.tracking.journal import read_all
from opd_core.tracking.mlflow_check import PointCheck, check_points
from opd_core.tracking.mlflow_sink import MlflowRun, bound_http_waits, find_run
from opd_core.tracking.shipper import ShippingReport, short_error, without_credentials
from opd_core.training.alone import alone
from opd_core.training.attempts import end_leftovers, read_history
from opd_core.training.files import JOURNAL_FILE, TOKEN_KL_FOLDER
from opd_core.training.lineage import find_run as find_directory
from tasks.console import CONSOLE, TERMINAL
from tasks.environment import RunRecord
from tasks.late_tracking import LateTracking, Reasons
from tasks.mlflow_run import mlflow_run
from tasks.tracking import KEPT, load_run

SYNC_WITHIN_S = 600.0
MOST_OF_A_FOLDER = 32 << 20
"""Bytes: a larger folder stays in the run directory."""


class SyncError(OPDError):
    """MLflow cannot be reached."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a synchronisation came to.

    ``before`` and ``after`` compare MLflow's points with the journal's; both are None for a run
    that is not tracked in MLflow. ``left_out`` names what is too large to be an artifact,
    ``lacking`` what did not arrive, and why.
    """

    run_id: str
    mlflow_uri: str | None
    mlflow_run_id: str | None
    before: PointCheck | None
    after: PointCheck | None
    left_out: tuple[str, ...]
    lacking: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether everything is where it belongs."""
        return not self.lacking and (self.after is None or self.after.exact)

    def lines(self) -> list[str]:
        """For a person."""
        told = [f"{self.run_id}: {'everything is there' if self.complete else 'NOT complete'}"]
        if self.after is not None:
            told += [f"MLflow run {self.mlflow_run_id} at {self.mlflow_uri}"]
            told += [f"  before: {self.before}", f"  now: {self.after}"]
        return told + [f"left out: {what}" for what in self.left_out] + list(self.lacking)


def sync_run(
    run: str,
    recipe: Path,
    overrides: Sequence[str] = (),
    mlflow_uri: str | None = None,
    within_s: float = SYNC_WITHIN_S,
) -> SyncReport:
    """Bring journal, artifacts, tags and final status of ``run`` (its id or directory) to where its
    recipe tracks it, or to ``mlflow_uri``. Nothing is there twice, however often it is called.

    ``recipe`` and ``overrides`` say where the run root is. Raises
    :class:`~opd_core.errors.ConfigError` for a run that is not there, lives, or died without a
    receipt, :class:`SyncError` for an MLflow that cannot be reached, and
    :class:`~opd_core.errors.DataError` for a journal that cannot be read.
    """
    directory = find_directory(run, recipe, overrides)
    _check_ended(directory)
    bound_http_waits()
    with alone(directory):
        receipt = read_receipt(directory)
        assert receipt is not None, "whoever holds its lock has found it"
        record = load_run(directory)
        own, uri = record.config.tracking, TrackingConfig(mlflow_uri=mlflow_uri).mlflow_uri
        if not (own.mlflow or own.tensorboard or uri):
            raise ConfigError(f"run {record.run_id} is tracked nowhere: name --mlflow-uri")
        mlflow = mlflow_run(record, uri=uri) if own.mlflow or uri else None
        tracking = _Sync(record, receipt, mlflow)
        return tracking.run(within_s, writes_down=uri is None)


def _check_ended(directory: Path) -> None:
    """A run that died without a receipt gets one, as it would on a resume."""
    history = read_history(directory)
    if history.attempts[-1].alive or is_held(directory / LEDGER_FILE):
        raise ConfigError(
            f"run {history.run_id} lives, and tracks itself: wait for its end, or end it"
        )
    if read_receipt(directory) is None and Registry.of_user().find(history.run_id) is None:
        end_leftovers(directory, load_run(directory).config.run.teardown_s)
    if read_receipt(directory) is None:
        raise ConfigError(
            f"run {history.run_id} holds no receipt: it died, or lives on another machine. There "
            "`opd reap` ends what is left of it and writes its final state; then sync it again"
        )


@dataclass(frozen=True, slots=True)
class _Sync:
    record: RunRecord
    receipt: Receipt
    mlflow: MlflowRun | None

    def run(self, within_s: float, *, writes_down: bool) -> SyncReport:
        reasons, before = Reasons(), self.compare()
        tracking = LateTracking.comparing(self.record, self.receipt, reasons, self.mlflow)
        tracking.write_report()
        directory = self.record.directory
        large = _too_large(directory)
        kept = [name for name in (*KEPT, TOKEN_KL_FOLDER) if name not in large]
        live = TERMINAL.lines and sys.stderr.isatty()
        with progress_bar(CONSOLE, live=live) as progress:
            mlflow_run_id = tracking.finish(within_s, reasons, kept=kept, progress=progress)
        if writes_down:
            tracking.write_down(mlflow_run_id, reasons)
        return SyncReport(
            run_id=self.record.run_id,
            mlflow_uri=without_credentials(self.mlflow.tracking_uri) if self.mlflow else None,
            mlflow_run_id=mlflow_run_id,
            before=before,
            after=self.compare(),
            left_out=tuple(f"{directory / name} ({size >> 20} MB)" for name, size in large.items()),
            lacking=tuple(reasons),
        )

    def compare(self) -> PointCheck | None:
        if self.mlflow is None:
            return None
        records = list(read_all(self.record.directory / JOURNAL_FILE))
        uri = self.mlflow.tracking_uri
        try:
            found = find_run(self.mlflow)
            run_id = str(found.info.run_id) if found else None
            return check_points(uri, run_id, records)
        except Exception as error:
            raise SyncError(
                f"MLflow at {without_credentials(uri)}: {short_error(error)}; try again when it "
                "answers, or name another one (--mlflow-uri)"
            ) from None


def _too_large(directory: Path) -> dict[str, int]:
    """Folders that are not sent, with their bytes."""
    sizes = {name: _size(directory / name) for name in (TOKEN_KL_FOLDER, *KEPT)}
    return {name: size for name, size in sizes.items() if size > MOST_OF_A_FOLDER}


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@contextmanager
def progress_bar(console: Console, *, live: bool) -> Iterator[Callable[[ShippingReport], None]]:
    """A bar of the records that have arrived everywhere; nothing where it is not ``live``."""
    doing = TextColumn("{task.fields[doing]}", markup=False)
    columns = TextColumn("records"), BarColumn(), MofNCompleteColumn(), doing
    with Progress(*columns, console=console, disable=not live) as bar:
        task = bar.add_task("", total=None, doing="")

        def show(report: ShippingReport) -> None:
            arrived = min((sink.shipped for sink in report.sinks.values()), default=0)
            now = ["artifacts, tags and status"] if arrived == report.records_read else []
            errors = [f"last error: {s.last_error}" for s in report.sinks.values() if s.last_error]
            bar.update(
                task,
                total=report.records_read,
                completed=arrived,
                doing="; ".join(now + errors),
            )

        yield show
