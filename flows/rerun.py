"""The same experiment again: other seeds, or changes to it, and whether it came to the same.

Each repetition is a run of the deployment `distill`, with devices of its own. This flow asks for
them and waits: it holds no device, and ends with a verdict.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import (
    BaseModel,
    Field,
    NonNegativeInt,
    field_validator,
)

from flows.form import FORM, Margin, MlflowUri, Override, request_of_run
from flows.request import DistillRequest, Recipe
from opd_core.analysis.comparison import Target
from opd_core.analysis.outcome import CANNOT_TELL, Axis
from opd_core.analysis.reproduction import NOT_REPRODUCED, REPRODUCED
from opd_core.recipe import override_key, run_root
from tasks.children import Asked, PrefectDeployment, cancel_left, children_end_with_me, run_children
from tasks.guard import guard_flow
from tasks.rerunning import (
    Source,
    check_target,
    failed_are_named,
    find_source,
    judge_children,
    rerun_overrides,
    tell_repeated,
)

METRIC = Target().metric
MOST_SEEDS = 100
"""Prefect tells of 200 flow runs at once, and an interval gains nothing from more."""
IN_PARTS = ("run", "tracking", "tracking.tags")
"""Settings that a rerun adds to, so they are not given as a whole."""
STATES = {REPRODUCED: "Reproduced", NOT_REPRODUCED: "NotReproduced", CANNOT_TELL: "CannotTell"}
"""The name of the flow run's state, of the type Completed, by the verdict."""


class RerunRequest(BaseModel):
    """What to repeat, how often, and at what it is judged."""

    model_config = FORM

    run: str = Field(
        "",
        title="Run to repeat",
        description="The original, a run that completed: its run id, its directory or its MLflow "
        "run id. Left empty, a recipe is repeated, which has no original",
    )
    recipe: Recipe = Field(
        "tiny", title="Recipe", description="A shipped experiment, where no run is named"
    )
    recipe_file: str = Field(
        "",
        title="Recipe file",
        description="Another recipe in its place: the path of a YAML file on the worker's machine",
    )
    seeds: list[NonNegativeInt] = Field(
        default_factory=list,
        max_length=MOST_SEEDS,
        title="Seeds",
        description="One run each. None is the seed of the original; a verdict needs three others",
    )
    overrides: list[Override] = Field(
        default_factory=list,
        title="Changes",
        description="Each KEY.PATH=VALUE, the value in YAML. With one that changes numbers the "
        "reruns are not judged but compared with the original",
    )
    width: int = Field(
        0,
        ge=0,
        title="At once",
        description="Runs that are asked for at once; 1 is one after the other, 0 is all: as many "
        "run as devices and the deployment allow",
    )
    deployment: str = Field(
        "distill/distill",
        pattern=r"^[^/]+/[^/]+$",
        title="Deployment",
        description="What runs each of them, FLOW/DEPLOYMENT",
    )
    metric: str = Field(
        METRIC, min_length=1, title="Metric", description="What is to come out the same"
    )
    axis: Axis = Field("steps", title="Axis", description="At equal what the runs are compared")
    margin: Margin = None
    root: str = Field(
        "",
        title="Run root",
        description="Where a run lies that is named by its id; empty is $OPD_RUNS, else runs",
    )
    mlflow_uri: MlflowUri = Field(
        "",
        title="MLflow",
        description="Where an MLflow run id is looked up; empty is $MLFLOW_TRACKING_URI, else "
        "SQLite in the run root. One with a password in it is refused: parameters are kept",
    )

    @field_validator("seeds")
    @classmethod
    def _each_once(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("expected each seed once: runs of one seed are no further evidence")
        return seeds

    @field_validator("overrides")
    @classmethod
    def _no_seed(cls, overrides: list[str]) -> list[str]:
        if any(override_key(each) == "seed" for each in overrides):
            raise ValueError("expected no seed among the changes: name it in seeds")
        return overrides

    @field_validator("overrides")
    @classmethod
    def _in_parts(cls, overrides: list[str]) -> list[str]:
        for key in map(override_key, overrides):
            if key in IN_PARTS:
                raise ValueError(
                    f"expected single settings, got all of {key}: a rerun adds to it; write "
                    f"{key}.NAME=VALUE for each that is to be different"
                )
        return overrides

    @property
    def target(self) -> Target:
        """At what the runs are compared."""
        return Target(self.metric, self.axis, margin=self.margin)

    def find_source(self) -> Source:
        """What is repeated. Raises :class:`~opd_core.errors.ConfigError`."""
        return find_source(
            self.run,
            self.recipe_file or self.recipe,
            self.overrides,
            Path(self.root or run_root()),
            self.mlflow_uri or None,
        )

    def asked(self, source: Source) -> list[Asked]:
        """The runs to ask for, one a seed. Raises :class:`ConfigError` for changes that the form of
        ``distill`` refuses."""
        changes = rerun_overrides(source, self.overrides, str(flow_run.id))
        file = str(source.recipe) if self.run or self.recipe_file else ""
        return [
            Asked(
                key=f"seed-{seed}",
                name=f"{source.config.name} · seed {seed}",
                parameters={"request": self._request(file, seed, changes)},
            )
            for seed in self.seeds or [source.config.seed]
        ]

    def _request(self, file: str, seed: int, changes: list[str]) -> dict[str, Any]:
        request = DistillRequest.of(
            recipe=self.recipe, recipe_file=file, seed=seed, overrides=changes
        )
        return request.model_dump(mode="json", exclude_defaults=True)


DEFAULT_REQUEST = RerunRequest()


def _run_name() -> str:
    request = request_of_run(RerunRequest)
    what = Path(request.run or request.recipe_file or request.recipe).name
    seeds = ", ".join(map(str, request.seeds))
    return f"rerun {what}" + (f" · seeds {seeds}" if seeds else "")


@flow(name="rerun", flow_run_name=_run_name, on_cancellation=[cancel_left])
def rerun(request: RerunRequest = DEFAULT_REQUEST) -> State[dict[str, Any]]:
    """Repeat an experiment; returns the verdict. Its state is named after it."""
    with guard_flow():
        source = request.find_source()
        check_target(source, request.target)
        deployment = PrefectDeployment(request.deployment)
        with children_end_with_me():
            children = run_children(request.asked(source), deployment, request.width)
        with failed_are_named(children):
            repeated = judge_children(source, children, request.target)
            tell_repeated(repeated)
    told = repeated.reproduction
    name = STATES.get(told.verdict, "Completed")
    return Completed(name=name, message=told.sentence, data=repeated.to_json())
