"""The run form: what the server refuses, what the request refuses, and what becomes of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate
from pydantic import ValidationError as RequestError

from flows.distill import distill
from flows.form import REFERENCES
from flows.request import DistillRequest, Recipe
from opd_core.config import ExperimentConfig
from opd_core.config.values import names_a_secret
from opd_core.errors import ConfigError
from opd_core.recipe import RECIPES, load_recipe
from opd_core.tracking.mlflow_sink import flatten_params

SECRET = "planted-0f3c"
SCHEMA = parameter_schema(distill).model_dump_for_openapi()
FIELDS: dict[str, dict[str, Any]] = SCHEMA["definitions"]["DistillRequest"]["properties"]


def submit(**fields: Any) -> DistillRequest:
    """As the server takes a form, and the flow's process then what the server has kept."""
    validate({"request": fields}, SCHEMA, raise_on_error=True)
    return DistillRequest.model_validate(fields)


def test_every_shipped_recipe_can_be_chosen() -> None:
    assert set(get_args(Recipe)) == {file.stem for file in RECIPES.glob("*.yaml")}


def test_an_untouched_form_is_the_recipe() -> None:
    prefilled = SCHEMA["properties"]["request"]["default"]
    request = submit(**prefilled)
    assert request == DistillRequest()
    assert request.changes == []


def test_a_field_that_was_emptied_again_changes_nothing() -> None:
    empty = {
        name: None if field["type"] in ("integer", "number") else field.get("default", [])
        for name, field in FIELDS.items()
    }
    assert submit(**empty).changes == []


def test_the_form_has_one_plain_field_for_each_setting_in_the_order_of_the_request() -> None:
    assert all({"title", "description", "type"} <= field.keys() for field in FIELDS.values())
    assert [field["position"] for field in FIELDS.values()] == list(range(len(FIELDS)))
    assert list(FIELDS) == list(DistillRequest.model_fields)


def test_what_is_filled_in_becomes_a_change_to_the_recipe() -> None:
    request = submit(
        recipe="tiny_mixed",
        steps=3,
        seed=0,
        learning_rate=1e-4,
        opd_adv_weight=0.5,
        task_adv_weight=1,
        student_devices="cpu:0, cpu:1",
        teacher_devices="cpu",
        tracking="TensorBoard",
        experiment="tried in the form",
        overrides=["data.max_prompt_tokens=40"],
        settings="evaluation:\n  every: 3\n  samples: 2\n",
    )
    config = load_recipe(request.path, request.changes)
    assert config.opd is not None
    assert (config.training.steps, config.seed, config.training.learning_rate) == (3, 0, 1e-4)
    assert (config.opd.opd_adv_weight, config.opd.task_adv_weight) == (0.5, 1.0)
    assert config.student.devices == ("cpu:0", "cpu:1")
    assert (config.tracking.mlflow, config.tracking.tensorboard) == (False, True)
    assert config.tracking.experiment == "tried in the form"
    assert config.data.max_prompt_tokens == 40
    assert (config.evaluation.every, config.evaluation.samples) == (3, 2)


