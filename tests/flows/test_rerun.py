"""What is asked for when an experiment is to be repeated, and what each of its runs is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError as SchemaError
from prefect.utilities.schema_tools.validation import validate
from pydantic import ValidationError

from flows.request import DistillRequest
from flows.rerun import METRIC, RerunRequest, rerun
from opd_core.analysis.comparison import Target
from opd_core.recipe import find_recipe, load_recipe


def requests_of(request: RerunRequest) -> list[DistillRequest]:
    """What the runs are asked, as Prefect would hand it to their flow."""
    asked = request.asked(request.find_source())
    assert len({each.key for each in asked}) == len(asked)
    return [DistillRequest.model_validate(each.parameters["request"]) for each in asked]


@pytest.mark.parametrize(
    "odd",
    [
        {"seeds": [1, 1]},
        {"seeds": [-1]},
        {"width": -1},
        {"overrides": ["training.steps"]},
        {"overrides": ["seed=3"]},
        {"seeds": list(range(101))},
        {"deployment": "distill"},
        {"axis": "hours"},
        {"margin": 0},
        {"mlflow_uri": "http://me:pass@host:5000"},
        {"steps": 3},
    ],
)
def test_an_odd_request_is_refused_before_anything_starts(odd: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        RerunRequest.model_validate(odd)
    assert "me:pass" not in str(caught.value)


def test_the_target_is_that_of_a_comparison_at_equal_steps() -> None:
    assert RerunRequest().target == Target(METRIC, "steps")
    asked = RerunRequest(metric="entropy", axis="money", margin=0.1)
    assert asked.target == Target("entropy", "money", None, 0.1)


def test_a_recipe_is_repeated_with_each_seed_and_every_change() -> None:
    request = RerunRequest(seeds=[5, 6], overrides=["training.steps=3"])
    first, second = requests_of(request)
    assert (first.recipe, first.recipe_file, first.seed, second.seed) == ("tiny", "", 5, 6)
    config = load_recipe(first.path, first.changes)
    assert (config.seed, config.training.steps) == (5, 3)
    assert "opd_rerun" in config.tracking.tags


def test_without_seeds_the_recipes_own_is_taken() -> None:
    (only,) = requests_of(RerunRequest())
    assert only.seed == load_recipe(find_recipe("tiny")).seed


def test_a_run_is_repeated_from_its_own_recipe(tmp_path: Path) -> None:
    directory = tmp_path / "tiny-1"
    directory.mkdir()
    config = load_recipe(find_recipe("tiny"), ["seed=77", "training.steps=9"])
    (directory / "config.json").write_text(json.dumps(config.resolved()))
    attempt = {"started_at": 1.0, "flow_run_id": "", "status": "completed"}
    history = {"run_id": "tiny-1", "attempts": [attempt], "fingerprints": {}}
    (directory / "run.json").write_text(json.dumps(history))
    (only,) = requests_of(RerunRequest(run="tiny-1", recipe="tiny_grpo", root=str(tmp_path)))
    again = load_recipe(only.path, only.changes)
    assert (again.seed, again.training.steps, again.name) == (77, 9, "tiny")
    assert again.run.root_dir == tmp_path
    assert again.tracking.tags["opd_rerun_of"] == "tiny-1"


@pytest.mark.parametrize(
    ("change", "instead"),
    [
        ("run={teardown_s: 60}", "run.NAME=VALUE"),
        ("tracking={mlflow: false}", "tracking.NAME=VALUE"),
        (" tracking.tags = {a: b}", "tracking.tags.NAME=VALUE"),
    ],
)
def test_what_a_rerun_adds_to_is_not_replaced_as_a_whole(change: str, instead: str) -> None:
    with pytest.raises(ValidationError, match=instead):
        RerunRequest(overrides=[change])


def test_a_password_in_the_address_of_mlflow_is_refused_before_it_is_kept() -> None:
    schema = parameter_schema(rerun).model_dump_for_openapi()
    form = {"request": {"mlflow_uri": "http://me:planted@mlflow:5000"}}
    with pytest.raises(SchemaError, match="in place of a key or password") as refused:
        validate(form, schema, raise_on_error=True)
    assert "planted" not in str(refused.value)


def test_a_recipes_own_tags_stay_and_do_not_go_through_the_form(tmp_path: Path) -> None:
    recipe = yaml.safe_load(find_recipe("tiny").read_text())
    recipe.setdefault("tracking", {})["tags"] = {"token": "bpe"}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(recipe))
    (only,) = requests_of(RerunRequest(recipe_file=str(file)))
    assert "bpe" not in only.model_dump_json()
    tags = load_recipe(only.path, only.changes).tracking.tags
    assert (tags["token"], set(tags)) == ("bpe", {"token", "opd_rerun"})
