"""Comparing runs leaves files, an MLflow run and tags; the files also where MLflow is away."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opd_core.analysis.comparison import Target
from opd_core.analysis.run_data import load_run_data
from opd_core.config import TrackingConfig
from opd_core.errors import ConfigError, DataError
from opd_core.tracking import mlflow_sink
from opd_core.tracking.mlflow_sink import RUN_TAG, MlflowRun, MlflowSink, tracking_uri
from opd_core.training.evaluation_records import write_evaluation
from tasks.comparing import Compared, compare_runs, new_folder
from tasks.mlflow_compared import comparison_id
from tests.tasks.compared_runs import FAST, SLOW, write_arms, write_run

FILES = {"comparison.json", "comparison.html", "comparison.md"}
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MLflow that is away is not asked again."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def compare(root: Path, names: list[str], **options: Any) -> Compared:
    return compare_runs(names, Target(), root=root, **{"mlflow": False, **options})


def test_everything_is_written_and_refers_to_what_is_there(tmp_path: Path) -> None:
    out = tmp_path / "a" / "comparison"
    compared = compare(tmp_path, write_arms(tmp_path), out=out)
    assert compared.directory == out
    charts = {path.name for path in out.glob("*.svg")}
    assert {path.name for path in out.iterdir()} == FILES | charts
    told = json.loads((out / "comparison.json").read_text())
    assert [arm["label"] for arm in told["arms"]] == [FAST, SLOW]
    text = (out / "comparison.md").read_text()
    assert set(re.findall(r"\]\(([^)]+)\)", text)) == charts
    assert compared.comparison.pairs[0].sentence in compared.page.read_text()


def test_without_a_place_it_lies_beside_the_first_run(tmp_path: Path) -> None:
    made = compare(tmp_path / "runs", write_arms(tmp_path / "runs")).directory
    assert made.parent == tmp_path / "runs" / "comparisons"
    assert made.name.endswith("-tiny-vs-tiny-slow")


def test_no_comparison_lies_upon_another(tmp_path: Path) -> None:
    names = [new_folder(tmp_path / "comparisons" / "now").name for _ in range(3)]
    assert names == ["now", "now-2", "now-3"]


def test_a_reference_becomes_a_line(tmp_path: Path) -> None:
    names = write_arms(tmp_path)
    record = load_run_data(tmp_path / names[0]).evaluations[-1]
    questions = tuple(replace(each, rewards=(1.0,) * 4) for each in record.questions)
    file = tmp_path / "teacher.json"
    write_evaluation(file, replace(record, questions=questions))
    compared = compare(tmp_path, names, references=[f"the teacher={file}"])
    (line,) = compared.comparison.references
    assert (line.label, line.value) == ("the teacher", 1.0)
    for odd in ("teacher", "=x", "teacher="):
        with pytest.raises(ConfigError, match="expected LABEL=FILE"):
            compare(tmp_path, names, references=[odd])


def test_a_run_compared_with_itself_shows_no_difference(tmp_path: Path) -> None:
    run = write_run(tmp_path, "tiny-1")
    (pair,) = compare(tmp_path, ["tiny-1", str(run)]).comparison.pairs
    assert pair.verdict == "no difference"


@pytest.mark.parametrize("names", [[], ["tiny-1"]])
def test_one_run_is_no_comparison(tmp_path: Path, names: list[str]) -> None:
    write_run(tmp_path, "tiny-1")
    with pytest.raises(ConfigError, match="two runs at least"):
        compare(tmp_path, names)


def test_charts_of_an_earlier_comparison_go_and_other_files_stay(tmp_path: Path) -> None:
    names, out = write_arms(tmp_path), tmp_path / "out"
    compare(tmp_path, names, out=out)
    assert (out / "difference-training.svg").is_file()
    (out / "mine.svg").write_text("mine")
    compare(tmp_path, [names[0], names[2]], out=out)
    referred = set(re.findall(r"\]\(([^)]+)\)", (out / "comparison.md").read_text()))
    assert {path.name for path in out.glob("*.svg")} == referred | {"mine.svg"}
    assert not (out / "difference-training.svg").exists()


def test_a_folder_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    names = write_arms(tmp_path)
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(ConfigError, match="out: expected a folder that can be written"):
            compare(tmp_path, names, out=out)


def test_files_of_an_odd_shape_are_no_crash(tmp_path: Path) -> None:
    names = write_arms(tmp_path)
    for odd in (1, ["x", {"packages": ["y"], "gpus": [1]}], {"a": 1}):
        (tmp_path / names[0] / "provenance.json").write_text(json.dumps({"attempts": odd}))
        assert len(compare(tmp_path, names).comparison.pairs) == 1
    for seed in ("one", None, 1.5):
        config = tmp_path / names[0] / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"seed": seed}))
        with pytest.raises(DataError, match=r"config\.json: expected an integer as seed"):
            compare(tmp_path, names)


def test_nothing_is_written_for_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    names = write_arms(tmp_path)
    with pytest.raises(ConfigError, match="no-such-metric"):
        compare_runs(names, Target("no-such-metric"), root=tmp_path, out=tmp_path / "out")
    with pytest.raises(ConfigError, match="no run 'tiny-9'"):
        compare(tmp_path, [*names, "tiny-9"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_mlflow_that_is_away_costs_a_warning_and_nothing_else(tmp_path: Path) -> None:
    names = write_arms(tmp_path, mlflow_uri=NOWHERE)
    compared = compare(tmp_path, names, mlflow=True)
    assert {path.name for path in compared.directory.iterdir()} >= FILES
    assert compared.mlflow_run_id is None
    (lacking,) = compared.lacking
    assert f"MLflow at {NOWHERE} lacks the comparison" in lacking
    assert str(compared.directory) in lacking


def test_runs_that_are_not_tracked_are_compared_without_mlflow(tmp_path: Path) -> None:
    compared = compare(tmp_path, write_arms(tmp_path, mlflow=False), mlflow=True)
    assert compared.mlflow_run_id is None
    assert compared.lacking == (
        "no compared run is tracked in MLflow, so the comparison is not either",
    )
    assert not (tmp_path / "mlflow.db").exists()


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Compared]]:
    """Two arms of two seeds and a comparison of them; MLflow knows all but the last run."""
    root = tmp_path_factory.mktemp("runs")
    names = write_arms(root)
    uri = tracking_uri(TrackingConfig(), root)
    for name in names[:-1]:
        MlflowSink(MlflowRun(uri, root / "mlartifacts", "opd", name, {}, {RUN_TAG: name}))
    return root, compare(root, names, mlflow=True)


def found(root: Path, question: str) -> list[Any]:
    """MLflow's runs of which this is true."""
    client = mlflow_sink.connect(tracking_uri(TrackingConfig(), root))
    (experiment,) = (e for e in client.search_experiments() if e.name == "opd")
    return list(client.search_runs([experiment.experiment_id], question))


