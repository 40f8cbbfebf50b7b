"""The whole tree: frozen, written and read again, and the rules that join its parts."""

from __future__ import annotations

import json
import pickle
from itertools import chain
from typing import Any

import pytest
from pydantic import ValidationError

from opd_core.config import (
    ExperimentConfig,
    OPDTeacherConfig,
    SamplingConfig,
    TaskSpecConfig,
    TrainingConfig,
)
from opd_core.errors import ConfigError
from opd_core.recipe import parse_config

LAUNCH = {"model": "/models/teacher"}
TEACHER = {"name": "teacher", "endpoint": "http://127.0.0.1:13141"}
OPD = {"teachers": [TEACHER], "default_teacher": "teacher"}
JUDGED = {"group_size": 2, "judge": "opd_core.agent_loop.judges:math"}


def experiment(**changes: Any) -> ExperimentConfig:
    whole = {
        "name": "test",
        "student": {"model": "/models/student"},
        "data": {"train": "/data/train.jsonl"},
        "sampling": {"max_new_tokens": 16},
        "opd": OPD,
        "training": {"steps": 1, "prompts_per_step": 4, "learning_rate": 1e-6},
    }
    return ExperimentConfig(**{**whole, **changes})


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

    free = {"env", "tags", "data_source_teacher_map"}  # their keys are the user's own
    whole = experiment(
        opd={**OPD, "teachers": [{"name": "teacher", "launch": LAUNCH, "backend": "embedded"}]}
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
        opd={
            **OPD,
            "task_adv_weight": 0.5,
            "kl_clamp": 5.0,
            "teachers": [
                {
                    "name": "teacher",
                    "replicas": [
                        {"launch": {**LAUNCH, "devices": ["7"], "env": {"A": "1"}}},
                        {"endpoint": "http://h:1", "backend": "lmdeploy"},
                    ],
                }
            ],
        },
    )
    written = json.loads(json.dumps(config.resolved()))
    assert parse_config(written, source="config.json") == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_filled_in_endpoints_survive_writing_and_reading() -> None:
    written = OPDTeacherConfig(name="teacher", backend="embedded", launch={**LAUNCH, "port": 7001})
    placed = written.with_endpoints(["http://127.0.0.1:7001"])
    (replica,) = placed.all_replicas
    assert (replica.endpoint, replica.backend) == ("http://127.0.0.1:7001", "embedded")
    config = experiment(opd={**OPD, "teachers": [placed]})
    again = parse_config(config.resolved(), source="config.json")
    assert again == config
    assert again.opd is not None
    assert again.opd.teachers[0].all_replicas == (replica,)
    assert placed.with_endpoints(["http://127.0.0.1:7001"]) == placed


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


def test_without_opd_the_temperature_is_free() -> None:
    sampling = SamplingConfig(max_new_tokens=16, temperature=0.7)
    assert experiment(sampling=sampling, opd=None, task=JUDGED).sampling == sampling


@pytest.mark.parametrize("change", [{"top_p": 0.95}, {"top_k": 50}, {"min_tokens": 1}])
def test_what_the_engine_does_not_offer_is_refused_and_not_ignored(
    change: dict[str, float],
) -> None:
    sampling = SamplingConfig.model_validate({"max_new_tokens": 16, **change})
    with pytest.raises(ValidationError, match="offers the temperature only"):
        experiment(sampling=sampling, opd=None, task=JUDGED)


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
        opd={**OPD, "opd_adv_weight": 0, "task_adv_weight": 1},
        task={"group_size": 2, "judge": "m:f"},
    )
    assert config.task_adv_weight == 1.0


@pytest.mark.parametrize("without_opd", [True, False])
def test_a_group_of_one_has_no_task_advantage(without_opd: bool) -> None:
    weighted = None if without_opd else {**OPD, "task_adv_weight": 0.5}
    with pytest.raises(ValidationError, match=r"needs at least 2 rollouts.*write group_size: 4"):
        experiment(opd=weighted, task={"group_size": 1, "judge": "m:f"})


def test_a_task_weight_needs_a_judge() -> None:
    with pytest.raises(ValidationError, match="every rollout needs a reward: name a judge"):
        experiment(opd={**OPD, "task_adv_weight": 0.5}, task={"group_size": 4})


def test_pure_opd_needs_no_judge_and_no_group() -> None:
    config = experiment()
    assert (config.task.judged, config.task.group_size, config.task_adv_weight) == (False, 1, 0.0)


def test_two_kinds_of_judges_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"either 'judge' .* or 'batch_judge'"):
        TaskSpecConfig(judge="m:f", batch_judge="m:g")


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


# ------------------------------------------------------------------ devices


def devices_of(student: list[str], *teachers: list[str]) -> ExperimentConfig:
    replicas = [{"launch": {**LAUNCH, "devices": devices}} for devices in teachers]
    return experiment(
        student={"model": "/m", "devices": student},
        opd={**OPD, "teachers": [{"name": "teacher", "replicas": replicas}]},
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


def test_on_an_existing_cluster_the_students_devices_are_elsewhere() -> None:
    config = devices_of(["cpu"], ["0"])
    tree = config.resolved() | {"ray": {"address": "http://head:8265"}}
    tree["student"]["devices"] = ["0"]
    assert ExperimentConfig.model_validate(tree).student.devices == ("0",)


def test_a_run_has_every_device_on_the_flows_host_for_itself_but_the_plain_cpu() -> None:
    config = devices_of(["3", "GPU-aa"], ["cpu"], ["10"], ["MIG-b", "2"])
    assert config.leased_devices == ("10", "2", "3", "GPU-aa", "MIG-b")
    assert devices_of(["cpu:1"], ["cpu:0"]).leased_devices == ("cpu:0", "cpu:1")
    assert devices_of(["cpu"], ["cpu"]).leased_devices == ()
    assert experiment(opd=None, task=JUDGED).leased_devices == ()
    assert experiment(student={"model": "/m", "devices": ("0",)}).leased_devices == ("0",)


def test_the_devices_of_servers_that_sample_are_among_the_students() -> None:
    sampling = {
        "max_new_tokens": 16,
        "engine": "sglang",
        "devices": ("1",),
        "server": {"memory_fraction": 0.4},
    }
    config = experiment(student={"model": "/m", "devices": ("0", "1")}, sampling=sampling)
    assert config.leased_devices == ("0", "1")


def test_on_an_existing_cluster_only_the_teachers_devices_are_the_runs() -> None:
    tree = devices_of(["5"], ["0", "1"]).resolved() | {"ray": {"address": "http://head:8265"}}
    assert ExperimentConfig.model_validate(tree).leased_devices == ("0", "1")
