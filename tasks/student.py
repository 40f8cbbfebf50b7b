"""The training job: submitted to Ray and followed to its end."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any, Self

from prefect import task
from prefect.cache_policies import NO_CACHE

from opd_core.errors import TrainingError
from opd_core.lifecycle.logs import log_tail
from opd_core.tracking.journal import JournalReader
from opd_core.training.files import JOURNAL_FILE
from opd_core.training.jobs import ENDED, HTTP_ERRORS, StudentJob, connect_jobs
from opd_core.training.results import read_result
from opd_core.whole_file import write_whole
from tasks.console import TrainingProgress, announce
from tasks.session import Session
from tasks.watch import TeacherWatch

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
        with session.stage("student_job"), _Follower(session, job) as follower:
            status = follower.to_its_end()
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


class _JobEnded(Exception):
    """Leaves a wait that the job's end has made vain."""


class _Follower:
    """Shows a job's progress and looks after its teachers until it has ended."""

    def __init__(self, session: Session, job: StudentJob) -> None:
        self._session = session
        self._job = job
        self._reader = JournalReader(session.run.directory / JOURNAL_FILE)
        self._progress = TrainingProgress(session.run.config.training.steps)
        self._watch = TeacherWatch(session)
        self._next_status = self._next_log = 0.0
        self._status, self._failed = "PENDING", 0

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._progress.__exit__(*raised)
        self._watch.close()

    def to_its_end(self) -> str:
        """The job's last status. Raises :class:`TrainingError` if the cluster no longer answers,
        :class:`~opd_core.errors.ServingError` for a teacher that cannot be helped."""
        with suppress(_JobEnded):
            while True:
                self._turn()
                self._watch.turn(self._turn)
                time.sleep(POLL_S)
        return self._status

    def _turn(self) -> None:
        """One look at the job; raises :class:`_JobEnded` once it has ended."""
        self._session.still_alive(but=self._watch.children)
        now = time.monotonic()
        if now >= self._next_log:
            save_log(self._session, self._job)
            self._next_log = now + LOG_EVERY_S
        if now >= self._next_status:
            self._next_status = now + STATUS_EVERY_S
            self._ask_status()
        for record in self._reader.read():
            self._progress.show(record.train_step, record.metrics)
        if self._status in ENDED:
            raise _JobEnded

    def _ask_status(self) -> None:
        try:
            self._status, self._failed = self._job.status(), 0
        except HTTP_ERRORS as error:
            self._failed += 1
            if self._failed >= FAILED_POLLS:
                raise TrainingError(f"Ray no longer answers: {error}") from None