def test_a_server_that_runs_takes_the_place_of_the_launched_one() -> None:
    request = submit(teacher_endpoint="http://gpu-7:30000", teacher_api_key="env:TEACHER_KEY")
    config = load_recipe(request.path, request.changes)
    assert config.opd is not None
    (teacher,) = config.opd.teachers
    assert (teacher.endpoint, teacher.launch) == ("http://gpu-7:30000", None)
    assert teacher.api_key is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"recipe": "tinny"},
        {"recipe_file": "/data/recipe"},
        {"steps": 0},
        {"steps": 2.5},
        {"seed": -1},
        {"learning_rate": 0},
        {"opd_adv_weight": -1},
        {"task_adv_weight": "much"},
        {"student_devices": "gpu0"},
        {"teacher_devices": "0,,1"},
        {"teacher_endpoint": "gpu-7:30000"},
        {"tracking": "somewhere"},
        {"overrides": ["training.steps"]},
        {"stepps": 3},
    ],
    ids=str,
)
def test_the_server_refuses_what_cannot_be_meant(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"request"):
        submit(**fields)
    with pytest.raises(RequestError):
        DistillRequest.model_validate(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"teacher_api_key": SECRET},
        {"teacher_endpoint": f"http://me:{SECRET}@gpu-7:30000"},
        {"teacher_endpoint": f"http://gpu-7:30000?key={SECRET}"},
        {"overrides": [f"opd.teachers.0.api_key={SECRET}"]},
        {"overrides": [f"opd.teachers.0.api_key = '{SECRET}'"]},
        {"overrides": [f"opd.teachers.0.launch.env.HF_TOKEN={SECRET}"]},
        {"overrides": [f'opd.teachers.0.launch.extra_args=["--ssl-password", "{SECRET}"]']},
        {"overrides": [f"opd.teachers.0.launch.extra_args=[--ssl-password={SECRET}]"]},
        {"overrides": [f"tracking.mlflow_uri=http://me:{SECRET}@mlflow"]},
        {"overrides": [f"name=hf_{SECRET.replace('-', '')}{SECRET.replace('-', '')}"]},
        {"settings": f"opd:\n  teachers:\n    - name: t\n      api_key: {SECRET}\n"},
        {"settings": f"opd: {{teachers: [{{api_key: '{SECRET}'}}]}}"},
        {"settings": f'{{"opd": {{"teachers": [{{"api_key" : "{SECRET}"}}]}}}}'},
        {"settings": f"api_key:\n  {SECRET}"},
        {"settings": f"ray:\n  address: http://me:{SECRET}@head:8265"},
        {"settings": f"extra_args:\n  - --hf-token\n  - {SECRET}"},
        {"settings": f"extra_args: ['--header', 'Authorization: Bearer {SECRET}']"},
        {"overrides": [f"opd.teachers.0.launch.env.AUTH={SECRET}"]},
        {"overrides": [f"opd.teachers.0.launch.env.openai_key={SECRET}"]},
        {"overrides": [f"opd.teachers.0.launch.env.HF_TOKEN_2={SECRET}"]},
        {"overrides": [f"opd.teachers.0.launch.env={{Authorization: 'Bearer {SECRET}'}}"]},
        {"overrides": [f"opd.teachers.0.launch.env={{MY_TOKEN: no.{SECRET}}}"]},
        {"overrides": [f"opd.teachers.0.api_key=1-{SECRET}"]},
        {"overrides": [f"opd.teachers.0.api_key=off-the-record-{SECRET}"]},
        {"overrides": [f"opd.teachers.0.api_key=env:x {SECRET}"]},
        {"overrides": [f"opd.teachers.0.api_key=1#{SECRET}"]},
        {"overrides": [f"opd.teachers.0.api_key=0}}{SECRET}"]},
        {"overrides": [f"tracking.mlflow_uri=https://{SECRET}@mlflow"]},
    ],
    ids=str,
)
def test_a_secret_is_refused_by_the_server_and_by_the_request_which_does_not_repeat_it(
    fields: dict[str, Any],
) -> None:
    with pytest.raises(ValidationError, match=r"request.* was expected") as at_submit:
        submit(**fields)
    with pytest.raises(RequestError) as at_start:
        DistillRequest.model_validate(fields)
    assert SECRET not in f"{at_submit.value}{at_start.value}"


def test_the_server_says_what_to_write_in_place_of_a_secret() -> None:
    with pytest.raises(ValidationError, match=REFERENCES):
        submit(overrides=[f"opd.teachers.0.api_key={SECRET}"])


