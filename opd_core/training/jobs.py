"""The student's driver as a Ray job: submitted, followed, stopped. Nothing else calls the Jobs API.

The flow process never calls ``ray.init``: this is plain HTTP to the cluster's dashboard.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opd_core.errors import ClusterLost, ServingError, TrainingError

POLL_S = 0.5
STOP_S = 30.0
REQUEST_TIMEOUT_S = 10.0
ENDED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
HTTP_ERRORS = (RuntimeError, OSError)
"""What the SDK raises: its own RuntimeError, and requests' errors, which are OSErrors."""


@dataclass(frozen=True, slots=True)
class StudentJob:
    """A job by its id, which is known before it is submitted. Methods raise :data:`HTTP_ERRORS`."""

    client: Any
    job_id: str

    def submit(self, interpreter: str, run_dir: str) -> None:
        """Submit the driver of the run in ``run_dir``. Raises :class:`ClusterLost`.

        No key travels with it: Ray keeps and shows a job's environment.
        """
        entrypoint = shlex.join(job_command(interpreter, run_dir))
        try:
            self.client.submit_job(entrypoint=entrypoint, submission_id=self.job_id)
        except HTTP_ERRORS as error:
            raise ClusterLost(f"the Ray cluster did not take the job: {error}") from None

    def status(self) -> str:
        """``PENDING``, ``RUNNING``, ``SUCCEEDED``, ``FAILED`` or ``STOPPED``."""
        return str(self.client.get_job_status(self.job_id).value)

    def log(self) -> str:
        """All that the driver and its actors have written so far."""
        return str(self.client.get_job_logs(self.job_id))

    def stop(self, wait_s: float) -> bool:
        """Ask the job to end and wait for it; True if it ended in time, or never began."""
        if all(job.submission_id != self.job_id for job in self.client.list_jobs()):
            return True
        if self.status() not in ENDED:
            self.client.stop_job(self.job_id)
        deadline = time.monotonic() + wait_s
        while self.status() not in ENDED:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


def job_command(interpreter: str, run_dir: str) -> tuple[str, ...]:
    """The driver of the run in ``run_dir``."""
    return interpreter, "-m", "opd_core.training.driver", run_dir


def next_job(client: Any, run_id: str) -> StudentJob:
    """The run's next job, under an id that this cluster has not seen: ``<run_id>``, ``<run_id>-2``…

    An earlier one that still runs (its flow was killed, on a cluster that lives on) is stopped: two
    drivers would write into one run directory. Raises :class:`TrainingError` if it does not end,
    :class:`ClusterLost`.
    """
    number = 1
    job = StudentJob(client, run_id)
    try:
        taken = {job.submission_id for job in client.list_jobs()}
        while job.job_id in taken:
            if not job.stop(STOP_S):
                raise TrainingError(
                    f"Ray job {job.job_id}, an earlier one of this run, does not end; stop it"
                )
            number += 1
            job = StudentJob(client, f"{run_id}-{number}")
    except HTTP_ERRORS as error:
        raise ClusterLost(f"the Ray cluster's jobs cannot be asked for: {error}") from None
    return job


def connect_jobs(
    address: str, token: str | None, *, limit_s: float, still_alive: Callable[[], None]
) -> Any:
    """A Jobs API client, once the cluster answers. ``still_alive`` raises if it never will.

    Raises :class:`ServingError` when ``limit_s`` is over.
    """
    from ray.job_submission import JobSubmissionClient

    class PatientClient(JobSubmissionClient):  # type: ignore[misc]
        """The SDK's requests have no time-out of their own."""

        def _do_request(self, *args: Any, **kwargs: Any) -> Any:
            return super()._do_request(*args, **{"timeout": REQUEST_TIMEOUT_S, **kwargs})

    headers = {"Authorization": f"Bearer {token}"} if token else None
    deadline = time.monotonic() + limit_s
    while True:
        still_alive()
        try:
            client = PatientClient(address, headers=headers)
            client.list_jobs()
        except HTTP_ERRORS as error:
            if time.monotonic() > deadline:
                raise ServingError(
                    f"the Ray cluster at {address} does not answer after {limit_s:.0f} s: {error}"
                ) from None
            time.sleep(POLL_S)
        else:
            return client
