"""One on-policy-distillation experiment, from its checks to its report.

The order is the contract's: checks, then the servers (the Ray head may start meanwhile), then
proof that the teachers score and that the student's servers are up, and only then the student.
However the run ends, everything that it started is ended, and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow

from flows.form import request_of_run
from flows.request import DistillRequest
from opd_core.errors import OPDError
from opd_core.recipe import load_recipe
from opd_core.training.files import CONFIG_FILE
from opd_core.training.lineage import RunPlan, find_run
from tasks.checks import check_environment, check_files
from tasks.cluster import start_cluster
from tasks.devices import take_devices
from tasks.environment import open_run, plan_experiment
from tasks.experiment import experiment
from tasks.guard import Guard, guard_flow
from tasks.hooks import conclude
from tasks.reaping import end_dead_runs
from tasks.samplers import await_samplers, start_samplers
from tasks.signals import hangup_as_termination
from tasks.student import train_student
from tasks.teacher import await_teachers, start_teachers

DEFAULT_REQUEST = DistillRequest()


def _run_name() -> str:
    return run_name(request_of_run(DistillRequest))


def run_name(request: DistillRequest) -> str:
    """What Prefect calls the run: ``tiny · seed 1234``; a fork has the recipe of what it is forked
    from."""
    if request.resume:
        return f"resume {Path(request.resume).name}"
    forked = f"fork of {Path(request.fork).name}" if request.fork else ""
    try:
        source, changes = Path(request.path), request.changes
        if request.fork:
            source = find_run(request.fork, source, changes) / CONFIG_FILE
        config = load_recipe(source, changes)
    except OPDError:  # the flow itself tells it, where it reads the recipe
        return forked or f"distill {request.recipe_file or request.recipe}"
    return f"{config.name} · seed {config.seed}" + (f" · {forked}" if forked else "")


@flow(
    name="distill",
    flow_run_name=_run_name,
    on_completion=[conclude],
    on_failure=[conclude],
    on_crashed=[conclude],
)
def distill(request: DistillRequest = DEFAULT_REQUEST) -> dict[str, Any]:
    """Distil a teacher into a student on the student's own samples; returns the run's summary."""
    with hangup_as_termination(), guard_flow() as guard:
        end_dead_runs()
        plan = plan_experiment(request.path, request.changes, request.resume, request.fork)
        guard.end_with_worker = plan.config.run.end_with_worker
        return run_experiment(plan, guard)


def run_experiment(plan: RunPlan, guard: Guard) -> dict[str, Any]:
    """The stages of one experiment, in order."""
    with take_devices(plan.config) as lease:
        checked = check_environment(plan.config, check_files(plan.config))
        run = open_run(plan, checked)
        lease.tell(run_id=run.run_id, run_dir=str(run.directory))
        with experiment(run, checked, guard, lease) as session:
            start_cluster(session)
            start_teachers(session)
            start_samplers(session)
            await_teachers(session)
            await_samplers(session)
            train_student(session)
    return session.summary
