"""The configuration tree against the contract: defaults, refusals and what they say, keys."""

from __future__ import annotations

import json
import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from opd_core.config import (
    ExperimentConfig,
    LaunchConfig,
    OPDConfig,
    OPDTeacherConfig,
    RayConfig,
    ReplicaConfig,
    SamplingConfig,
    TaskSpecConfig,
    TrainingConfig,
)
from opd_core.errors import ConfigError
from opd_core.recipe import parse_config

SECRET = "sk-not-to-be-seen"


def teacher(**changes: Any) -> OPDTeacherConfig:
    return OPDTeacherConfig(**{"name": "teacher", "endpoint": "http://127.0.0.1:13141", **changes})


def opd(**changes: Any) -> OPDConfig:
    return OPDConfig(**{"teachers": [teacher()], "default_teacher": "teacher", **changes})


def experiment(**changes: Any) -> ExperimentConfig:
    whole = {
        "name": "test",
        "student": {"model": "/models/student"},
        "data": {"train": "/data/train.jsonl"},
        "sampling": {"max_new_tokens": 16},
        "opd": opd(),
        "training": {"steps": 1, "prompts_per_step": 4, "learning_rate": 1e-6},
    }
    return ExperimentConfig(**{**whole, **changes})


# ------------------------------------------------------------------ the call of the contract


def test_the_contracts_call_is_accepted_as_it_stands() -> None:
    config = OPDConfig(
        mode="pg-opd", task_adv_weight=0.0, opd_adv_weight=1.0,
        teachers=[OPDTeacherConfig(name="teacher", endpoint="http://127.0.0.1:13141", api_key=None,
                                   request_timeout_s=1200.0, max_retry_per_sample=2, max_concurrency=128)],  # noqa: E501
        data_source_teacher_map={"math_dapo": "teacher"},
    )  # fmt: skip
    assert config.teacher_of("math_dapo") == "teacher"
    assert config.teacher_of("gsm8k") is None


def test_the_defaults_are_the_values_of_the_contracts_call() -> None:
    config = OPDConfig(teachers=[teacher()], data_source_teacher_map={"math_dapo": "teacher"})
    (one,) = config.teachers
    assert (config.mode, config.task_adv_weight, config.opd_adv_weight) == ("pg-opd", 0.0, 1.0)
    assert (one.backend, one.api_key, one.request_timeout_s) == ("sglang", None, 1200.0)
    assert (one.max_retry_per_sample, one.max_concurrency) == (2, 128)
    assert (config.kl_clamp, config.kl_baseline) == (None, False)


@pytest.mark.parametrize("field", ["name", "endpoint"])
def test_a_teacher_needs_a_name_and_a_place(field: str) -> None:
    given = {"name": "teacher", "endpoint": "http://127.0.0.1:1"}
    del given[field]
    with pytest.raises(ValidationError, match=field):
        OPDTeacherConfig.model_validate(given)


def test_a_launch_stands_in_for_an_endpoint() -> None:
    launched = OPDTeacherConfig(name="t", launch=LaunchConfig(model="/m"), backend="embedded")
    (replica,) = launched.all_replicas
    assert (replica.endpoint, replica.backend) == (None, "embedded")
    assert replica.launch == launched.launch


def test_no_teachers_are_refused() -> None:
    with pytest.raises(ValidationError, match="at least 1 item"):
        OPDConfig(teachers=[], default_teacher="teacher")


def test_the_default_teacher_scores_what_the_map_does_not_name() -> None:
    config = opd(
        teachers=[teacher(), teacher(name="other")], data_source_teacher_map={"math_dapo": "other"}
    )
    assert [config.teacher_of(source) for source in ("math_dapo", "x")] == ["other", "teacher"]


