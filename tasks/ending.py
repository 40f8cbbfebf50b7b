"""The end of a run, in this order: everything that it started (one teardown, with a receipt), the
summary, and last the tracking with its final status. A second Ctrl-C does not break it off: the
supervisor has its deadline, and tracking has one too. The student's job on a cluster that is not
ours is stopped meanwhile.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run

from opd_core.analysis.report import write_report
from opd_core.lifecycle.leases import DeviceLease
from opd_core.lifecycle.records import Receipt
from opd_core.training.attempts import end_attempt
from opd_core.training.jobs import HTTP_ERRORS, REQUEST_TIMEOUT_S, STOP_S, StudentJob
from tasks.console import announce, warn
from tasks.environment import RunRecord
from tasks.flow_state import settle_earlier
from tasks.hooks import UNSETTLED, Unsettled
from tasks.receipts import show_receipt
from tasks.session import Session
from tasks.summary import build_summary, show_summary, write_model_card, write_summary
from tasks.tracking import Tracker

API_TIMEOUT_S = 10.0
KEEP_LOGS_S = 5.0
MOST_OF_A_LOG = 8 << 20
"""Bytes: Ray's own logs must not hold up the end of a run, nor fill its disk."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Why a run ends: the ``cause`` for its receipt and the ``error`` that left its stages. It
    ``started`` at this reading of ``time.perf_counter``."""

    cause: str
    error: BaseException | None
    started: float


def end_experiment(
    session: Session, how: Ended, tracker: Tracker | None, lease: DeviceLease | None
) -> Receipt:
    """All of it. Prefect's final state comes after this: a hook of the flow lets the supervisor go
    then."""
    receipt = end_run(session, how.cause, went_wrong=how.error is not None)
    if lease is not None:
        lease.release()
    session.seconds["total"] = time.perf_counter() - how.started
    tracked = False
    try:
        tracked = _conclude(session, receipt, tracker, how.error)
    finally:
        _leave(Unsettled(session.supervisor, tracked, how.cause))
    return receipt


def end_run(session: Session, cause: str, *, went_wrong: bool) -> Receipt:
    """End what the run started, whatever goes wrong on the way."""
    with session.stage("teardown"):
        stopping: threading.Thread | None = None
        try:
            announce("ending everything that this run started")
            if session.job is not None and not session.cluster.owned:
                stopping = _in_background(session.job)
            if went_wrong:
                with _told("Ray's own logs"):
                    keep_ray_logs(session)
        finally:
            receipt = session.supervisor.end(cause)
        if stopping is not None:
            stopping.join(STOP_S + 3 * REQUEST_TIMEOUT_S)
    with _told("the receipt"):
        show_receipt(receipt)
    return receipt


def _conclude(
    session: Session, receipt: Receipt, tracker: Tracker | None, error: BaseException | None
) -> bool:
    """Summary, model card, tracking, table: each in its own right, none may hide the run's error.
    True if MLflow has everything, and Prefect what concerns earlier attempts."""
    run = session.run
    summary = session.summary = build_summary(run, receipt, session.seconds, error)
    summary["server_restarts"] = session.restarts
    summary["job_restarts"] = session.job_restarts
    summary["findings"] += _of_sinks(session, summary["findings"])
    if tracker is not None:
        summary["tracking"] = tracker.told
    with _told("the summary"):
        write_summary(run, summary)
    with _told("the model card"):
        write_model_card(run, session.checked, summary)
    with _told("the report"):
        write_report(run.directory)
    if tracker is not None:
        with _told("the end of tracking"):
            summary["mlflow_run_id"] = tracker.finish(summary)
            summary["tracking"] = tracker.told
            write_summary(run, summary)
    with _told("the end of the attempt"):
        end_attempt(run.directory, summary["status"])
    with _told("the summary at the terminal"):
        show_summary(summary)
    complete = tracker is not None and tracker.complete
    return _earlier_are_settled(run) and complete


def _of_sinks(session: Session, known: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was seen while the run was under way and no journal tells: sinks that lag."""
    names = {finding["name"] for finding in known}
    return [asdict(found) for found in session.detection.findings if found.name not in names]


def _earlier_are_settled(run: RunRecord) -> bool:
    try:
        settle_earlier(run.history, run.directory, API_TIMEOUT_S, retries=0)
    except Exception as error:  # Prefect's API may be away
        warn(f"Prefect's states of earlier attempts could not be looked at: {error}")
        return False
    return True


def _leave(run: Unsettled) -> None:
    if flow_run.id:
        UNSETTLED[str(flow_run.id)] = run
    elif run.tracked:
        run.supervisor.settled()


@contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        warn(f"{what} could not be written: {type(error).__name__}: {error}")


def _in_background(job: StudentJob) -> threading.Thread:
    """Stop the job, which may take a minute; the GPUs do not wait for that."""
    context = contextvars.copy_context()
    stopping = threading.Thread(target=context.run, args=(_stop_job, job), daemon=True)
    stopping.start()
    return stopping


def _stop_job(job: StudentJob) -> None:
    try:
        if not job.stop(STOP_S):
            warn(f"Ray job {job.job_id} did not end within {STOP_S:.0f} s; stop it by hand")
    except HTTP_ERRORS as error:
        warn(f"Ray job {job.job_id} could not be stopped: {error}")


def keep_ray_logs(session: Session) -> None:
    """A run that went wrong keeps the ends of Ray's own logs, as many as can be copied in a few
    seconds; the session folder is removed with the head."""
    if session.cluster.temp_dir is None:
        return
    give_up_at = time.monotonic() + KEEP_LOGS_S
    for folder in session.cluster.temp_dir.glob("session_2*/logs"):
        for log in sorted(file for file in folder.rglob("*") if file.is_file()):
            if time.monotonic() > give_up_at:
                return
            kept = session.run.log("ray").with_suffix("") / log.relative_to(folder)
            with suppress(OSError):
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_bytes(_tail(log))


def _tail(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - MOST_OF_A_LOG))
        return file.read(MOST_OF_A_LOG)
