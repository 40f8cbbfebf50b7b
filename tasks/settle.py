"""Write what a run's flow could not write any more: ``python -m tasks.settle RUN_DIR PREFECT_API``.

The run's supervisor starts this when the flow has died without a last word, the reaper later and
again. Everything is read from the run directory, and what is there already is left as it is. Status
0: all is written; 1: not yet, and each line on standard error says what is lacking and why. Its
caller kills it after two minutes, so every wait here is bounded.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from urllib.parse import urlsplit

from opd_core.errors import OPDError, ServingError
from opd_core.lifecycle.ledger import LEDGER_FILE, read_ledger
from opd_core.lifecycle.records import Receipt, read_receipt
from opd_core.quiet import apply_defaults
from opd_core.training.alone import alone
from opd_core.training.attempts import read_history
from opd_core.training.files import RUN_FILE
from opd_core.training.jobs import HTTP_ERRORS, StudentJob, connect_jobs
from tasks.flow_state import RunEnd, api_states, settle_earlier, settle_flow_run
from tasks.late_tracking import LateTracking, Reasons
from tasks.summary import late_status
from tasks.temporary_server import configured_api, ensure_prefect_api, lasting_api
from tasks.tracking import load_run

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
    """Something of a run could not be written where it belongs."""


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
    with reasons.of("the run"), alone(directory):
        _settle(directory, reasons, tracking_s)
    return reasons


def _settle(directory: Path, reasons: Reasons, tracking_s: float) -> None:
    give_up_at = time.monotonic() + ALL_S
    receipt = read_receipt(directory)
    assert receipt is not None, "whoever holds its lock has found it"
    tracking: LateTracking | None = None
    with reasons.of("the ledger"):
        for address, job_id in _cluster_jobs(receipt.run_id, directory):
            with reasons.of(f"Ray job {job_id} at {address}"):
                _stop_job(address, job_id)
    with reasons.of("the run directory"):
        tracking = LateTracking.believing(load_run(directory), receipt, reasons)
    with reasons.of("Prefect"):
        _settle_in_prefect(directory, receipt)
    if tracking is not None:
        tracking.write_report()
        left_s = max(min(tracking_s, give_up_at - time.monotonic()), LEAST_TRACKING_S)
        tracking.write_down(tracking.finish(left_s, reasons), reasons)


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