# ------------------------------------------------------------------ refusals, and what they say


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mode": "direct-kl"}, "pg-opd"),
        ({"task_adv_weight": 0, "opd_adv_weight": 0}, "nothing would be learned: raise one"),
        ({"task_adv_weight": -0.1}, "task_adv_weight\n.*greater than or equal to 0"),
        ({"opd_adv_weight": -1}, "opd_adv_weight\n.*greater than or equal to 0"),
        ({"opd_adv_weight": float("inf")}, "opd_adv_weight\n.*finite number"),
        ({"opd_adv_weight": float("nan")}, "opd_adv_weight\n.*finite number"),
        ({"default_teacher": None}, "data_source_teacher_map: {<data_source>: teacher}"),
        ({"default_teacher": "x"}, "no teacher is named 'x'; the teachers are: teacher"),
        ({"data_source_teacher_map": {"math": "x"}}, "no teacher is named 'x'"),
        ({"teachers": [teacher(), teacher()]}, "must differ; used twice: teacher"),
        ({"teachers": [teacher(), teacher(name="idle")]}, "'idle' is used by no data_source: map"),
        ({"kl_clamp": 0}, "kl_clamp\n.*greater than 0"),
        ({"whitening": True}, "whitening\n.*not permitted"),
    ],
)
def test_opd_refuses(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        opd(**changes)


@pytest.mark.parametrize("names", [("math-a", "math_a"), ("Teacher", "teacher"), ("t.1", "t-1")])
def test_teachers_whose_keys_would_share_a_variable_are_refused(names: tuple[str, str]) -> None:
    mapped = {name: name for name in names}
    with pytest.raises(ValidationError, match="differ in letters and digits"):
        OPDConfig(teachers=[teacher(name=n) for n in names], data_source_teacher_map=mapped)


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:13141",
        "teacher",
        "ftp://127.0.0.1:13141",
        "http://",
        "http://:13141",
        "http://127.0.0.1:0",
        "http://127.0.0.1:70000",
        "http://127.0.0.1:port",
        "http://[::1",
        "http://127.0.0.1 :13141",
    ],
)
def test_a_bad_url_is_refused_with_a_good_one(endpoint: str) -> None:
    with pytest.raises(ValidationError, match=r"expected a URL like http://127\.0\.0\.1:13141"):
        teacher(endpoint=endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://me:sk-secret@host:1",
        "http://:sk-secret@host:1",
        "http://h:1?key=sk-secret",
        "http://h:1#sk-secret",
    ],
)
def test_a_url_that_may_hold_a_secret_is_refused_without_repeating_it(endpoint: str) -> None:
    with pytest.raises(ValidationError, match="scheme, host, port and path only") as caught:
        teacher(endpoint=endpoint)
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("http://127.0.0.1:13141/", "http://127.0.0.1:13141"),
        ("https://teacher.example/v2/", "https://teacher.example/v2"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_an_endpoint_loses_only_its_last_slash(written: str, kept: str) -> None:
    assert teacher(endpoint=written).endpoint == kept


@pytest.mark.parametrize("name", ["", "a b", "../up", "-flag", "a" * 65, "ä"])
def test_a_teachers_name_must_do_for_files_and_command_lines(name: str) -> None:
    with pytest.raises(ValidationError, match="name"):
        teacher(name=name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_timeout_s", 0),
        ("request_timeout_s", float("inf")),
        ("max_retry_per_sample", -1),
        ("max_concurrency", 0),
        ("backend", "vllm"),
    ],
)
def test_a_teachers_limits_are_checked(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        teacher(**{field: value})


# ------------------------------------------------------------------ replicas and launches


LAUNCH = {"model": "/models/teacher"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"replicas": [{"endpoint": "http://h:1"}]}, "either 'replicas' or endpoint/launch"),
        (
            {"endpoint": None, "backend": "lmdeploy", "replicas": [{"endpoint": "http://h:1"}]},
            "backend is named at each replica",
        ),
        ({"endpoint": None, "replicas": [{}]}, "name an 'endpoint' .* or a 'launch'"),
        ({"launch": {**LAUNCH, "port": 5}}, "name the port once"),
        ({"endpoint": "http://127.0.0.1", "launch": LAUNCH}, "needs a port"),
        ({"endpoint": "http://10.0.0.5:80", "launch": LAUNCH}, "answers at http://127.0.0.1:PORT"),
        ({"endpoint": "https://127.0.0.1:80", "launch": LAUNCH}, "answers at http://127.0.0.1"),
        ({"endpoint": "http://127.0.0.1:80/v1", "launch": LAUNCH}, "answers at http://127.0.0.1"),
        ({"backend": "lmdeploy", "launch": {**LAUNCH, "dtype": "float32"}}, "has no float32"),
        ({"backend": "embedded", "launch": {**LAUNCH, "tp_size": 2}}, "neither tp_size"),
        ({"backend": "embedded", "launch": {**LAUNCH, "memory_fraction": 0.5}}, "neither tp_size"),
    ],
)
def test_a_contradictory_teacher_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        teacher(**changes)


def test_replicas_may_mix_backends() -> None:
    mixed = teacher(
        endpoint=None,
        replicas=[
            {"endpoint": "http://a:1"},
            {"endpoint": "http://b:1", "backend": "lmdeploy"},
            {"launch": LAUNCH, "backend": "embedded"},
        ],
    )
    assert [r.backend for r in mixed.all_replicas] == ["sglang", "lmdeploy", "embedded"]


