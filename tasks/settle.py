"""Write what a run's flow could not write any more: ``python -m tasks.settle RUN_DIR PREFECT_API``.

The run's supervisor starts this when the flow has died without a last word, the reaper later and
again. Everything is read from the run directory, and what is there already is left as it is. Status
0: all is written; 1: not yet, and each line on standard error says what is lacking and why. Its
caller kills it after two minutes, so every wait here is bounded.
"""

from __future__ import annotations

import fcntl
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from opd_core.errors import OPDError, ServingError
from opd_core.lifecycle.ledger import LEDGER_FILE, read_ledger
from opd_core.lifecycle.records import RECEIPT_FILE, Receipt, read_receipt
from opd_core.quiet import apply_defaults
from opd_core.training.attempts import end_attempt, read_history
from opd_core.training.files import RUN_FILE, SUMMARY_FILE
from opd_core.training.jobs import HTTP_ERRORS, StudentJob, connect_jobs
from tasks.environment import RunRecord
from tasks.flow_state import RunEnd, api_states, settle_earlier, settle_flow_run
from tasks.late_tracking import track_late
from tasks.temporary_server import configured_api, ensure_prefect_api, lasting_api
from tasks.tracking import (
    Tracker,
    late_status,
    late_summary,
    load_run,
    read_summary,
    write_summary,
)

ALL_S = 105.0
"""All of it together, a little less than the caller allows."""
TRACKING_S = 45.0
LEAST_TRACKING_S = 5.0
STOP_JOB_S = 15.0
SERVER_START_S = 45.0
API_TIMEOUT_S = 10.0
CONFIGURED = "env"
"""In place of Prefect's API: the one that environment and profile name."""


class Lacking(OPDError):
    """Something of a run could not be settled."""


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


def settle_command(directory: Path) -> tuple[str, ...]:
    """The program that settles a run of this process. Everybody can read its arguments, so an API
    whose URL holds a password is not among them: it must be the one that is configured then."""
    api = lasting_api()
    told = CONFIGURED if "@" in urlsplit(api).netloc else api
    return sys.executable, "-m", "tasks.settle", str(directory), told


def main(arguments: list[str]) -> int:
    """Settle the run in the directory that is named first; then Prefect's API."""
    directory, api = arguments
    apply_defaults()
    with nullcontext() if api == CONFIGURED else configured_api(api):
        reasons = settle(Path(directory).absolute())
    for reason in reasons:
        print(reason, file=sys.stderr, flush=True)
    return 1 if reasons else 0


def settle(directory: Path, tracking_s: float = TRACKING_S) -> list[str]:
    """Write what is lacking of the run in ``directory``; returns why it could not be done. MLflow
    has ``tracking_s`` to take everything."""
    reasons = Reasons()
    if not (directory / RUN_FILE).is_file():
        print(f"{directory}: the run directory was removed, nothing can be written from it")
        return reasons
    with reasons.of("the run"), _alone(directory):
        _settle(directory, reasons, tracking_s)
    return reasons


def _settle(directory: Path, reasons: Reasons, tracking_s: float) -> None:
    give_up_at = time.monotonic() + ALL_S
    receipt = read_receipt(directory)
    assert receipt is not None, "whoever holds its lock has found it"
    tracking: _Tracking | None = None
    with reasons.of("the ledger"):
        for address, job_id in _cluster_jobs(receipt.run_id, directory):
            with reasons.of(f"Ray job {job_id} at {address}"):
                _stop_job(address, job_id)
    with reasons.of("the run directory"):
        tracking = _Tracking.start(load_run(directory), receipt, reasons)
    with reasons.of("Prefect"):
        _settle_in_prefect(directory, receipt)
    if tracking is not None:
        left_s = max(min(tracking_s, give_up_at - time.monotonic()), LEAST_TRACKING_S)
        tracking.finish(left_s, reasons)


@dataclass(frozen=True, slots=True)
class _Tracking:
    """A run's summary on its way to everywhere."""

    run: RunRecord
    summary: dict[str, Any]
    tracker: Tracker

    @classmethod
    def start(cls, run: RunRecord, receipt: Receipt, reasons: Reasons) -> _Tracking:
        summary = _summary(run, receipt, reasons)
        return cls(run, summary, track_late(run, str(summary["status"])))

    def finish(self, within_s: float, reasons: Reasons) -> None:
        mlflow_run_id = self.tracker.finish(self.summary, within_s)
        reasons.extend(self.tracker.lacking)
        if mlflow_run_id and self.summary["mlflow_run_id"] != mlflow_run_id:
            with reasons.of("the summary"):
                write_summary(self.run, self.summary | {"mlflow_run_id": mlflow_run_id})


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One process at a time. Raises :class:`Lacking` also while the run has no receipt."""
    try:
        receipt = (directory / RECEIPT_FILE).open("r+b")  # NFS locks only what can be written
    except FileNotFoundError:
        raise Lacking(f"expected {directory / RECEIPT_FILE}: it has not ended yet") from None
    with receipt:
        try:
            fcntl.flock(receipt, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Lacking("another process is settling it right now") from None
        yield


def _cluster_jobs(run_id: str, directory: Path) -> list[tuple[str, str]]:
    """The run's jobs on a cluster that is not its own, each with the cluster's address."""
    ledger = read_ledger(directory / LEDGER_FILE)
    noted = [record.facts for record in ledger if record.event == "ray_job"]
    jobs = dict.fromkeys((str(job["address"]), str(job["job_id"])) for job in noted)
    return [job for job in jobs if job[1] == run_id or job[1].startswith(f"{run_id}-")]


def _stop_job(address: str, job_id: str) -> None:
    """Raises :class:`Lacking` if the job may still run."""
    try:
        client = connect_jobs(address, None, limit_s=0.0, still_alive=lambda: None)
        if not StudentJob(client, job_id).stop(STOP_JOB_S):
            raise Lacking(f"it did not end within {STOP_JOB_S:.0f} s; stop it by hand")
    except (ServingError, *HTTP_ERRORS) as error:
        if not _refuses(address):
            raise Lacking(f"it could not be stopped: {error}") from None
        print(f"Ray job {job_id}: nothing listens at {address} any more")


def _refuses(address: str) -> bool:
    where = urlsplit(address)
    try:
        port = where.port or {"https": 443}.get(where.scheme, 80)
        with socket.create_connection((where.hostname, port), timeout=5):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


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


def _settle_in_prefect(directory: Path, receipt: Receipt) -> None:
    """Needs no more than ``run.json`` and the receipt: what else is damaged is no matter."""
    history = read_history(directory)
    if not any(attempt.flow_run_id for attempt in history.attempts):
        return
    ensure_prefect_api(SERVER_START_S)
    latest = history.attempts[-1]
    if latest.flow_run_id:
        status = latest.status or late_status(receipt)
        end = RunEnd(receipt.cause, status, latest.started_at, directory)
        with api_states(latest.flow_run_id, API_TIMEOUT_S, retries=1) as states:
            settle_flow_run(states, end)
            states.keep_receipt(receipt)
    settle_earlier(history, directory, API_TIMEOUT_S, retries=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
