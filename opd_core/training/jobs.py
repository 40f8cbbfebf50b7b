"""The student's driver as a Ray job: submitted, followed, stopped. Nothing else calls the Jobs API.

The flow process never calls ``ray.init``: this is plain HTTP to the cluster's dashboard.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opd_core.errors import ServingError, TrainingError

POLL_S = 0.5
ENDED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})


@dataclass(frozen=True, slots=True)
class StudentJob:
    """A submitted job."""

    client: Any
    job_id: str

    def status(self) -> str:
        """``PENDING``, ``RUNNING``, ``SUCCEEDED``, ``FAILED`` or ``STOPPED``."""
        return str(self.client.get_job_status(self.job_id).value)

    def log(self) -> str:
        """All that the driver and its actors have written so far."""
        return str(self.client.get_job_logs(self.job_id))

    def stop(self, wait_s: float) -> bool:
        """Ask the job to end and wait for it; True if it ended in time."""
        if self.status() not in ENDED:
            self.client.stop_job(self.job_id)
        deadline = time.monotonic() + wait_s
        while self.status() not in ENDED:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


def connect_jobs(
    address: str, token: str | None, *, limit_s: float, still_alive: Callable[[], None]
) -> Any:
    """A Jobs API client, once the cluster answers. ``still_alive`` raises if it never will.

    Raises :class:`ServingError` when ``limit_s`` is over.
    """
    from ray.job_submission import JobSubmissionClient

    headers = {"Authorization": f"Bearer {token}"} if token else None
    deadline = time.monotonic() + limit_s
    while True:
        still_alive()
        try:
            client = JobSubmissionClient(address, headers=headers)
            client.list_jobs()
        except (ConnectionError, RuntimeError) as error:
            if time.monotonic() > deadline:
                raise ServingError(
                    f"the Ray cluster at {address} does not answer after {limit_s:.0f} s: {error}"
                ) from None
            time.sleep(POLL_S)
        else:
            return client


def submit_student(client: Any, *, job_id: str, interpreter: str, run_dir: str) -> StudentJob:
    """Submit the driver of the run in ``run_dir``. Raises :class:`TrainingError`.

    No key travels with it: Ray keeps and shows a job's environment.
    """
    entrypoint = shlex.join([interpreter, "-m", "opd_core.training.driver", run_dir])
    try:
        client.submit_job(entrypoint=entrypoint, submission_id=job_id)
    except RuntimeError as error:
        raise TrainingError(f"the Ray cluster did not take the job: {error}") from None
    return StudentJob(client, job_id)