@pytest.mark.parametrize(
    "flag", ["--host", "--port=1", "--server-name", "--api-key", "--api-keys=k", "--admin-api-key"]
)
def test_extra_args_may_not_move_the_server_or_show_a_key(flag: str) -> None:
    with pytest.raises(ValidationError, match="cannot stand here"):
        LaunchConfig(model="/m", extra_args=("--max-total-tokens", "9", flag))


@pytest.mark.parametrize(
    ("name", "instead"), [("CUDA_VISIBLE_DEVICES", "launch.devices"), ("OPD_API_KEY", "api_key")]
)
def test_a_launchs_environment_may_not_say_what_a_field_says(name: str, instead: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} cannot stand here: write .*{instead}"):
        LaunchConfig(model="/m", env={name: "1"})


def test_numbers_of_a_yaml_file_are_words_in_devices_arguments_and_environment() -> None:
    launch = LaunchConfig.model_validate(
        {"model": "/m", "devices": [0, 1], "extra_args": ["--queue", 64], "env": {"LEVEL": 2}}
    )
    assert (launch.devices, launch.extra_args) == (("0", "1"), ("--queue", "64"))
    assert launch.env == {"LEVEL": "2"}


# ------------------------------------------------------------------ keys


@pytest.mark.parametrize("reference", ["env:TEACHER_KEY", "block:teacher-key.v2"])
def test_a_reference_to_a_key_is_kept(reference: str) -> None:
    one = teacher(api_key=reference)
    assert one.model_dump(mode="json")["api_key"] == reference
    config = experiment(opd=opd(teachers=[one]))
    assert parse_config(config.resolved(), source="here") == config


def test_a_plain_key_from_python_is_kept_and_written_nowhere() -> None:
    one = teacher(api_key=SECRET)
    config = experiment(opd=opd(teachers=[one]))
    assert one.api_key is not None
    assert one.api_key.get_secret_value() == SECRET
    for text in (
        repr(config),
        str(config),
        repr(config.model_dump()),
        config.model_dump_json(),
        json.dumps(config.resolved()),
    ):
        assert SECRET not in text
    assert one.model_dump()["api_key"] == "env:OPD_TEACHER_KEY_TEACHER"


def test_a_key_is_in_no_error() -> None:
    for wrong in ({"endpoint": None}, {"replicas": [{"endpoint": "http://h:1"}]}, {"nmae": "x"}):
        with pytest.raises(ValidationError) as caught:
            teacher(api_key=SECRET, **wrong)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("written", [SECRET, 123456789, ["sk-not-to-be-seen"]])
def test_a_plain_key_in_data_that_was_written_is_refused_and_not_repeated(written: object) -> None:
    data = experiment().resolved()
    data["opd"]["teachers"][0]["api_key"] = written
    with pytest.raises(ConfigError, match=r"opd\.teachers\.0\.api_key: ") as caught:
        parse_config(data, source="config.json")
    assert SECRET not in str(caught.value)
    assert "123456789" not in str(caught.value)


def test_a_plain_key_in_data_is_answered_with_where_to_keep_it() -> None:
    data = experiment().resolved()
    data["opd"]["teachers"][0]["api_key"] = SECRET
    with pytest.raises(ConfigError, match=r"'env:NAME' .* or 'block:NAME'"):
        parse_config(data, source="config.json", base_dir=Path("/recipes"))


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="api_key: null"):
        teacher(api_key="")


def test_a_key_travels_in_a_variable_named_after_its_teacher() -> None:
    assert teacher(name="math-32b.v1").key_variable == "OPD_TEACHER_KEY_MATH_32B_V1"


# ------------------------------------------------------------------ frozen, written, read again


def test_the_tree_is_frozen() -> None:
    config = experiment()
    with pytest.raises(ValidationError, match="frozen"):
        config.opd.teachers[0].name = "other"  # type: ignore[union-attr, misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1  # type: ignore[misc]


