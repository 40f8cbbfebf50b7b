"""One on-policy-distillation experiment, from its checks to its report.

The order is the contract's: checks, then the teacher server (the Ray head may start meanwhile),
then proof that the teacher scores, and only then the student. However the run ends, everything
that it started is ended, and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict, Field

from opd_core.config import ExperimentConfig
from opd_core.recipe import load_recipe
from tasks.cluster import start_cluster
from tasks.environment import check_environment, open_run
from tasks.session import experiment
from tasks.student import train_student
from tasks.teacher import await_teachers, start_teachers


class DistillRequest(BaseModel):
    """What to run: a recipe, and changes to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str = Field("deployments/recipes/tiny.yaml", description="Path of a recipe file (YAML)")
    overrides: list[str] = Field(
        default_factory=list, description="Changes to the recipe, each KEY.PATH=VALUE"
    )


DEFAULT_REQUEST = DistillRequest()


def _run_name() -> str:
    request = flow_run.parameters["request"]
    recipe = request["recipe"] if isinstance(request, dict) else request.recipe
    return f"distill {Path(recipe).stem}"


@flow(name="distill", flow_run_name=_run_name)
def distill(request: DistillRequest = DEFAULT_REQUEST) -> dict[str, Any]:
    """Distil a teacher into a student on the student's own samples; returns the run's summary."""
    return run_experiment(load_recipe(request.recipe, request.overrides))


def run_experiment(config: ExperimentConfig) -> dict[str, Any]:
    """The stages of one experiment, in order."""
    checked = check_environment(config)
    run = open_run(config, checked.cards)
    with experiment(run, checked) as session:
        start_cluster(session)
        start_teachers(session)
        await_teachers(session)
        train_student(session)
    return session.summary
