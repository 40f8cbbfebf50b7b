"""Makes the deployments known to a Prefect server, and leaves what people have changed there."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleUpdate, WorkPoolCreate
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from deployments.serve import deployments

POOL = "opd"


def register(at_once: int, folder: Path) -> list[str]:
    """Create or update the work pool and every deployment; their full names.

    ``at_once`` experiments run at a time; a flow's relative paths start at ``folder``. A schedule
    that is there already stays as it is: paused, resumed, or with another time.
    """
    made = deployments(at_once)
    with get_client(sync_client=True) as client:
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        for each in made:
            each.job_variables = {"working_dir": str(folder)}
            keep_schedules(each, client)
            each.apply(work_pool_name=POOL)
    return [each.full_name for each in made]


def keep_schedules(deployment: RunnerDeployment, client: SyncPrefectClient) -> None:
    """An update replaces the schedules: put those that are there before the new ones."""
    try:
        known = client.read_deployment_by_name(deployment.full_name).schedules
    except ObjectNotFound:
        return
    there = {schedule.slug for schedule in known}
    new = [each for each in deployment.schedules or [] if each.slug not in there]
    fields = {"slug", "schedule", "active", "parameters", "max_scheduled_runs"}
    kept = [DeploymentScheduleUpdate(**each.model_dump(include=fields)) for each in known]
    deployment.schedules = [*kept, *new]


def last_heartbeat(name: str) -> datetime | None:
    """When the pool has last heard of this worker, by the server's clock; None if never.

    A worker's status does not tell whether it lives: the server says ONLINE until three heartbeats
    have been missed.
    """
    with get_client(sync_client=True) as client:
        workers = client.read_workers_for_work_pool(POOL)
    return next((each.last_heartbeat_time for each in workers if each.name == name), None)
