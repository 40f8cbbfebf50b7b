"""Reruns on a real server with a real worker: scheduled, cancelled, tried again."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.client.schemas.sorting import ArtifactSort
from prefect.states import AwaitingRetry, Cancelling

from deployments.drill.watching import living
from opd_core.tracking.mlflow_sink import connect
from opd_core.training.attempts import find_flow_run
from tests.operating.lab import Lab
from tests.teardown.stage import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

SEED, OTHER = 1234, 7
RUN_S = 400
"""Within which a run of the tiny recipe ends also on a busy machine."""
SMALL = [
    "deterministic=true",
    "training.steps=2",
    "training.prompts_per_step=8",
    "evaluation.every=2",
    "evaluation.samples=1",
    "tracking.tensorboard=false",
]


def children_of(lab: Lab, flow_run_id: str) -> list[FlowRun]:
    """The runs that a rerun has asked for, by name."""
    parent = FlowRunFilterParentFlowRunId(any_=[UUID(flow_run_id)])
    with lab.client() as client:
        found = client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=parent))
    return sorted(found, key=lambda run: run.name)


def original_of(lab: Lab) -> Path:
    """The directory of a run that has completed."""
    flow_run_id = lab.start_run("distill", {"seed": SEED, "overrides": SMALL})
    lab.wait_for(flow_run_id, "Completed", within_s=RUN_S)
    found = find_flow_run(lab.root, flow_run_id)
    assert found is not None
    return found


def artifacts_of(lab: Lab, flow_run_id: str) -> dict[str, str]:
    """By key; of several the newest, as a run that is tried again makes another."""
    of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[UUID(flow_run_id)]))
    with lab.client() as client:
        found = client.read_artifacts(artifact_filter=of_run, sort=ArtifactSort.CREATED_DESC)
    return {each.key or "": str(each.data) for each in reversed(found)}


def fired_by_schedule(lab: Lab, request: dict[str, Any]) -> str:
    """The run that a schedule of `rerun` with parameters of its own has started."""
    deployment = lab.deployment_id("rerun")
    often = IntervalSchedule(
        interval=timedelta(seconds=60), anchor_date=datetime.now(UTC) + timedelta(seconds=10)
    )
    with lab.client() as client:
        (schedule,) = client.create_deployment_schedules(
            deployment,
            [
                DeploymentScheduleCreate(
                    schedule=often, slug="often", parameters={"request": request}
                )
            ],
        )

    def started() -> list[FlowRun]:
        of_it = DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))
        with lab.client() as client:
            runs = client.read_flow_runs(deployment_filter=of_it)
        return [run for run in runs if run.auto_scheduled and run.state_type == StateType.RUNNING]

    try:
        return str(wait_until(started, "the schedule to fire", 240)[0].id)
    finally:
        with lab.client() as client:
            client.delete_deployment_schedule(deployment, schedule.id)


def test_a_schedule_fires_and_its_reruns_are_in_mlflow_linked_and_compared(lab: Lab) -> None:
    original = original_of(lab)
    parent = fired_by_schedule(lab, {"run": original.name, "seeds": [SEED, OTHER]})
    lab.wait_for(parent, "Reproduced", within_s=2 * RUN_S)
    again, other = children_of(lab, parent)
    assert {again.name, other.name} == {f"tiny · seed {SEED}", f"tiny · seed {OTHER}"}
    message = lab.run(parent).state.message
    assert "the same numbers at all" in message

    client = connect(lab.mlflow_url)
    experiment = client.get_experiment_by_name("opd").experiment_id
    linked = client.search_runs([experiment], f"tags.opd_rerun_of = '{original.name}'")
    kinds = {run.data.tags["opd.kind"]: run for run in linked}
    reruns = [run for run in linked if run.data.tags["opd.kind"] == "run"]
    assert {run.data.tags["opd_rerun"] for run in reruns} == {parent}
    assert {run.data.params["seed"] for run in reruns} == {str(SEED), str(OTHER)}
    flow_runs = {run.data.tags["prefect.flow_run_id"] for run in reruns}
    assert flow_runs == {str(again.id), str(other.id)}
    comparison = kinds["comparison"]
    assert comparison.data.tags["opd.reproduction"] == "reproduced"
    assert {run.data.tags["opd.comparison"] for run in reruns} == {comparison.info.run_id}
    files = {each.path for each in client.list_artifacts(comparison.info.run_id)}
    assert {"comparison.html", "reproduction.json", "reproduction.md"} <= files

    shown = artifacts_of(lab, parent)
    assert message in shown["verdict"]
    assert f"/runs/flow-run/{again.id}" in shown["verdict"]
    assert "comparison.html" in shown["comparison-page"]


@pytest.mark.parametrize("reacts", [True, False])
def test_a_cancelled_rerun_cancels_its_runs_those_under_way_and_those_that_wait(
    lab: Lab, reacts: bool
) -> None:
    long = ["training.steps=2000", *(each for each in SMALL if "steps=" not in each)]
    parent = lab.start_run("rerun", {"seeds": [1, 2], "overrides": long})
    running = wait_until(
        lambda: next(
            (r for r in children_of(lab, parent) if r.state_type == StateType.RUNNING), None
        ),
        "a child under way",
        240,
    )
    directory = wait_until(lambda: find_flow_run(lab.root, str(running.id)), "its directory", 120)
    if not reacts:  # the worker kills it after a while, and runs the flow's hook
        pid = lab.run(parent).infrastructure_pid or ""
        os.kill(int(pid.rpartition(":")[2]), signal.SIGSTOP)
    with lab.client() as client:
        client.set_flow_run_state(UUID(parent), Cancelling())
    lab.wait_for(parent, "Cancelled", within_s=240)
    wait_until(
        lambda: {r.state_type for r in children_of(lab, parent)} == {StateType.CANCELLED},
        "the end of both",
        120,
    )
    wait_until(lambda: not list(living(f"OPD_RUN_ID={directory.name}")), "its processes' end", 120)


def test_a_rerun_that_is_tried_again_takes_up_what_completed(lab: Lab) -> None:
    parent = lab.start_run("rerun", {"seeds": [1, 2], "overrides": SMALL, "width": 1})
    wait_until(lambda: children_of(lab, parent)[1:], "the second after the first", RUN_S)
    first, second = children_of(lab, parent)
    assert first.state_type == StateType.COMPLETED
    with lab.client() as client:
        client.set_flow_run_state(second.id, Cancelling())
    lab.wait_for(parent, "Failed", within_s=RUN_S)
    message = lab.run(parent).state.message
    assert "tiny · seed 2 (Cancelled" in message
    assert "the verdict is made of the others" in message
    with lab.client() as client:
        client.set_flow_run_state(UUID(parent), AwaitingRetry())
    lab.wait_for(parent, "Completed", within_s=2 * RUN_S)
    of_first, *of_second = children_of(lab, parent)
    assert of_first.id == first.id, "it is not run again"
    states = {run.state_type for run in of_second}
    assert states == {StateType.CANCELLED, StateType.COMPLETED}
    assert artifacts_of(lab, parent)["verdict"].count("| rerun |") == 2
