"""What is around an experiment: how long it queues for devices, and when it ends unasked."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from opd_core.config import CostConfig, DevicesConfig, RunConfig, TrackingConfig
from opd_core.errors import ConfigError
from opd_core.recipe import load_recipe, parse_config

RECIPE = """
name: test
student: {model: /models/student}
data: {train: /data/train.jsonl}
task: {group_size: 2, judge: "m:f"}
sampling: {max_new_tokens: 16}
opd: null
training: {steps: 1, prompts_per_step: 4, learning_rate: 1.0e-6}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return file


def test_how_long_to_queue_depends_on_the_door_unless_it_is_said(recipe: Path) -> None:
    assert load_recipe(recipe).devices.wait_s is None
    assert load_recipe(recipe, ["devices.wait_s=0"]).devices.wait_s == 0
    assert load_recipe(recipe, ["devices.wait_s=90"]).devices.wait_s == 90


def test_a_queue_without_end_is_written_as_json_and_read_again(recipe: Path) -> None:
    config = load_recipe(recipe, ["devices.wait_s=.inf"])
    assert config.devices.wait_s == math.inf
    text = json.dumps(config.resolved(), allow_nan=False)
    assert parse_config(json.loads(text), source="here") == config
    recipe.write_text(text)  # an earlier run's settings are read as a recipe
    assert load_recipe(recipe) == config


@pytest.mark.parametrize("wait_s", [-1, -math.inf, math.nan, "long"])
def test_a_time_to_queue_that_is_none_is_refused(wait_s: object) -> None:
    with pytest.raises(ValidationError, match="wait_s"):
        DevicesConfig.model_validate({"wait_s": wait_s})


def test_a_run_ends_with_its_worker_and_at_no_time_unless_it_is_said() -> None:
    assert (RunConfig().deadline_s, RunConfig().end_with_worker) == (None, True)
    assert RunConfig(deadline_s=0.5).deadline_s == 0.5
    for wrong in (0, -1, math.inf, math.nan):
        with pytest.raises(ValidationError, match="deadline_s"):
            RunConfig(deadline_s=wrong)


@pytest.mark.parametrize(
    ("uri", "meant"),
    [
        ("sqlite:///mlflow.db", "sqlite:///{here}/mlflow.db"),
        ("file:mlruns", "file:{here}/mlruns"),
        ("mlruns", "{here}/mlruns"),
        ("./mlruns", "{here}/mlruns"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("sqlite:///:memory:", "sqlite:///:memory:"),
        ("file:///data/mlruns", "file:///data/mlruns"),
        ("/data/mlruns", "/data/mlruns"),
        ("http://host:5000", "http://host:5000"),
        ("postgresql://host/mlflow", "postgresql://host/mlflow"),
        ("databricks", "databricks"),
    ],
)
def test_a_relative_tracking_uri_means_the_working_directory_wherever_it_is_read_later(
    uri: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert TrackingConfig(mlflow_uri=uri).mlflow_uri == meant.format(here=tmp_path)


@pytest.mark.parametrize(
    ("uri", "instead"),
    [
        ("http://me:sk-secret@host:5000", "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ("HTTPS://sk-secret@host/mlflow", "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ("postgresql://me:sk-secret@host/mlflow", "`mlflow server"),
        ("mysql+pymysql://me:sk-/secret@host/mlflow", "`mlflow server"),
        ("postgresql://host/mlflow?user=me&password=sk-secret", "`mlflow server"),
    ],
)
def test_a_recipe_whose_tracking_uri_holds_a_password_is_refused_without_repeating_it(
    recipe: Path, uri: str, instead: str
) -> None:
    with pytest.raises(ConfigError, match=rf"tracking\.mlflow_uri: .*{instead}") as caught:
        load_recipe(recipe, [f"tracking.mlflow_uri={uri}"])
    assert "secret" not in str(caught.value)
    assert TrackingConfig(mlflow_uri=uri).mlflow_uri == uri, "of a command line"


@pytest.mark.parametrize(
    "uri",
    ["http://host:5000/a@b", "postgresql://me@host/mlflow", "sqlite:////data/a:b@c/mlflow.db"],
)
def test_a_tracking_uri_without_a_password_is_taken(recipe: Path, uri: str) -> None:
    assert load_recipe(recipe, [f"tracking.mlflow_uri={uri}"]).tracking.mlflow_uri == uri


def test_where_an_answer_begins_is_a_regular_expression_that_compiles() -> None:
    assert TrackingConfig(answer_pattern="Final: ").answer_pattern == "Final: "
    with pytest.raises(ValidationError, match="no regular expression: missing"):
        TrackingConfig(answer_pattern="(Final")


def test_a_price_is_of_devices_and_of_teachers_that_there_are(recipe: Path) -> None:
    assert load_recipe(recipe).cost is None
    prices = load_recipe(recipe, ["cost={device_hour: 2.5}"]).cost
    assert prices == CostConfig(currency="USD", device_hour=2.5, teacher_device_hour=None)
    with pytest.raises(ConfigError, match=r"no teacher is named 'big'; the teachers are: none"):
        load_recipe(recipe, ["cost={teacher_million_tokens: {big: 1}}"])
    with pytest.raises(ConfigError, match=r"device_hour"):
        load_recipe(recipe, ["cost={device_hour: -1}"])
