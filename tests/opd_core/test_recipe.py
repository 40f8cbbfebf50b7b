"""Recipes: what a mistake is answered with, overrides, variables, paths, devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opd_core.config import ExperimentConfig
from opd_core.errors import ConfigError
from opd_core.recipe import cache_dir, find_recipe, load_recipe, parse_config

RECIPE = """\
name: test
student:
  model: models/student
data:
  train: train.jsonl
sampling:
  max_new_tokens: 16
opd:
  teachers:
    - name: teacher
      launch: {model: models/teacher, startup_limit_s: 60}
  default_teacher: teacher
training:
  steps: 2
  prompts_per_step: 4
  learning_rate: 1e-6
"""
NO_VARIABLES: dict[str, str] = {}


def write(folder: Path, text: str = RECIPE) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def load(
    folder: Path, *overrides: str, text: str = RECIPE, environ: dict[str, str] = NO_VARIABLES
) -> ExperimentConfig:
    return load_recipe(write(folder, text), overrides, environ)


def refusal(folder: Path, *overrides: str, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, *overrides, **more)
    return str(caught.value)


# ------------------------------------------------------------------ reading


def test_a_recipe_is_read(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert (config.name, config.training.steps, config.student.dtype) == ("test", 2, "float32")


def test_a_number_may_be_written_as_1e_6(tmp_path: Path) -> None:
    # YAML 1.1 takes 1e-6, which has no dot, for a word.
    assert load(tmp_path).training.learning_rate == 1e-6
    assert load(tmp_path, "training.learning_rate=3e-4").training.learning_rate == 3e-4


def test_a_resolved_recipe_is_read_again_as_the_same_tree(tmp_path: Path) -> None:
    config = load(tmp_path, "opd.teachers.0.api_key=env:KEY", "student.devices=[0, 1]")
    written = json.loads(json.dumps(config.resolved()))
    assert parse_config(written, source="config.json") == config
    copy = write(tmp_path, json.dumps(written))  # JSON is YAML
    assert load_recipe(copy, environ=NO_VARIABLES) == config


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: the recipe cannot be read \(No such file"):
        load_recipe(tmp_path / "none.yaml", environ=NO_VARIABLES)


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)"):
        load_recipe(tmp_path, environ=NO_VARIABLES)


def test_what_is_not_text_is_no_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_bytes(b"name: \xff\xfe")
    with pytest.raises(ConfigError, match=r"recipe\.yaml: not UTF-8 text"):
        load_recipe(file, environ=NO_VARIABLES)


@pytest.mark.parametrize("text", ["name: [1", "a: b: c", "\tname: x", "? [a]\n: b\n"])
def test_what_is_not_yaml_is_refused_with_its_place(tmp_path: Path, text: str) -> None:
    said = refusal(tmp_path, text=text)
    assert said.startswith(f"{tmp_path / 'recipe.yaml'}: not valid YAML")
    assert "line 1" in said


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "hello"])
def test_a_recipe_holds_keys(tmp_path: Path, text: str) -> None:
    assert "expected keys like 'student:' and 'data:'" in refusal(tmp_path, text=text)


def test_a_key_written_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    said = refusal(tmp_path, text=RECIPE + "  steps: 3\n")
    assert said.endswith("recipe.yaml: line 17: the key 'steps' is written twice; keep one")


def test_a_merge_key_may_be_overruled(tmp_path: Path) -> None:
    text = RECIPE.replace(
        "    - name: teacher\n      launch: {model: models/teacher, startup_limit_s: 60}\n",
        "    - name: teacher\n      replicas:\n"
        "        - launch: &server {model: models/teacher, cpu_threads: 2}\n"
        "        - launch: {<<: *server, cpu_threads: 1}\n",
    )
    opd = load(tmp_path, text=text).opd
    assert opd is not None
    threads = [r.launch and r.launch.cpu_threads for r in opd.teachers[0].all_replicas]
    assert threads == [2, 1]


# ------------------------------------------------------------------ mistakes in keys and values


def test_an_unknown_key_is_answered_with_the_nearest_one(tmp_path: Path) -> None:
    said = refusal(tmp_path, text=RECIPE.replace("learning_rate", "learnig_rate"))
    assert said.startswith(f"{tmp_path / 'recipe.yaml'}:\n")
    assert "training.learnig_rate: unknown key; did you mean 'learning_rate'?" in said
    assert "training.learning_rate: required, but not there; add it" in said


def test_an_unknown_key_in_a_list_is_answered_with_what_is_known_there(tmp_path: Path) -> None:
    said = refusal(tmp_path, text=RECIPE.replace("startup_limit_s", "startup_limit"))
    assert "opd.teachers.0.launch.startup_limit: unknown key; did you mean" in said
    assert "known here: context_length, cpu_threads" in said
    assert "too short" not in said
    assert "at least 1" not in said


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    text = RECIPE.replace("steps: 2", "steps: 0").replace("max_new_tokens: 16", "top_p: 2")
    said = refusal(tmp_path, text=text)
    assert "training.steps: input should be greater than or equal to 1, got 0" in said
    assert "sampling.max_new_tokens: required" in said
    assert "sampling.top_p: input should be less than or equal to 1, got 2" in said


def test_a_bad_combination_says_what_to_do(tmp_path: Path) -> None:
    said = refusal(tmp_path, "sampling.temperature=0.7")
    assert "with OPD on, rollouts must come from the plain policy" in said
    assert "remove temperature" in said


def test_a_wrong_kind_of_value_shows_no_heap_of_data(tmp_path: Path) -> None:
    text = RECIPE.replace("model: models/student", "model: {path: x, secret: sk-1}")
    said = refusal(tmp_path, text=text)
    assert "student.model: input should be a valid string, got a dict" in said
    assert "sk-1" not in said


def test_a_plain_key_in_a_recipe_is_refused_and_not_repeated(tmp_path: Path) -> None:
    said = refusal(tmp_path, text=RECIPE.replace("launch:", "api_key: sk-secret\n      launch:"))
    assert "opd.teachers.0.api_key: a key is never written in a recipe" in said
    assert "env:NAME" in said
    assert "sk-secret" not in said


def test_a_plain_key_from_a_variable_is_refused_and_not_repeated(tmp_path: Path) -> None:
    said = refusal(tmp_path, "opd.teachers.0.api_key=$KEY", environ={"KEY": "sk-secret"})
    assert "a key is never written in a recipe" in said
    assert "sk-secret" not in said


# ------------------------------------------------------------------ overrides


def test_an_override_changes_one_setting(tmp_path: Path) -> None:
    config = load(tmp_path, "training.steps=20", "name=other", "data.evaluation_rows=null")
    assert (config.training.steps, config.name) == (20, "other")
    assert config.training.prompts_per_step == 4


def test_an_override_reaches_into_a_list(tmp_path: Path) -> None:
    opd = load(tmp_path, "opd.teachers.0.launch.tp_size=2", "training.betas=[0.8, 0.9]").opd
    assert opd is not None
    assert opd.teachers[0].launch is not None
    assert opd.teachers[0].launch.tp_size == 2


def test_an_override_replaces_an_item_of_a_list(tmp_path: Path) -> None:
    config = load(tmp_path, "student.devices=[0, 1]", "student.devices.1=3")
    assert config.student.devices == ("0", "3")


def test_an_override_makes_the_section_that_it_needs(tmp_path: Path) -> None:
    assert load(tmp_path, "task.group_size=4").task.group_size == 4


def test_an_empty_value_is_null(tmp_path: Path) -> None:
    overrides = ("opd=", "task.group_size=2", "task.judge=m:f")
    assert load(tmp_path, *overrides).opd is None


def test_an_override_of_an_alias_changes_one_place_only(tmp_path: Path) -> None:
    text = RECIPE.replace(
        "      launch: {model: models/teacher, startup_limit_s: 60}\n",
        "      replicas:\n        - launch: &server {model: models/teacher, devices: ['0']}\n"
        "        - launch: *server\n",
    )
    opd = load(tmp_path, "opd.teachers.0.replicas.1.launch.devices=[1]", text=text).opd
    assert opd is not None
    devices = [r.launch and r.launch.devices for r in opd.teachers[0].all_replicas]
    assert devices == [("0",), ("1",)]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.steps", "expected KEY.PATH=VALUE, e.g. training.steps=20"),
        ("=5", "expected KEY.PATH=VALUE"),
        (" =5", "expected KEY.PATH=VALUE"),
        ("traning.steps=5", "traning: unknown key; did you mean 'training'?"),
        ("training.step=5", "training.step: unknown key; did you mean 'steps'?"),
        ("opd.teachers.1.name=x", "opd.teachers.1: expected an index below 1"),
        ("opd.teachers.one.name=x", "opd.teachers.one: expected an index below 1"),
        ("opd.teachers.-1.name=x", "opd.teachers.-1: expected an index below 1"),
        ("opd.teachers.1=x", "opd.teachers.1: expected an index below 1"),
        ("opd.teachers.0.name.x=1", "opd.teachers.0.name: input should be a valid string"),
        ("training.betas.0.x=1", "training.betas.0 holds no keys"),
        ("training.betas.0.x.y=1", "training.betas.0 holds no keys"),
        ("name=[1", "--set name=[1: not valid YAML"),
        ("student={model: a, model: b}", "line 1: the key 'model' is written twice"),
    ],
)
def test_a_wrong_override_is_refused(tmp_path: Path, override: str, said: str) -> None:
    assert said in refusal(tmp_path, "training.betas=[0.9, 0.98]", override)


# ------------------------------------------------------------------ variables and paths


def test_a_variable_at_the_start_of_a_value_is_filled_in(tmp_path: Path) -> None:
    environ = {"MODELS": "/big/models/", "TRAIN": "/d.jsonl", "URL": "http://host:8000"}
    text = RECIPE.replace(
        "launch: {model: models/teacher, startup_limit_s: 60}", "endpoint: $URL/v1"
    )
    overrides = ("student.model=$MODELS/qwen/8b", "data.train=$TRAIN", "description=costs 5$")
    config = load(tmp_path, *overrides, text=text, environ=environ)
    assert config.student.model == "/big/models/qwen/8b"
    assert (config.data.train, config.description) == ("/d.jsonl", "costs 5$")
    assert config.opd is not None
    assert config.opd.teachers[0].endpoint == "http://host:8000/v1"


def test_a_variable_that_is_not_set_is_told_with_its_key(tmp_path: Path) -> None:
    text = RECIPE.replace("model: models/teacher", "model: $MODELS/teacher")
    said = refusal(tmp_path, text=text)
    assert said == (
        f"{tmp_path / 'recipe.yaml'}: opd.teachers.0.launch.model: '$MODELS/teacher': "
        "the environment variable MODELS is not set"
    )


def test_an_overridden_value_needs_no_variable(tmp_path: Path) -> None:
    text = RECIPE.replace("model: models/student", "model: $MODELS/student")
    assert load(tmp_path, "student.model=/m", text=text).student.model == "/m"


def test_the_home_is_filled_in(tmp_path: Path) -> None:
    config = load(tmp_path, "student.model=~/models/a", "run.root=~/runs")
    assert config.student.model == str(Path.home() / "models/a")
    assert config.run.root == str(Path.home() / "runs")


def test_the_cache_has_a_place_even_if_no_variable_names_it(tmp_path: Path) -> None:
    default = str(Path.home() / ".cache/opd-lab")
    assert load(tmp_path, "student.model=$OPD_CACHE/a").student.model == f"{default}/a"
    environ = {"OPD_CACHE": "/c"}
    assert load(tmp_path, "student.model=$OPD_CACHE/a", environ=environ).student.model == "/c/a"
    assert (str(cache_dir({})), str(cache_dir(environ))) == (default, "/c")


def test_relative_paths_mean_files_beside_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes, elsewhere = tmp_path / "recipes", tmp_path / "elsewhere"
    for folder in (recipes, elsewhere):
        (folder / "models/student").mkdir(parents=True)
    (recipes / "train.jsonl").touch()
    (elsewhere / "models/teacher").mkdir()
    write(recipes)
    monkeypatch.chdir(elsewhere)
    config = load_recipe("../recipes/recipe.yaml", environ=NO_VARIABLES)
    assert config.student.model == str(recipes / "models/student")
    assert config.data.train == str(recipes / "train.jsonl")
    assert config.opd is not None
    assert config.opd.teachers[0].launch is not None
    assert config.opd.teachers[0].launch.model == str(elsewhere / "models/teacher")


# ------------------------------------------------------------------ devices from the environment


def launched_on(config: ExperimentConfig) -> list[tuple[str, ...]]:
    assert config.opd is not None
    replicas = [replica for teacher in config.opd.teachers for replica in teacher.all_replicas]
    return [replica.launch.devices for replica in replicas if replica.launch]


def test_two_variables_are_the_defaults_of_the_devices(tmp_path: Path) -> None:
    environ = {"STUDENT_CUDA_VISIBLE_DEVICES": "0, 1", "TEACHER_CUDA_VISIBLE_DEVICES": "7"}
    config = load(tmp_path, environ=environ)
    assert (config.student.devices, launched_on(config)) == (("0", "1"), [("7",)])


@pytest.mark.parametrize(("said", "devices"), [({}, ("0", "1")), ({"MINE": "4"}, ("4",))])
def test_a_recipe_may_say_what_holds_without_a_variable(
    tmp_path: Path, said: dict[str, str], devices: tuple[str, ...]
) -> None:
    config = load(tmp_path, "student.devices=$MINE:-0,1", environ=said)
    assert config.student.devices == devices


def test_the_dapo_recipe_takes_the_devices_of_the_two_variables() -> None:
    environ = {"STUDENT_CUDA_VISIBLE_DEVICES": "4,5,6,3", "TEACHER_CUDA_VISIBLE_DEVICES": "1"}
    recipe = find_recipe("dapo_math_qwen3_8b")
    named, plain = load_recipe(recipe, environ=environ), load_recipe(recipe, environ={})
    assert (named.student.devices, launched_on(named)) == (("4", "5", "6", "3"), [("1",)])
    assert (plain.student.devices, launched_on(plain)) == (("0", "1", "2", "3"), [("7",)])


def test_an_empty_variable_means_the_cpu(tmp_path: Path) -> None:
    environ = {"STUDENT_CUDA_VISIBLE_DEVICES": "", "TEACHER_CUDA_VISIBLE_DEVICES": ""}
    config = load(tmp_path, environ=environ)
    assert (config.student.devices, launched_on(config)) == (("cpu",), [("cpu",)])


def test_an_empty_variable_is_the_cpu_also_where_a_recipe_has_a_default() -> None:
    environ = {"TEACHER_CUDA_VISIBLE_DEVICES": ""}
    config = load_recipe(find_recipe("dapo_math_qwen3_8b"), environ=environ)
    assert launched_on(config) == [("cpu",)]
    with_default = ["student.devices=$STUDENT_CUDA_VISIBLE_DEVICES:-0"]
    config = load_recipe(
        find_recipe("tiny"), with_default, environ={"STUDENT_CUDA_VISIBLE_DEVICES": ""}
    )
    assert config.student.devices == ("cpu",)


@pytest.mark.parametrize("written", ["[0, 1]", "['0', '1']"])
def test_a_variable_may_repeat_the_recipe(tmp_path: Path, written: str) -> None:
    environ = {"STUDENT_CUDA_VISIBLE_DEVICES": "0,1"}
    config = load(tmp_path, f"student.devices={written}", environ=environ)
    assert config.student.devices == ("0", "1")


@pytest.mark.parametrize(
    ("override", "variable", "key"),
    [
        ("student.devices=[0]", "STUDENT_CUDA_VISIBLE_DEVICES", "student.devices"),
        ("student.devices=[2, 1]", "STUDENT_CUDA_VISIBLE_DEVICES", "student.devices"),
        ("student.devices='2,1'", "STUDENT_CUDA_VISIBLE_DEVICES", "student.devices"),
        ("opd.teachers.0.launch.devices=[0]", "TEACHER_CUDA_VISIBLE_DEVICES", "launch.devices"),
    ],
)
def test_a_variable_that_contradicts_the_recipe_is_refused(
    tmp_path: Path, override: str, variable: str, key: str
) -> None:
    said = refusal(tmp_path, override, environ={variable: "1,2"})
    assert f"{key} is " in said
    assert f"in the recipe and ['1', '2'] in {variable}: remove one of them" in said


TWO_SERVERS = RECIPE.replace(
    "      launch: {model: models/teacher, startup_limit_s: 60}\n",
    "      replicas:\n"
    "        - launch: {model: models/teacher, devices: [6]}\n"
    "        - launch: {model: models/teacher, devices: [7]}\n",
)


def test_one_variable_cannot_share_devices_among_servers(tmp_path: Path) -> None:
    environ = {"TEACHER_CUDA_VISIBLE_DEVICES": "6,7"}
    assert launched_on(load(tmp_path, text=TWO_SERVERS, environ=environ)) == [("6",), ("7",)]
    unnamed = TWO_SERVERS.replace(", devices: [6]", "").replace(", devices: [7]", "")
    for text, variable in ((unnamed, "6,7"), (TWO_SERVERS, "6")):
        said = refusal(tmp_path, text=text, environ={"TEACHER_CUDA_VISIBLE_DEVICES": variable})
        assert "launches 2 servers: write launch.devices at each" in said


def test_the_teachers_variable_means_nothing_without_a_launched_teacher(tmp_path: Path) -> None:
    environ = {"TEACHER_CUDA_VISIBLE_DEVICES": "7"}
    external = RECIPE.replace(
        "launch: {model: models/teacher, startup_limit_s: 60}", "endpoint: http://h:1"
    )
    assert launched_on(load(tmp_path, text=external, environ=environ)) == []
    without = ("opd=null", "task.group_size=2", "task.judge=m:f")
    assert load(tmp_path, *without, environ=environ).opd is None


PLACES = {"OPD_RUNS": "/shared/runs", "MLFLOW_TRACKING_URI": "http://mlflow:5000"}


def places(config: ExperimentConfig) -> tuple[str, str | None]:
    return config.run.root, config.tracking.mlflow_uri


def test_variables_are_the_defaults_of_where_runs_and_metrics_go(tmp_path: Path) -> None:
    assert places(load(tmp_path, environ=PLACES)) == ("/shared/runs", "http://mlflow:5000")


def test_a_recipe_that_names_its_places_keeps_them(tmp_path: Path) -> None:
    named = load(tmp_path, "run.root=here", "tracking.mlflow_uri=null", environ=PLACES)
    assert places(named) == ("here", None)


def test_a_resolved_recipe_keeps_its_places_whatever_the_environment_says(tmp_path: Path) -> None:
    resolved = load(tmp_path, environ={}).resolved()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(resolved))
    assert places(load_recipe(file, environ=PLACES)) == ("runs", None)


def test_a_password_in_the_variable_is_refused_as_one_in_the_recipe(tmp_path: Path) -> None:
    environ = {"MLFLOW_TRACKING_URI": "http://me:secret@mlflow:5000"}
    said = refusal(tmp_path, environ=environ)
    assert "MLFLOW_TRACKING_PASSWORD" in said
    assert "secret" not in said


@pytest.mark.parametrize("wrong", ["opd=5", "opd.teachers=5", "opd.teachers=[5]", "student=x"])
def test_variables_do_not_hide_a_recipe_of_the_wrong_shape(tmp_path: Path, wrong: str) -> None:
    environ = {"STUDENT_CUDA_VISIBLE_DEVICES": "0", "TEACHER_CUDA_VISIBLE_DEVICES": "1"}
    key = wrong.partition("=")[0]
    assert f"{key}" in refusal(tmp_path, wrong, environ=environ)
