"""Several runs, one verdict: which arm was better, how sure that is, and in what they differ.

Nothing is trained and nothing is started; a comparison takes seconds, and may be repeated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow
from pydantic import BaseModel, Field

from flows.form import FORM, Margin, MlflowUri, request_of_run
from opd_core.analysis.comparison import Target
from opd_core.analysis.outcome import Axis
from opd_core.recipe import run_root
from tasks.comparing import compare_runs, tell_comparison

TARGET = Target()


class CompareRequest(BaseModel):
    """Which runs to compare, and at what."""

    model_config = FORM

    runs: list[str] = Field(
        min_length=2,
        title="Runs",
        description="Run ids, run directories or MLflow run ids; the first one's arm is the "
        "baseline, runs that differ in their seed only are one arm",
    )
    metric: str = Field(
        TARGET.metric, min_length=1, title="Metric", description="What is to be better"
    )
    axis: Axis = Field(
        "student_tokens", title="Axis", description="At equal what the runs are compared"
    )
    at: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        title="At",
        description="Where on the axis; empty is the farthest point that all reached",
    )
    margin: Margin = None
    references: list[str] = Field(
        default_factory=list,
        title="Reference lines",
        description="Further lines, each LABEL=FILE with an evaluation's record, as of `opd eval`",
    )
    root: str = Field(
        "",
        title="Run root",
        description="Where runs lie that are named by their id; empty is $OPD_RUNS, else runs",
    )
    mlflow: bool = Field(
        True,
        title="Keep in MLflow",
        description="Keep the comparison in the runs' MLflow, and tag them",
    )
    mlflow_uri: MlflowUri | None = Field(
        None,
        title="MLflow",
        description="MLflow in which run ids are looked up; empty is $MLFLOW_TRACKING_URI, "
        "else SQLite in the run root. "
        "Parameters are kept, so one with a password in it is refused",
    )

    @property
    def target(self) -> Target:
        """At what the runs are compared."""
        return Target(self.metric, self.axis, self.at, self.margin)


def _run_name() -> str:
    request = request_of_run(CompareRequest)
    first, second, *more = (Path(run).name for run in request.runs)
    others = f"{second} and {len(more)} more" if more else second
    return f"{request.metric} of {first} against {others}"


@flow(name="compare", flow_run_name=_run_name)
def compare(request: CompareRequest) -> dict[str, Any]:
    """Compare runs; returns the verdict and where its page lies."""
    compared = compare_runs(
        request.runs,
        request.target,
        references=request.references,
        root=Path(request.root or run_root()),
        mlflow=request.mlflow,
        mlflow_uri=request.mlflow_uri,
    )
    tell_comparison(compared)
    return compared.to_json()