def test_an_unknown_key_is_an_error_at_every_level() -> None:
    def levels(node: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        inside = node.items() if isinstance(node, dict) else enumerate(node)
        below = [levels(v, (*path, k)) for k, v in inside if isinstance(v, dict | list)]
        return [*([path] if isinstance(node, dict) else []), *chain.from_iterable(below)]

    free = {"env", "data_source_teacher_map"}  # their keys are the user's own
    whole = experiment(
        opd=opd(teachers=[teacher(endpoint=None, launch=LAUNCH, backend="embedded")])
    ).resolved()
    paths = [path for path in levels(whole, ()) if not free & set(path)]
    assert len(paths) >= 13  # every section, a teacher and its launch
    for path in paths:
        data = json.loads(json.dumps(whole))
        node = data
        for part in path:
            node = node[part]
        node["no_such_key"] = 1
        with pytest.raises(ConfigError, match="no_such_key: unknown key"):
            parse_config(data, source="here")


def test_a_resolved_tree_is_read_again_as_the_same_tree() -> None:
    config = experiment(
        student={"model": "/m", "devices": ("0", "GPU-ab-1")},
        task={"group_size": 4, "judge": "opd_core.agent_loop.judges:math"},
        opd=opd(
            task_adv_weight=0.5,
            kl_clamp=5.0,
            teachers=[
                teacher(
                    endpoint=None,
                    replicas=[
                        {"launch": {**LAUNCH, "devices": ["7"], "env": {"A": "1"}}},
                        {"endpoint": "http://h:1", "backend": "lmdeploy"},
                    ],
                )
            ],
        ),
    )
    written = json.loads(json.dumps(config.resolved()))
    assert parse_config(written, source="config.json") == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_filled_in_endpoints_survive_writing_and_reading() -> None:
    written = teacher(endpoint=None, backend="embedded", launch={**LAUNCH, "port": 7001})
    placed = written.with_endpoints(["http://127.0.0.1:7001"])
    (replica,) = placed.all_replicas
    assert (replica.endpoint, replica.backend) == ("http://127.0.0.1:7001", "embedded")
    config = experiment(opd=opd(teachers=[placed]))
    again = parse_config(config.resolved(), source="config.json")
    assert again == config
    assert again.opd is not None
    assert again.opd.teachers[0].all_replicas == (replica,)
    assert placed.with_endpoints(["http://127.0.0.1:7001"]) == placed


def test_endpoints_are_filled_in_replica_by_replica() -> None:
    two = teacher(endpoint=None, replicas=[{"launch": LAUNCH}, {"endpoint": "http://h:1"}])
    placed = two.with_endpoints(["http://127.0.0.1:5", "http://h:1"])
    assert [r.endpoint for r in placed.all_replicas] == ["http://127.0.0.1:5", "http://h:1"]
    assert [r.launch is None for r in placed.all_replicas] == [False, True]
    with pytest.raises(ValueError, match="shorter"):
        two.with_endpoints(["http://127.0.0.1:5"])


# ------------------------------------------------------------------ rules across the tree


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.7},
        {"top_p": 0.95},
        {"top_k": 50},
        {"repetition_penalty": 1.1},
        {"min_tokens": 1},
    ],
)
def test_with_opd_only_the_plain_policy_is_sampled(change: dict[str, float]) -> None:
    sampling = SamplingConfig.model_validate({"max_new_tokens": 16, **change})
    with pytest.raises(ValidationError, match="rollouts must come from the plain policy") as caught:
        experiment(sampling=sampling)
    assert next(iter(change)) in str(caught.value)
    judged = {"group_size": 2, "judge": "opd_core.agent_loop.judges:math"}
    assert experiment(sampling=sampling, opd=None, task=judged).sampling == sampling


def test_evaluation_may_use_another_temperature() -> None:
    assert experiment(evaluation={"temperature": 0.6}).evaluation.temperature == 0.6


def test_without_opd_the_task_reward_trains() -> None:
    config = experiment(opd=None, task={"group_size": 2, "batch_judge": "m:f"})
    assert config.task_adv_weight == 1.0
    assert config.opd is None


def test_whether_there_is_a_teacher_is_said_and_not_left_out() -> None:
    data = experiment().resolved()
    del data["opd"]
    with pytest.raises(ConfigError, match="opd: required, but not there"):
        parse_config(data, source="here")


def test_scoring_without_weight_trains_on_the_task() -> None:
    config = experiment(
        opd=opd(opd_adv_weight=0, task_adv_weight=1), task={"group_size": 2, "judge": "m:f"}
    )
    assert config.task_adv_weight == 1.0


@pytest.mark.parametrize("without_opd", [True, False])
def test_a_group_of_one_has_no_task_advantage(without_opd: bool) -> None:
    weighted = None if without_opd else opd(task_adv_weight=0.5)
    with pytest.raises(ValidationError, match=r"needs at least 2 rollouts.*write group_size: 4"):
        experiment(opd=weighted, task={"group_size": 1, "judge": "m:f"})


def test_a_task_weight_needs_a_judge() -> None:
    with pytest.raises(ValidationError, match="every rollout needs a reward: name a judge"):
        experiment(opd=opd(task_adv_weight=0.5), task={"group_size": 4})


def test_pure_opd_needs_no_judge_and_no_group() -> None:
    config = experiment()
    assert (config.task.judged, config.task.group_size, config.task_adv_weight) == (False, 1, 0.0)


