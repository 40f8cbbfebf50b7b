"""``opd up`` as a user has it: runs from the form, every way to stop it, and what it finds
again."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule
from prefect.states import Pending, Scheduled

from opd_core.lifecycle.ports import port_is_free, reserve_ports
from tests.operating.conftest import MakeLab
from tests.operating.lab import PROJECT, Lab
from tests.teardown.stage import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SHORT = {"recipe": "tiny", "steps": 2}
ENDLESS = {"recipe": "tiny", "steps": 100_000}


def begin_training(lab: Lab) -> str:
    """A run without end, in its training; its flow run's id."""
    run = lab.start_run("distill", ENDLESS)

    def trains() -> bool:
        assert lab.state(run) not in ("Failed", "Crashed"), lab.said()
        return any(lab.root.glob("*/metrics.jsonl"))

    wait_until(trains, "the first train step", 400)
    return run


def assert_nothing_is_left(lab: Lab) -> None:
    """No process, and no port in use."""
    wait_until(lambda: not lab.left(), f"the end of {lab.left()}", 120)
    assert port_is_free(lab.port)
    assert port_is_free(lab.mlflow_port)


def in_database(file: Path, query: str) -> list[str]:
    """The first column of what a database holds."""
    with sqlite3.connect(file) as connection:
        return [row[0] for row in connection.execute(query)]


def test_a_run_from_the_form_completes_and_its_metrics_and_files_are_in_mlflow(lab: Lab) -> None:
    lab.wait_for(lab.start_run("distill", SHORT), "Completed")
    found = lab.ask_mlflow("runs/search", {"experiment_ids": experiments(lab), "max_results": 1})
    run = found["runs"][0]
    assert run["info"]["status"] == "FINISHED"
    assert "opd_reverse_kl" in str(run["data"]["metrics"])
    files = lab.ask_mlflow(f"artifacts/list?run_id={run['info']['run_id']}")
    assert files["files"]


def experiments(lab: Lab) -> list[str]:
    """The ids of MLflow's experiments."""
    found = lab.ask_mlflow("experiments/search", {"max_results": 10})
    return [each["experiment_id"] for each in found["experiments"]]


def test_ctrl_c_ends_the_run_under_way_and_the_waiting_one_is_run_after_the_next_start(
    make_lab: MakeLab,
) -> None:
    lab = make_lab()
    ended = begin_training(lab)
    waiting = lab.start_run("distill", SHORT)
    lab.wait_for(waiting, "AwaitingConcurrencySlot")

    assert lab.stop(signal.SIGINT) == 0, lab.said()
    assert "stopped; nothing is left" in lab.log.read_text()
    assert_nothing_is_left(lab)
    assert in_database(lab.root / "mlflow.db", "select status from runs") == ["KILLED"]

    lab.start()
    assert lab.state(ended) == "Crashed"
    lab.wait_for(waiting, "Completed")


def test_a_run_that_was_taken_up_and_not_started_is_run_after_the_next_start(
    make_lab: MakeLab,
) -> None:
    lab = make_lab()
    with lab.client() as client:
        # As a worker leaves it that ends between making it Pending and starting its process.
        run = client.create_flow_run_from_deployment(
            lab.deployment_id("distill"),
            parameters={"request": SHORT},
            state=Scheduled(scheduled_time=datetime.now(UTC) + timedelta(hours=1)),
        ).id
        client.set_flow_run_state(run, Pending(), force=True)
    assert lab.stop(signal.SIGINT) == 0, lab.said()
    lab.start()
    lab.wait_for(str(run), "Completed")