def test_mlflow_gets_a_run_for_the_comparison(tracked: tuple[Path, Compared]) -> None:
    root, compared = tracked
    (run,) = found(root, "tags.`opd.kind` = 'comparison'")
    assert run.info.run_id == compared.mlflow_run_id
    (pair,) = compared.comparison.pairs
    assert run.data.tags["opd.verdict"] == pair.verdict
    assert run.data.tags["opd.baseline"] == FAST
    assert run.data.tags["opd.compared_runs"] == "tiny-1 tiny-2 tiny-slow-1 tiny-slow-2"
    assert run.data.params["metric"] == "eval/accuracy"
    metrics = run.data.metrics
    assert metrics[f"value/{FAST}"] == compared.comparison.arms[0].value
    assert metrics[f"difference/{SLOW}"] == pair.difference
    assert metrics[f"p_value/{SLOW}"] == pair.p
    low, high = metrics[f"difference_low/{SLOW}"], metrics[f"difference_high/{SLOW}"]
    assert pair.training is not None
    assert (low, high) == (pair.training.low, pair.training.high)


def test_the_compared_runs_are_tagged_with_arm_and_verdict(
    tracked: tuple[Path, Compared],
) -> None:
    root, compared = tracked
    arm = [run.info.run_name for run in found(root, f"tags.`opd.arm` = '{FAST}'")]
    assert sorted(arm) == ["tiny-1", "tiny-2"]
    (other,) = found(root, f"tags.`opd.arm` = '{SLOW}'")
    tags = other.data.tags
    assert tags["opd.verdict"] == compared.comparison.pairs[0].verdict
    assert tags["opd.comparison"] == compared.mlflow_run_id


def test_what_mlflow_lacks_is_named(tracked: tuple[Path, Compared]) -> None:
    (lacking,) = tracked[1].lacking
    assert lacking.startswith("run tiny-slow-2 is not in MLflow at sqlite:///")


def test_the_same_comparison_is_one_run_whatever_the_order_of_the_seeds(
    tracked: tuple[Path, Compared],
) -> None:
    root, compared = tracked
    again = compare(root, ["tiny-2", "tiny-1", "tiny-slow-2", "tiny-slow-1"], mlflow=True)
    assert again.mlflow_run_id == compared.mlflow_run_id
    assert again.directory != compared.directory


def test_another_baseline_or_target_is_another_comparison(
    tracked: tuple[Path, Compared],
) -> None:
    compared = tracked[1].comparison
    steps = replace(compared, target=Target(axis="steps"))
    turned = replace(compared, arms=compared.arms[::-1])
    assert len({comparison_id(each) for each in (compared, steps, turned)}) == 3
