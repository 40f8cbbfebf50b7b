"""A comparison in a real MLflow on SQLite: one database for the whole module."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from opd_core.config import TrackingConfig
from opd_core.tracking import mlflow_sink
from opd_core.tracking.mlflow_comparison import (
    ComparedRun,
    Published,
    TrackedComparison,
    publish,
    tags_of,
)
from opd_core.tracking.mlflow_sink import RUN_TAG, MlflowRun, MlflowSink, tracking_uri


@dataclass(frozen=True)
class Told:
    """A published comparison of two runs, one of which MLflow knows."""

    comparison: TrackedComparison
    first: Published
    uri: str
    tracked_run: str
    client: Any

    def search(self, filter_string: str) -> list[str]:
        """MLflow run ids, as people ask for them."""
        import mlflow

        experiments = [self.comparison.experiment]
        frame = mlflow.search_runs(experiment_names=experiments, filter_string=filter_string)
        return list(frame["run_id"]) if len(frame) else []


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("root")
    (root / "comparison.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("MLFLOW_TRACKING_URI", tracking_uri(TrackingConfig(), root))
        yield root


@pytest.fixture
def told(root: Path, request: pytest.FixtureRequest) -> Told:
    """In an experiment of its own."""
    uri, experiment = tracking_uri(TrackingConfig(), root), request.node.name
    run = MlflowRun(uri, root / "mlartifacts", experiment, "tiny-1", {}, {RUN_TAG: "tiny-1"})
    tracked = MlflowSink(run)
    tracked.set_status("FINISHED")
    comparison = TrackedComparison(
        comparison_id="comparison-1",
        name="pure against mixed",
        tracking_uri=uri,
        artifact_root=root / "mlartifacts",
        experiment=experiment,
        verdict="better",
        baseline="pure OPD",
        note="mixed is better",
        params={"metric": "eval/accuracy"},
        metrics={"difference/mixed (a=b)": 0.125, "p_value/mixed": math.nan},
        runs=(
            ComparedRun("tiny-1", "pure OPD", "baseline", experiment),
            ComparedRun("tiny-2", "mixed", "better", experiment),
            ComparedRun("tiny-3", "mixed", "better", "another experiment"),
        ),
        artifacts=(root / "comparison.json",),
    )
    return Told(comparison, publish(comparison), uri, tracked.run_id, mlflow_sink.connect(uri))


def test_runs_of_an_arm_are_found_by_tag(told: Told) -> None:
    assert told.search("tags.`opd.arm` = 'pure OPD'") == [told.tracked_run]
    assert told.search("tags.`opd.verdict` = 'baseline'") == [told.tracked_run]


def test_the_comparison_is_found_from_its_runs_and_by_kind(told: Told) -> None:
    tags = told.client.get_run(told.tracked_run).data.tags
    assert tags["opd.comparison"] == told.first.mlflow_run_id
    assert told.search("tags.`opd.kind` = 'comparison'") == [told.first.mlflow_run_id]


def test_the_comparison_holds_numbers_tags_and_files(told: Told, tmp_path: Path) -> None:
    run = told.client.get_run(told.first.mlflow_run_id)
    assert list(run.data.metrics.values()) == [0.125]
    (name,) = run.data.metrics
    assert name.startswith("difference/mixed _a_b_")
    assert run.data.params == {"metric": "eval/accuracy"}
    assert run.data.tags["opd.compared_runs"] == "tiny-1 tiny-2 tiny-3"
    assert run.data.tags["opd.baseline"] == "pure OPD"
    assert run.data.tags["mlflow.note.content"] == "mixed is better"
    assert run.info.status == "FINISHED"
    kept = Path(told.client.download_artifacts(run.info.run_id, "", str(tmp_path)))
    assert (kept / "comparison.json").read_text() == "{}"


def test_runs_that_this_mlflow_lacks_are_named(told: Told) -> None:
    assert told.first.absent == ("tiny-2", "tiny-3")


def test_a_repeated_comparison_changes_nothing_and_a_changed_one_replaces_it(told: Told) -> None:
    run_id, name = told.first.mlflow_run_id, "difference/mixed (a=b)"
    (stored,) = told.client.get_run(run_id).data.metrics
    assert publish(told.comparison) == told.first
    assert len(told.client.get_metric_history(run_id, stored)) == 1
    later = publish(replace(told.comparison, verdict="cannot tell", metrics={name: 0.0}))
    assert later == told.first
    run = told.client.get_run(run_id)
    assert run.data.tags["opd.verdict"] == "cannot tell"
    assert run.data.metrics[stored] == 0.0


class CutOff:
    """A client whose line is cut at one method, once."""

    def __init__(self, client: Any, method: str) -> None:
        self._client, self._method = client, method

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._method = ""
            raise ConnectionError(f"{name}: MLflow is away")
        return getattr(self._client, name)


@pytest.mark.parametrize("method", ["create_run", "log_artifact", "set_tag"])
def test_what_was_cut_off_is_completed_by_another_call(told: Told, method: str) -> None:
    client = CutOff(told.client, method)
    comparison = replace(told.comparison, comparison_id=f"cut-{method}")
    with pytest.raises(ConnectionError):
        publish(comparison, connect=lambda uri: client)
    done = publish(comparison, connect=lambda uri: client)
    runs = told.search(f"tags.`{RUN_TAG}` = 'cut-{method}'")
    assert runs == [done.mlflow_run_id]
    assert told.client.get_run(done.mlflow_run_id).info.status == "FINISHED"
    assert told.client.get_run(told.tracked_run).data.tags["opd.comparison"] == done.mlflow_run_id


def test_a_run_is_known_by_mlflows_own_id(told: Told, tmp_path: Path) -> None:
    assert tags_of(told.uri, told.tracked_run)[RUN_TAG] == "tiny-1"
    assert tags_of(told.uri, "0" * 32) == {}
    nothing = tmp_path / "mlflow.db"
    assert tags_of(f"sqlite:///{nothing}", told.tracked_run) == {}
    assert not nothing.exists()
