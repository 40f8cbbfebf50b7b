"""Stages that are entered again: what was done stays done, and a teacher that lives is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deployments.drill.striking import strike
from deployments.drill.watching import RunView, answers_well
from opd_core.lifecycle.ledger import read_ledger
from opd_core.lifecycle.ports import reserve_ports
from tasks.checks import KEPT_CHECKS
from tests.teardown.stage import ROOT, Prefect, environment_in, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

StartRun = Callable[..., Any]
STEPS = 40
QUICK = (
    f"training.steps={STEPS}",
    "training.prompts_per_step=32",
    "training.checkpoint_every=2",
    "data.evaluation_rows=16",
    "evaluation.samples=1",
)
FAILS_AT_ONCE = "training.max_restarts=0"
LIMIT_S = 400.0
ASK_TWICE = """
import sys
from prefect import flow
from opd_core.recipe import load_recipe
from tasks.checks import KEPT_CHECKS, check_files

@flow
def check(*overrides: str) -> None:
    config = load_recipe("deployments/recipes/tiny.yaml", [f"run.root={sys.argv[1]}", *overrides])
    print("found", check_files(config).problems)
    kept.extend((config.run.root_dir / KEPT_CHECKS).glob("*"))

kept = []
check("seed=1")
check("seed=2")
kept[0].write_text(kept[0].read_text().replace("student", "nobody"))
check()
kept[0].write_text("half a fi")
check()
check("sampling.max_new_tokens=300")
check("sampling.max_new_tokens=300")
"""


def trained(run: RunView) -> list[int]:
    """The train steps in the journal, as often as they are there."""
    records = map(json.loads, (run.directory / "metrics.jsonl").read_text().splitlines())
    return [r["train_step"] for r in records if "time/step_s" in r["metrics"]]


def kill_driver(run: RunView) -> None:
    """End the process of the student's job, and nothing else."""
    for pid in run.processes():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"opd_core.training.driver" in words:  # its shell has all of it in one word
            os.kill(pid, signal.SIGKILL)
            return
    pytest.fail("no driver")