@pytest.mark.parametrize(
    "text",
    [
        "opd.teachers.0.api_key=env:TEACHER_KEY",
        "opd.teachers.0.api_key='block:teacher-key'",
        "opd.teachers.0.api_key=null",
        "opd.teachers.0.api_key=block:2nd-key",
        "opd.teachers.0.api_key=null # the old one asked for none",
        "opd.teachers.0.api_key=",
        'opd.teachers=[{"name":"a","api_key":null},{"api_key":"env:KEY"}]',
        "opd.teachers.0.launch.extra_args=[--disable-custom-key, --max-prefill-token-num, 9]",
        "opd.teachers.0.launch.env={HF_TOKEN: env:HF_TOKEN, TOKENIZERS_PARALLELISM: 'false'}",
        "opd.teachers.0.launch.env.HF_HUB_DISABLE_IMPLICIT_TOKEN='1'",
        "opd.teachers.0.launch.env.SSL_KEY_FILE=/etc/key.pem",
        "tracking.mlflow_uri=http://mlflow:5000/a@b",
        "description=the api_key is kept elsewhere",
    ],
)
def test_what_names_where_a_secret_is_kept_is_none(text: str) -> None:
    assert submit(overrides=[text]).changes == [text]
    assert submit(settings="# " + text).changes == []


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.stem)
def test_no_recipe_that_ships_looks_like_a_secret(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert submit(settings=text).settings == text
    config: ExperimentConfig = load_recipe(file)
    settings = [f"{key}={value}" for key, value in flatten_params(config.resolved()).items()]
    assert submit(overrides=settings).overrides == settings


def test_no_key_of_a_recipe_is_the_name_of_a_secret_but_the_api_key() -> None:
    manual = RECIPES.parents[1] / "docs" / "configuration.md"
    keys = re.findall(r"(?m)^\| `([\w.]+)` \|", manual.read_text(encoding="utf-8"))
    assert len(keys) > 100
    for key in keys:
        if not key.endswith(".api_key"):
            assert submit(overrides=[f"{key}=a word"]).overrides
            assert not names_a_secret(key)


@pytest.mark.parametrize(
    "field",
    [
        {"teacher_devices": "0"},
        {"teacher_endpoint": "http://gpu-7:30000"},
        {"teacher_api_key": "env:TEACHER_KEY"},
    ],
    ids=str,
)
def test_fields_of_the_only_teacher_are_refused_where_there_are_several(
    field: dict[str, Any],
) -> None:
    request = submit(recipe="tiny_multi_teacher", **field)
    with pytest.raises(ConfigError) as error:
        _ = request.changes
    for expected in (*field, "(adder)", "(subtractor)", "opd.teachers.1", "Other settings"):
        assert expected in str(error.value)


def test_so_are_they_where_there_is_no_teacher() -> None:
    with pytest.raises(ConfigError, match=r"tiny_grpo.* has none"):
        _ = submit(recipe="tiny_grpo", teacher_devices="0").changes


def test_so_are_they_where_the_only_teacher_has_several_servers(tmp_path: Path) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text("opd:\n  teachers:\n    - name: big\n      replicas: [{}, {}]\n")
    request = submit(recipe_file=str(recipe), teacher_devices="0")
    with pytest.raises(ConfigError, match=r"opd\.teachers\.0\.replicas\.1 \(big\)"):
        _ = request.changes


def test_and_of_a_run_to_go_on_it_is_its_own_recipe_that_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"opd": {"teachers": [{"name": "adder"}, {"name": "subtractor"}]}}'
    )
    for how in ("resume", "fork"):
        request = submit(teacher_endpoint="http://gpu-7:30000", **{how: str(tmp_path)})
        with pytest.raises(ConfigError, match=r"adder.*subtractor"):
            _ = request.changes


@pytest.mark.parametrize("how", ["resume", "fork"])
def test_that_run_is_looked_for_where_the_settings_say(tmp_path: Path, how: str) -> None:
    run = tmp_path / "elsewhere" / "tiny-1"
    run.mkdir(parents=True)
    (run / "config.json").write_text('{"opd": {"teachers": [{"name": "a"}, {"name": "b"}]}}')
    where = f"run: {{root: {run.parent}}}"
    request = submit(teacher_devices="cpu", settings=where, **{how: run.name})
    with pytest.raises(ConfigError, match=r"opd\.teachers\.1 \(b\)"):
        _ = request.changes


def test_a_key_that_is_written_twice_in_the_piece_of_yaml_is_refused() -> None:
    with pytest.raises(RequestError, match=r"line 3: the key 'seed' is written twice"):
        DistillRequest(settings="seed: 1\nname: a\nseed: 2\n")


def test_a_setting_is_written_once() -> None:
    twice = {"steps": 3, "settings": "training: {steps: 4}"}
    with pytest.raises(RequestError, match=r"training\.steps is set twice"):
        DistillRequest.model_validate(twice)


def test_of_the_rows_the_last_one_counts_as_on_a_command_line() -> None:
    rows = ["training.steps=3", "training.steps=4"]
    assert DistillRequest(overrides=rows).changes == rows
    with pytest.raises(RequestError, match=r"training\.steps is set twice"):
        DistillRequest(steps=2, overrides=rows)


def test_another_program_is_told_what_is_wrong_with_its_request() -> None:
    with pytest.raises(ConfigError, match=r"cannot be asked for: .*resume or fork, got both"):
        DistillRequest.of(resume="a", fork="b")


def test_a_run_goes_on_or_begins_anew() -> None:
    with pytest.raises(RequestError, match=r"resume or fork, got both"):
        DistillRequest(resume="a", fork="b")


def test_yaml_that_is_none_is_refused() -> None:
    for text in ("a: [", "training.steps=3"):
        with pytest.raises(RequestError, match=r"YAML|keys as in a recipe"):
            DistillRequest(settings=text)