def test_a_second_lab_over_the_same_prefect_database_is_refused(lab: Lab, tmp_path: Path) -> None:
    with reserve_ports(2) as reserved:
        ports = [str(port) for port in reserved.ports]
    command = [sys.executable, "-m", "deployments.cli", "up", "--root", str(tmp_path / "runs")]
    environment = {**lab.environment}
    del environment["PREFECT_API_URL"], environment["MLFLOW_TRACKING_URI"]
    second = subprocess.run(
        [*command, "--port", ports[0], "--mlflow-port", ports[1]],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert second.returncode == 2
    assert "a PREFECT_HOME of its own" in " ".join(second.stderr.split())


def test_a_killed_opd_up_leaves_nothing_and_its_run_is_told_as_ended(make_lab: MakeLab) -> None:
    lab = make_lab()
    run = begin_training(lab)
    assert lab.process is not None
    lab.process.kill()
    lab.process.wait()
    assert_nothing_is_left(lab)
    states = in_database(
        lab.folder / "prefect" / "prefect.db",
        f"select state_name from flow_run where id = '{run}'",
    )
    assert states == ["Crashed"]
    assert in_database(lab.root / "mlflow.db", "select status from runs") == ["KILLED"]


def test_a_dead_server_ends_opd_up_with_the_reason(make_lab: MakeLab) -> None:
    lab = make_lab()
    mlflow = next(pid for pid, command in lab.left().items() if "-m mlflow server" in command)
    os.kill(mlflow, signal.SIGKILL)
    process = lab.process
    assert process is not None
    assert process.wait(120) == 1
    said = lab.log.read_text()
    assert "child 'mlflow' was expected to live, but exited with code -9" in said
    assert "Uvicorn running on" in said, "the end of its log is shown"
    assert_nothing_is_left(lab)


def test_what_people_changed_in_the_schedules_outlives_the_next_start(make_lab: MakeLab) -> None:
    lab = make_lab("--at-once", "2")
    deployment = lab.deployment_id("rerun")
    with lab.client() as client:
        shipped = client.read_deployment_schedules(deployment)
        nightly, weekly = sorted(shipped, key=lambda schedule: schedule.slug or "")
        assert (nightly.slug, weekly.slug) == ("nightly", "weekly")
        client.update_deployment_schedule(
            deployment, nightly.id, True, CronSchedule(cron="30 3 * * *")
        )
        client.delete_deployment_schedule(deployment, weekly.id)
        own = DeploymentScheduleCreate(schedule=CronSchedule(cron="0 6 * * *"), active=True)
        client.create_deployment_schedules(deployment, [own])
        limit = client.read_deployment(lab.deployment_id("distill")).global_concurrency_limit
    assert limit is not None
    assert limit.limit == 2
    lab.stop()

    lab.start()
    with lab.client() as client:
        schedules = client.read_deployment_schedules(deployment)
        limit = client.read_deployment(lab.deployment_id("distill")).global_concurrency_limit
    kept = {(each.slug, getattr(each.schedule, "cron", ""), each.active) for each in schedules}
    example = ("weekly", "0 4 * * 0", False)
    assert kept == {("nightly", "30 3 * * *", True), (None, "0 6 * * *", True), example}
    assert limit is not None
    assert limit.limit == 1


def test_servers_that_run_already_are_used_and_left_as_they_are(lab: Lab, tmp_path: Path) -> None:
    environment = {"PREFECT_API_URL": lab.api_url, "MLFLOW_TRACKING_URI": lab.mlflow_url}
    guest = Lab(tmp_path, environment)
    try:
        guest.start()
        assert guest.log.read_text().count("runs already: left as it is") == 2
        assert port_is_free(guest.port)
    finally:
        assert guest.stop() == 0
    assert lab.deployment_id("distill")
    assert experiments(lab)


def test_a_second_opd_up_for_the_same_runs_is_refused(lab: Lab) -> None:
    command = [sys.executable, "-m", "deployments.cli", "up", "--root", str(lab.root)]
    second = subprocess.run(
        command, cwd=PROJECT, env=lab.environment, capture_output=True, text=True, timeout=120
    )
    assert second.returncode == 2
    assert "another is there already" in second.stderr


def test_a_port_in_use_is_told_before_anything_is_started(lab: Lab, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deployments.cli", "up", "--root", str(tmp_path / "runs")]
    environment = {**lab.environment}
    del environment["PREFECT_API_URL"]
    second = subprocess.run(
        [*command, "--port", str(lab.port)],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert second.returncode == 2
    assert f"expected port {lab.port} to be free" in second.stderr
    assert not (tmp_path / "runs").exists()
