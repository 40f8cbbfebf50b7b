"""The training job: submitted to Ray and followed to its end."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any, Self

from prefect import task
from prefect.cache_policies import NO_CACHE

from opd_core.errors import ClusterLost, DataError, ServingError, TrainingError
from opd_core.lifecycle.logs import log_tail
from opd_core.tracking.journal import JournalReader, JournalRecord
from opd_core.training.files import JOURNAL_FILE, PHASE_FILE, RESULT_FILE, SCORING_FILE
from opd_core.training.jobs import ENDED, HTTP_ERRORS, StudentJob, connect_jobs, next_job
from opd_core.training.results import RunResult, read_result
from opd_core.whole_file import write_whole
from tasks.cluster import HEAD, head_is_dead, start_head
from tasks.console import TrainingProgress, announce, warn
from tasks.ending import keep_ray_logs
from tasks.names import of_session, training
from tasks.samplers import revive_samplers
from tasks.session import Session
from tasks.watch import ServerWatch

POLL_S = 0.5
STATUS_EVERY_S = 2.0
LOG_EVERY_S = 10.0
FAILED_POLLS = 10
"""So many status calls in a row may fail before the cluster is given up."""


def train_student(session: Session) -> None:
    """Run the training job; its result is then in the run directory. A job that dies is started
    again, also on another Ray head if that died, at most ``training.max_restarts`` times; the
    servers stay up meanwhile.

    Raises :class:`TrainingError` with the driver's own reason, or the tail of its log. Whatever is
    raised, the session ends the job.
    """
    retries = session.run.config.training.max_restarts
    try_training.with_options(retries=retries, retry_condition_fn=_has_lost_its_cluster)(session)


def _has_lost_its_cluster(_task: Any, _task_run: Any, state: Any) -> bool:
    return isinstance(state.data, ClusterLost)


@task(name="train student", task_run_name=of_session(training), cache_policy=NO_CACHE)
def try_training(session: Session) -> None:
    """Prefect tries it again after a :class:`ClusterLost`: in this process, so with this session
    and its servers."""
    if session.job_restarts:
        _renew_cluster(session)
    try:
        _train_on_cluster(session)
    except (ClusterLost, ServingError) as error:
        died = head_is_dead(session)
        if not (died or isinstance(error, ClusterLost)):
            raise
        short = "the run's Ray head died" if died else str(error)
        _check_restarts(session, short, str(error))
        session.job_restarts += 1
        raise ClusterLost(str(error)) from None


def _renew_cluster(session: Session) -> None:
    """A new head in place of the run's own, which is ended with all that ran on it; an existing
    cluster may have come back. A job that ended in the middle may have left servers unfit."""
    if session.cluster.owned:
        session.stop(HEAD)
        keep_ray_logs(session)
        start_head(session)
    revive_samplers(session)


def _train_on_cluster(session: Session) -> None:
    with session.stage("cluster_wait"):
        client = connect_jobs(
            session.cluster.address,
            session.cluster.token,
            limit_s=session.run.config.ray.startup_limit_s,
            still_alive=session.still_alive,
        )
    announce("Ray is up; starting the student's job")
    with session.stage("student_job"):
        run_jobs(session, client)


def run_jobs(session: Session, client: Any) -> None:
    """Jobs on the cluster of ``client``, until one completes the training."""
    progress = TrainingProgress(session.run.config.training.steps)
    reader = JournalReader(session.run.directory / JOURNAL_FILE)
    earlier = _read(reader)
    session.detection.skip(earlier)
    for record in earlier:
        progress.skip(record.train_step, record.metrics)
    with progress:
        while not _run_job(session, client, reader, progress):
            session.job_restarts += 1
            revive_samplers(session)


def _run_job(
    session: Session, client: Any, reader: JournalReader, progress: TrainingProgress
) -> bool:
    """One job to its end: True if it completed the training, False if it died and may be started
    again. Raises :class:`TrainingError` for any other end."""
    directory = session.run.directory
    for stale in (RESULT_FILE, SCORING_FILE, PHASE_FILE):
        (directory / stale).unlink(missing_ok=True)
    job = session.job = next_job(client, session.run.run_id)
    if not session.cluster.owned:  # it outlives this process, so the reaper must know of it
        session.note("ray_job", address=session.cluster.address, job_id=job.job_id)
    job.submit(sys.executable, str(directory))
    try:
        with _Follower(session, job, reader, progress) as follower:
            status = follower.to_its_end()
    finally:
        save_log(session, job)
    result = read_result(directory)
    if result is not None and result.status == "completed":
        return True
    _tell_restart(session, result, status)
    return False


def _tell_restart(session: Session, result: RunResult | None, status: str) -> None:
    """Say why the job died. Raises :class:`TrainingError` if it is not to be started again."""
    if result is None:
        short = f"it ended ({status}) without a result"
        said = f"the student's job ended ({status}) without a result:\n{log_tail(session.job_log)}"
        restartable = status != "STOPPED"  # that is somebody's wish
    else:
        said = short = f"{result.error_type}: {result.error}"
        restartable = result.restartable
    if not restartable:
        raise TrainingError(said)
    _check_restarts(session, f"the student's job died ({short})", said)


def _check_restarts(session: Session, short: str, said: str) -> None:
    """Tell that the job is started again. Raises :class:`TrainingError` if it may not be."""
    limit, done = session.run.config.training.max_restarts, session.job_restarts
    if done >= limit:
        again = f"the job was started again {done} times already (training.max_restarts)"
        raise TrainingError(f"{said}\n{again}")
    warn(f"{short}; starting it again from its last checkpoint, {done + 1} of {limit}")


def save_log(session: Session, job: StudentJob) -> None:
    """Bring the job's log into the run directory; a failure costs nothing but the log's end."""
    with suppress(*HTTP_ERRORS):
        write_whole(session.job_log, job.log())


def _read(reader: JournalReader) -> list[JournalRecord]:
    """What is new in the journal. Raises :class:`TrainingError`: by now something was started."""
    try:
        return reader.read()
    except DataError as error:
        raise TrainingError(f"the metrics journal cannot be read: {error}") from None


class _JobEnded(Exception):
    """Leaves a wait that the job's end has made vain."""


class _Follower:
    """Shows a job's progress and looks after its servers until it has ended."""

    def __init__(
        self, session: Session, job: StudentJob, reader: JournalReader, progress: TrainingProgress
    ) -> None:
        self._session = session
        self._job = job
        self._reader = reader
        self._progress = progress
        self._watch = ServerWatch(session)
        self._next_status = self._next_log = 0.0
        self._status, self._failed = "PENDING", 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._watch.close()

    def to_its_end(self) -> str:
        """The job's last status. Raises :class:`TrainingError` if the cluster no longer answers,
        :class:`~opd_core.errors.ServingError` for a server that cannot be helped."""
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
        records = _read(self._reader)
        for record in records:
            self._progress.show(record.train_step, record.metrics)
        self._session.detection.see(records, self._session.shipping())
        if self._status in ENDED:
            raise _JobEnded

    def _ask_status(self) -> None:
        try:
            self._status, self._failed = self._job.status(), 0
        except HTTP_ERRORS as error:
            self._failed += 1
            if self._failed >= FAILED_POLLS:
                raise ClusterLost(f"Ray no longer answers: {error}") from None
