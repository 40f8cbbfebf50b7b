"""The training job: submitted to Ray, followed to its end, stopped if anything else goes wrong."""

from __future__ import annotations

import sys
import time

from prefect import task
from prefect.cache_policies import NO_CACHE

from opd_core.errors import TrainingError
from opd_core.lifecycle.logs import log_tail
from opd_core.tracking.journal import JournalReader
from opd_core.training.files import JOURNAL_FILE
from opd_core.training.jobs import ENDED, StudentJob, connect_jobs, submit_student
from opd_core.training.results import read_result
from tasks.console import TrainingProgress, announce
from tasks.session import Session

POLL_S = 0.5
STATUS_EVERY_S = 2.0
LOG_EVERY_S = 10.0
STUDENT = "student"


@task(name="train student", cache_policy=NO_CACHE)
def train_student(session: Session) -> None:
    """Run the training job; its result is then in the run directory.

    Raises :class:`TrainingError` with the driver's own reason, or the tail of its log.
    """
    config = session.run.config
    with session.stage("cluster_wait"):
        client = connect_jobs(
            session.cluster.address,
            session.cluster.token,
            limit_s=config.ray.startup_limit_s,
            still_alive=session.supervisor.raise_if_dead,
        )
    announce("Ray is up; starting the student's job")
    job = submit_student(
        client,
        job_id=session.run.run_id,
        interpreter=sys.executable,
        run_dir=str(session.run.directory),
    )
    session.job = job
    with session.stage("student_job"):
        _follow(session, job)
    _save_log(session, job)
    result = read_result(session.run.directory)
    if result is None:
        tail = log_tail(session.run.log(STUDENT))
        raise TrainingError(f"the student's job ended ({job.status()}) without a result:\n{tail}")
    if result.status != "completed":
        raise TrainingError(f"{result.error_type}: {result.error}")


def _follow(session: Session, job: StudentJob) -> None:
    reader = JournalReader(session.run.directory / JOURNAL_FILE)
    next_status = next_log = 0.0
    with TrainingProgress(session.run.config.training.steps) as progress:
        while True:
            session.supervisor.raise_if_dead()
            for record in reader.read():
                progress.show(record.train_step, record.metrics)
            now = time.monotonic()
            if now >= next_log:
                _save_log(session, job)
                next_log = now + LOG_EVERY_S
            if now >= next_status:
                if job.status() in ENDED:
                    break
                next_status = now + STATUS_EVERY_S
            time.sleep(POLL_S)
        for record in reader.read():
            progress.show(record.train_step, record.metrics)


def _save_log(session: Session, job: StudentJob) -> None:
    session.run.log(STUDENT).write_text(job.log(), encoding="utf-8")
