"""Runs are found by what people call them, and an unknown one is answered with its neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from opd_core.config import TrackingConfig
from opd_core.errors import ConfigError
from opd_core.tracking.mlflow_sink import RUN_TAG, MlflowRun, MlflowSink, tracking_uri
from tasks.lookup import DIRECTORY_TAG, find_runs


def make_run(root: Path, name: str) -> Path:
    directory = root / name
    directory.mkdir(parents=True)
    (directory / "run.json").write_text("{}")
    return directory


def track(root: Path, tags: Mapping[str, str]) -> str:
    """MLflow's id of a run with these tags, in the MLflow of the run root."""
    uri = tracking_uri(TrackingConfig(), root)
    return MlflowSink(MlflowRun(uri, root / "artifacts", "opd", "run", {}, tags)).run_id


def test_a_run_is_found_by_directory_and_by_id_in_the_order_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "runs"
    first, second = make_run(root, "tiny-1"), make_run(root, "tiny-2")
    monkeypatch.chdir(tmp_path)
    names = [str(second), "tiny-1", "runs/tiny-2"]
    assert find_runs(names, root) == [second, first, second]
    assert find_runs(["tiny-1"], Path("runs")) == [first]


def test_an_unknown_run_is_answered_with_the_nearest_names(tmp_path: Path) -> None:
    for name in ("tiny-20260101-ab12", "tiny-20260101-cd34", "heal-9"):
        make_run(tmp_path, name)
    with pytest.raises(ConfigError) as told:
        find_runs(["tiny-20260101-ab13"], tmp_path)
    nearest = str(told.value).partition("the nearest are: ")[2].split(", ")
    assert nearest == ["tiny-20260101-ab12", "tiny-20260101-cd34"]
    with pytest.raises(ConfigError, match="it holds 3 runs"):
        find_runs(["???"], tmp_path)


@pytest.mark.parametrize("odd", ["x" * 5000, "~nobody-of-this-name/x", "a\0b"])
def test_what_cannot_be_a_path_is_an_unknown_run(tmp_path: Path, odd: str) -> None:
    with pytest.raises(ConfigError, match="no run ") as told:
        find_runs([odd], tmp_path)
    assert len(str(told.value)) < 1000


def test_a_folder_that_is_no_run_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "comparisons").mkdir()
    with pytest.raises(ConfigError, match="no run 'comparisons'"):
        find_runs(["comparisons"], tmp_path)


def test_mlflows_id_leads_to_the_directory_also_if_it_was_moved(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    there, moved = make_run(tmp_path / "elsewhere", "tiny-1"), make_run(root, "tiny-2")
    ids = [
        track(root, {RUN_TAG: "tiny-1", DIRECTORY_TAG: str(there)}),
        track(root, {RUN_TAG: "tiny-2", DIRECTORY_TAG: str(tmp_path / "gone")}),
    ]
    assert find_runs(ids, root) == [there, moved]
    far = track(root, {RUN_TAG: "tiny-3", DIRECTORY_TAG: "/far/away"})
    with pytest.raises(ConfigError, match="tiny-3 in /far/away, which is not on this machine"):
        find_runs([far], root)
    with pytest.raises(ConfigError, match=r"knows no run 0+ of this project"):
        find_runs(["0" * 32], root)
    with pytest.raises(ConfigError, match="knows no run"):
        find_runs([track(root, {})], root)


def test_where_there_is_no_mlflow_none_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="knows no run"):
        find_runs(["0" * 32], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_mlflow_that_is_away_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ConfigError, match=r"does not answer .*: name the run by its id") as told:
        find_runs(["0" * 32], tmp_path, "http://me:secret@127.0.0.1:9")
    assert "secret" not in str(told.value)
