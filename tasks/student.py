"""The training job: submitted to Ray and followed to its end."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

from prefect import task
from prefect.cache_policies import NO_CACHE

from opd_core.errors import TrainingError
from opd_core.lifecycle.logs import log_tail
from opd_core.tracking.journal import JournalReader
from opd_core.training.files import JOURNAL_FILE, write_whole
from opd_core.training.jobs import ENDED, HTTP_ERRORS, StudentJob, connect_jobs
from opd_core.training.results import read_result
from tasks.console import TrainingProgress, announce
from tasks.session import Session

POLL_S = 0.5
STATUS_EVERY_S = 2.0
LOG_EVERY_S = 10.0
FAILED_POLLS = 10
"""So many status calls in a row may fail before the cluster is given up."""
STUDENT = "student"


@task(name="train student", cache_policy=NO_CACHE)
def train_student(session: Session) -> None:
    """Run the training job; its result is then in the run directory.

    Raises :class:`TrainingError` with the driver's own reason, or the tail of its log. Whatever is
    raised, the session ends the job.
    """
    with session.stage("cluster_wait"):
        client = connect_jobs(
            session.cluster.address,
            session.cluster.token,
            limit_s=session.run.config.ray.startup_limit_s,
            still_alive=session.still_alive,
        )
    announce("Ray is up; starting the student's job")
    job = session.job = StudentJob(client, session.run.run_id)
    job.submit(sys.executable, str(session.run.directory))
    try:
        with session.stage("student_job"):
            status = _follow(session, job)
    finally:
        save_log(session, job)
    result = read_result(session.run.directory)
    if result is None:
        tail = log_tail(session.run.log(STUDENT))
        raise TrainingError(f"the student's job ended ({status}) without a result:\n{tail}")
    if result.status != "completed":
        raise TrainingError(f"{result.error_type}: {result.error}")


def save_log(session: Session, job: StudentJob) -> None:
    """Bring the job's log into the run directory; a failure costs nothing but the log's end."""
    with suppress(*HTTP_ERRORS):
        write_whole(session.run.log(STUDENT), job.log())


def _follow(session: Session, job: StudentJob) -> str:
    """Show progress until the job has ended; its last status."""
    reader = JournalReader(session.run.directory / JOURNAL_FILE)
    next_status = next_log = 0.0
    status, failed = "PENDING", 0
    with TrainingProgress(session.run.config.training.steps) as progress:
        while status not in ENDED:
            session.still_alive()
            now = time.monotonic()
            if now >= next_log:
                save_log(session, job)
                next_log = now + LOG_EVERY_S
            if now >= next_status:
                next_status = now + STATUS_EVERY_S
                try:
                    status, failed = job.status(), 0
                except HTTP_ERRORS as error:
                    failed += 1
                    if failed >= FAILED_POLLS:
                        raise TrainingError(f"Ray no longer answers: {error}") from None
            for record in reader.read():
                progress.show(record.train_step, record.metrics)
            time.sleep(POLL_S)
    return status
