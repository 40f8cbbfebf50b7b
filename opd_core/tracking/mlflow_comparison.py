"""A comparison of several runs, as MLflow is to keep it: a run of its own beside the compared ones,
and tags on each of those.

In MLflow's compare view and in ``mlflow.search_runs`` people ask by tag: ``tags.`opd.arm` = '…'``
finds the runs of an arm, ``tags.`opd.kind` = 'comparison'`` the comparisons, and a run's
``opd.comparison`` is the MLflow run id of the newest comparison that it took part in.

Does not own: what the comparison says, and what happens if MLflow is away; that is the caller's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd_core.tracking.journal import JournalRecord
from opd_core.tracking.mlflow_sink import (
    KIND_TAG,
    RUN_TAG,
    SQLITE,
    MlflowRun,
    MlflowSink,
    connect,
    find_tagged,
)
from opd_core.tracking.names import accepted_name
from opd_core.tracking.sink import Artifact, Ending

COMPARISON = "comparison"
"""The value of ``opd.kind``."""
ARM_TAG, COMPARISON_TAG, VERDICT_TAG = "opd.arm", "opd.comparison", "opd.verdict"
COMPARED_TAG, BASELINE_TAG = "opd.compared_runs", "opd.baseline"
NOTE_TAG = "mlflow.note.content"
"""What MLflow's page of a run shows as its description."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One compared run: its ``opd.run_id``, its arm, the verdict on that arm, and the MLflow
    experiment that it would be found in."""

    run_id: str
    arm: str
    verdict: str
    experiment: str


@dataclass(frozen=True, slots=True)
class TrackedComparison:
    """A comparison and its place in MLflow.

    ``comparison_id`` is the same for the same runs and target: such a comparison is kept once, as
    it was last. ``metrics`` that are not finite are left out. ``artifact_root`` is used where the
    experiment has to be created.
    """

    comparison_id: str
    name: str
    tracking_uri: str
    artifact_root: Path | None
    experiment: str
    verdict: str
    baseline: str
    note: str
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    runs: tuple[ComparedRun, ...]
    artifacts: tuple[Path, ...] = ()

    @property
    def tags(self) -> dict[str, str]:
        """Of the comparison's own MLflow run."""
        return {
            RUN_TAG: self.comparison_id,
            KIND_TAG: COMPARISON,
            COMPARED_TAG: " ".join(run.run_id for run in self.runs),
            VERDICT_TAG: self.verdict,
            BASELINE_TAG: self.baseline,
            NOTE_TAG: self.note,
        }


@dataclass(frozen=True, slots=True)
class Published:
    """MLflow's ids of the comparison's run and experiment, and the compared runs that could not be
    tagged."""

    mlflow_run_id: str
    experiment_id: str
    absent: tuple[str, ...] = ()


def publish(comparison: TrackedComparison, connect: Callable[[str], Any] = connect) -> Published:
    """Keep the comparison in MLflow and tag the compared runs that are there; a second call changes
    nothing that is so already. Raises what MLflow raises; another call then completes it."""
    run = MlflowRun(
        tracking_uri=comparison.tracking_uri,
        artifact_root=comparison.artifact_root,
        experiment=comparison.experiment,
        run_name=comparison.name,
        params=comparison.params,
        tags=comparison.tags,
    )
    sink = MlflowSink(run, connect)
    client = connect(comparison.tracking_uri)
    known = client.get_run(sink.run_id).data.metrics
    new = {
        name: value
        for name, value in comparison.metrics.items()
        if math.isfinite(value) and known.get(accepted_name(name)) != value
    }
    sink.log([JournalRecord(0, time.time(), new)])
    kept = tuple(Artifact(path) for path in comparison.artifacts)
    sink.finish(Ending("FINISHED", artifacts=kept))
    absent = [each.run_id for each in comparison.runs if not _tag_run(client, each, sink.run_id)]
    return Published(sink.run_id, sink.experiment_id, tuple(absent))


def tags_of(tracking_uri: str, mlflow_run_id: str) -> Mapping[str, str]:
    """The tags of a run by MLflow's own id; empty where that MLflow holds no such run. Raises what
    MLflow raises if it is away; no database is made."""
    from mlflow.exceptions import MlflowException

    if tracking_uri.startswith(SQLITE) and not Path(tracking_uri.removeprefix(SQLITE)).exists():
        return {}
    try:
        return dict(connect(tracking_uri).get_run(mlflow_run_id).data.tags)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return {}
        raise


def _tag_run(client: Any, run: ComparedRun, comparison: str) -> bool:
    """Whether the run is in this MLflow; it is tagged then."""
    experiment = client.get_experiment_by_name(run.experiment)
    if experiment is None:
        return False
    tracked = find_tagged(client, experiment.experiment_id, run.run_id)
    if tracked is None:
        return False
    tags = {ARM_TAG: run.arm, COMPARISON_TAG: comparison, VERDICT_TAG: run.verdict}
    for key, value in tags.items():
        client.set_tag(tracked.info.run_id, key, value)
    return True