@dataclass
class Office:
    """A Prefect server with one process worker. The runs of one test lie under ``root``."""

    prefect: Prefect
    deployment: str
    root: Path

    def start(self, **request: Any) -> str:
        """Start a flow run by the deployment's form; its id."""
        overrides = [*request.pop("overrides", ()), f"run.root={self.root}"]
        return self.prefect.start_run(self.deployment, {"overrides": overrides, **request})

    def run(self) -> RunView:
        """The one run."""
        found: list[Path] = wait_until(lambda: list(self.root.glob("*/run.json")), "a run", LIMIT_S)
        (file,) = found
        return RunView(file.parent)

    def await_state(self, flow_run_id: str, wanted: str) -> None:
        """Wait for a type of state; fails if it ends in another one."""

        def reached() -> bool:
            state = self.prefect.ask("GET", f"/flow_runs/{flow_run_id}")["state"]
            final = state["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
            assert state["type"] == wanted or not final, state
            return bool(state["type"] == wanted)

        wait_until(reached, f"{wanted} of {flow_run_id}", LIMIT_S, pause_s=1)

    def fail_in_training(self, flow_run_id: str) -> RunView:
        """Let a run fail that may not start its job again."""
        run = self.run()
        wait_until(lambda: run.trained_steps() >= 3, "three train steps", LIMIT_S)
        kill_driver(run)
        self.await_state(flow_run_id, "FAILED")
        return run

    def states_of(self, task: str, flow_run_id: str) -> list[tuple[str, int]]:
        """State and run count of all its task runs of that name, in the order of their start."""
        return task_states(self.prefect, task, flow_run_id)


def task_states(prefect: Prefect, task: str, flow_run_id: str) -> list[tuple[str, int]]:
    """State and run count of a flow run's task runs of that name, in the order of their start."""
    question = {"flow_runs": {"id": {"any_": [flow_run_id]}}, "sort": "EXPECTED_START_TIME_ASC"}
    runs = prefect.ask("POST", "/task_runs/filter", question)
    mine = [run for run in runs if run["task_key"].startswith(task)]
    return [(run["state"]["name"], run["run_count"]) for run in mine]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment_in(tmp_path_factory.mktemp("reentry"))


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    server = Prefect(tmp_path_factory.mktemp("prefect"))
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def office(prefect: Prefect, environment: dict[str, str], tmp_path: Path) -> Iterator[Office]:
    deployment = prefect.deployment("distill-opd") or prefect.deploy("opd")
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "opd"]
    with (tmp_path / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            [*command, "--type", "process"],
            cwd=ROOT,
            env={**environment, "PREFECT_API_URL": prefect.url},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield Office(prefect, deployment, tmp_path / "runs")
    finally:
        worker.kill()  # the guard of a run that a failed test left ends it
        worker.wait()


@pytest.fixture
def external(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A teacher that no run has started: its endpoint and its process."""
    with reserve_ports(1) as reserved:
        (port,) = reserved.ports
    model = ROOT / "deployments/recipes/assets/tiny/teacher"
    command = [sys.executable, "-m", "opd_core.serving.embedded"]
    with (tmp_path / "teacher.log").open("wb") as log:
        teacher = subprocess.Popen(
            [*command, "--model-path", str(model), "--port", str(port)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: answers_well(port), "the teacher", LIMIT_S)
        yield f"http://127.0.0.1:{port}", teacher
    finally:
        teacher.kill()
        teacher.wait()


def test_a_dead_ray_head_is_replaced_and_the_teacher_stays(opd: StartRun, prefect: Prefect) -> None:
    started = opd(*QUICK, api=prefect.url)
    started.wait_for(lambda: started.trained_steps() >= 3, "three train steps")
    run = RunView(started.directory())
    (teacher,) = run.started("teacher")
    strike("kill-ray-head", run)
    assert started.finish() == 0, started.output()
    assert "the run's Ray head died; starting it again from its last" in started.output()
    assert run.started("teacher") == [teacher]
    first, second = run.started("ray")
    assert first != second
    assert trained(run) == list(range(1, STEPS + 1))
    assert run.json_file("summary.json")["job_restarts"] == 1
    assert started.json_file("receipt.json")["clean"]
    assert run.leftovers().none
    assert task_states(prefect, "try_training", run.flow_run_id()) == [("Completed", 2)]


def test_a_failed_run_that_is_retried_in_the_ui_does_not_check_its_files_again(
    office: Office,
) -> None:
    flow_run_id = office.start(overrides=[*QUICK, FAILS_AT_ONCE])
    run = office.fail_in_training(flow_run_id)
    retry = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
    office.prefect.ask("POST", f"/flow_runs/{flow_run_id}/set_state", {"state": retry})
    office.await_state(flow_run_id, "COMPLETED")
    assert office.run().directory == run.directory
    attempts = run.json_file("run.json")["attempts"]
    assert [attempt["status"] for attempt in attempts] == ["failed", "completed"]
    assert {attempt["flow_run_id"] for attempt in attempts} == {flow_run_id}
    checks = office.states_of("check_models_and_data", flow_run_id)
    assert [name for name, _ in checks] == ["Completed", "Cached"]
    assert [name for name, _ in office.states_of("check_environment", flow_run_id)] == [
        "Completed",
        "Completed",
    ]
    before = read_ledger(run.directory / "attempts" / "1" / "ledger.jsonl")
    (teacher,) = (
        record.facts["pid"]
        for record in before
        if record.event == "child_started" and record.facts["kind"] == "teacher"
    )
    assert run.started("teacher") != [teacher]
    assert trained(run) == list(range(1, STEPS + 1))
    assert run.leftovers().none


def test_a_run_goes_on_from_training_as_another_flow_run_with_the_external_teacher(
    office: Office, external: tuple[str, subprocess.Popen[bytes]]
) -> None:
    endpoint, teacher = external
    failed = office.start(teacher_endpoint=endpoint, overrides=[*QUICK, FAILS_AT_ONCE])
    run = office.fail_in_training(failed)
    done = len(trained(run))
    again = office.start(resume=run.run_id)
    office.await_state(again, "COMPLETED")
    assert [attempt["flow_run_id"] for attempt in run.json_file("run.json")["attempts"]] == [
        failed,
        again,
    ]
    assert [name for name, _ in office.states_of("check_models_and_data", again)] == ["Cached"]
    assert run.started("teacher") == []
    assert run.json_file("teachers.json")["teacher"]["endpoints"] == [endpoint]
    assert teacher.poll() is None
    assert trained(run) == list(range(1, STEPS + 1))
    assert done < STEPS
    assert run.leftovers().none


def test_what_was_found_of_files_is_used_until_it_is_damaged_and_a_refusal_is_never_kept(
    prefect: Prefect, environment: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK_TWICE, str(tmp_path)],
        cwd=ROOT,
        env={**environment, "PREFECT_API_URL": prefect.url},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout + done.stderr
    assert [line.startswith("found []") for line in done.stdout.splitlines()] == [True] * 4 + [
        False
    ] * 2
    assert told.count("Finished in state Cached") == 2  # the second, and the third in vain
    assert told.count("are as they were when they were last checked") == 1
    assert len(list((tmp_path / KEPT_CHECKS).iterdir())) == 1