def test_two_kinds_of_judges_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"either 'judge' .* or 'batch_judge'"):
        TaskSpecConfig(judge="m:f", batch_judge="m:g")


@pytest.mark.parametrize("path", ["math", "m.f", ":f", "m:", "m:f:g", "m:f\n", "1m:f"])
def test_a_function_is_named_by_module_and_name(path: str) -> None:
    with pytest.raises(ValidationError, match=r"expected 'package\.module:function'"):
        TaskSpecConfig(filter_func=path)


def test_a_step_that_could_never_fill_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"3 groups cannot fill a train step of 4.*raise it"):
        experiment(task={"max_groups_per_step": 3})


def test_a_step_starts_at_most_four_times_its_groups() -> None:
    assert experiment().groups_per_step_limit == 16
    assert experiment(task={"max_groups_per_step": 4}).groups_per_step_limit == 4


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (float("nan"), 0.9)])
def test_betas_outside_the_unit_interval_are_refused(betas: tuple[float, float]) -> None:
    with pytest.raises(ValidationError, match="betas"):
        TrainingConfig(steps=1, prompts_per_step=1, learning_rate=1e-6, betas=betas)


def test_the_optimizers_defaults_are_those_of_the_dapo_recipe() -> None:
    training = TrainingConfig(steps=300, prompts_per_step=16, learning_rate=1e-6)
    assert (training.betas, training.weight_decay) == ((0.9, 0.98), 0.1)
    assert (training.clip_low, training.clip_high, training.dual_clip) == (0.2, 0.28, 10.0)
    assert (training.optimizer_steps_per_batch, training.logprob_chunk_tokens) == (1, 512)
    assert experiment().seed == 1234


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379", "ray://head:10001", "http://"])
def test_a_cluster_is_named_by_its_dashboard(address: str) -> None:
    with pytest.raises(ValidationError, match="Jobs API: expected the dashboard's URL"):
        RayConfig(address=address)


# ------------------------------------------------------------------ devices


def devices_of(student: list[str], *teachers: list[str]) -> ExperimentConfig:
    replicas = [{"launch": {**LAUNCH, "devices": devices}} for devices in teachers]
    return experiment(
        student={"model": "/m", "devices": student},
        opd=opd(teachers=[teacher(endpoint=None, replicas=replicas)]),
    )


@pytest.mark.parametrize(
    ("student", "teachers", "shared"),
    [
        (["0", "1"], [["1", "2"]], "device 1 is given to the student and to teacher 'teacher'"),
        (["GPU-aa"], [["GPU-aa"]], "device GPU-aa"),
        (["cpu:0"], [["cpu:0"]], "device cpu:0"),
        (["0"], [["1"], ["1"]], "to teacher 'teacher' and to teacher 'teacher' replica 1"),
        (["cpu"], [["cpu:1"], ["cpu:1"]], "device cpu:1"),
    ],
)
def test_a_device_is_given_once(student: list[str], teachers: list[list[str]], shared: str) -> None:
    with pytest.raises(ValidationError, match=shared):
        devices_of(student, *teachers)


def test_the_unnamed_cpu_may_be_shared() -> None:
    assert devices_of(["cpu"], ["cpu"], ["cpu"]).student.devices == ("cpu",)
    assert devices_of(["cpu:0"], ["cpu:1"], ["cpu:10"]).student.devices == ("cpu:0",)


@pytest.mark.parametrize("device", ["gpu0", "cuda:0", "-1", "00", "cpu:", "cpu:01", "GPU-", "0\n"])
def test_what_is_no_device_is_refused(device: str) -> None:
    with pytest.raises(ValidationError, match="is not a device: write GPU indices or UUIDs"):
        devices_of([device], ["cpu"])


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (["0", "0"], "named twice"),
        (["cpu", "0"], "either GPUs or CPU slots"),
        ([], "at least 1 item"),
    ],
)
def test_a_list_of_devices_makes_sense(devices: list[str], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ReplicaConfig.model_validate({"launch": {**LAUNCH, "devices": devices}})


# ------------------------------------------------------------------ paths


def test_a_path_that_exists_becomes_absolute_for_processes_that_run_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert LaunchConfig(model="model").model == str(tmp_path / "model")
    assert LaunchConfig(model="Qwen/Qwen3-8B").model == "Qwen/Qwen3-8B"


def test_an_interpreter_is_made_absolute_but_its_link_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "real").touch()
    (tmp_path / "bin" / "python").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    assert LaunchConfig(model="/m", python="bin/python").python == str(tmp_path / "bin/python")
    assert LaunchConfig(model="/m", python="real").python == "real"  # looked up on the PATH
