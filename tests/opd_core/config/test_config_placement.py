"""Actors that could never be placed are refused; ranks never share a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from opd_core.config import ExperimentConfig
from opd_core.config.student import StudentConfig, gpu_shares


def experiment(training: int, sampling: int, **changes: Any) -> ExperimentConfig:
    whole = {
        "name": "test",
        "student": {"model": "/m"},
        "data": {"train": "/data/train.jsonl"},
        "sampling": {"max_new_tokens": 16, "actors": sampling},
        "opd": None,
        "task": {"group_size": 2, "judge": "m:f"},
        "training": {
            "steps": 1,
            "prompts_per_step": 4,
            "learning_rate": 1e-6,
            "actors": training,
        },
    }
    return ExperimentConfig(**{**whole, **changes})


@pytest.mark.parametrize(
    ("gpus", "training", "sampling", "shares"),
    [
        (0, 3, 5, (0.0, 0.0)),
        (2, 1, 1, (1.0, 1.0)),
        (9, 4, 4, (1.0, 1.0)),
        (1, 1, 1, (0.6, 0.4)),
        (4, 4, 2, (0.6, 0.4)),
        (4, 1, 4, (0.6, 0.4)),
    ],
)
def test_shares_follow_from_the_counts(
    gpus: int, training: int, sampling: int, shares: tuple[float, float]
) -> None:
    assert gpu_shares(gpus, training, sampling) == shares


def test_no_two_ranks_fit_on_a_gpu_and_all_samplers_find_room_beside_them() -> None:
    for training in range(1, 9):
        for sampling in range(1, 9):
            for gpus in range(max(training, sampling), 17):
                rank, sampler = gpu_shares(gpus, training, sampling)
                assert 2 * rank > 1
                left = [1 - rank] * training + [1.0] * (gpus - training)
                assert sum(int(room / sampler + 1e-9) for room in left) >= sampling


@pytest.mark.parametrize(("training", "sampling"), [(3, 1), (1, 3), (3, 3)])
def test_too_few_gpus_are_refused_with_both_counts(training: int, sampling: int) -> None:
    said = (
        f"student.devices: 2 GPUs are too few for {training} training actors and {sampling} "
        "sampling actors.*name 3 or more"
    )
    with pytest.raises(ValidationError, match=said):
        experiment(training, sampling, student={"model": "/m", "devices": ("0", "GPU-ab")})


def servers(training: int, gpus: str, /, **sampling: Any) -> ExperimentConfig:
    """Servers sample; ``gpus`` are the student's devices, one a letter."""
    tree = experiment(training, 1, student={"model": "/m", "devices": tuple(gpus)}).resolved()
    tree["sampling"] = {"max_new_tokens": 16, "engine": "sglang", **sampling}
    return ExperimentConfig.model_validate(tree)


SHARED = {"server": {"memory_fraction": 0.4}}


def test_gpus_that_servers_leave_too_few_of_are_told_as_such() -> None:
    said = "student.devices: 1 GPUs beside sampling.devices are too few for 2 training actors, .*"
    with pytest.raises(ValidationError, match=said + "name 2 or more besides those"):
        servers(2, "01", devices=("1",))


@pytest.mark.parametrize(("devices", "actors"), [("23", 1), ("2", 2)])
def test_servers_get_as_many_devices_as_they_use(devices: str, actors: int) -> None:
    said = f"{len(devices)} for {actors} servers .* of 1 .* each: name {actors}, or change"
    with pytest.raises(ValidationError, match=said):
        servers(1, "0123", actors=actors, devices=tuple(devices))
    assert servers(1, "0123", actors=2, devices=("2", "3")).training_devices == ("0", "1")


@pytest.mark.parametrize("server", [None, {"dtype": "bfloat16"}])
def test_servers_beside_training_are_told_how_much_memory_is_theirs(server: Any) -> None:
    with pytest.raises(ValidationError, match=r"server\.memory_fraction: name one.* 16 bytes a"):
        servers(1, "0", server=server)
    assert servers(1, "0", **SHARED).shares_gpus
    assert not servers(1, "01", devices=("1",), server=server).shares_gpus


@pytest.mark.parametrize(
    ("engine", "sync", "apart", "shared"),
    [
        ("sglang", "disk", True, True),
        ("sglang", "tensor", True, True),  # over memory of the host
        ("sglang", "distributed", True, False),
        ("lmdeploy", "tensor", False, True),
        ("lmdeploy", "distributed", True, False),
        ("lmdeploy", "auto", True, True),
    ],
)
def test_weights_go_where_their_way_leads(
    engine: str, sync: str, apart: bool, shared: bool
) -> None:
    way = {"engine": engine, "weight_sync": sync, **SHARED}
    for fits, devices in ((apart, ("1",)), (shared, None)):
        if fits:
            servers(1, "01", devices=devices, **way)
        else:
            with pytest.raises(ValidationError, match=r"sampling\.weight_sync: .*write "):
                servers(1, "01", devices=devices, **way)


def test_lmdeploys_handles_need_a_rank_on_each_of_its_devices() -> None:
    two = {"engine": "lmdeploy", "actors": 2, **SHARED}
    assert servers(2, "01", **two).sampling.sync_by == "tensor"
    said = "2 devices .* training.actors: 1 train: write training.actors: 2"
    with pytest.raises(ValidationError, match=said):
        servers(1, "01", **two)
    of_two = {"server": {"memory_fraction": 0.4, "tp_size": 2}}
    with pytest.raises(ValidationError, match=said):
        servers(1, "01", engine="lmdeploy", **of_two)
    assert servers(1, "01", actors=2, **SHARED).sampling.engine == "sglang"


def test_cpu_slots_are_no_gpus() -> None:
    assert StudentConfig(model="/m", devices=("cpu:0", "cpu:1")).gpus == 0
    assert StudentConfig(model="/m", devices=("0", "MIG-ab")).gpus == 2


def test_too_few_cpus_are_refused_where_the_run_starts_the_cluster() -> None:
    with pytest.raises(ValidationError, match=r"ray.num_cpus: 2 is too few for 2 .* write 3 or"):
        experiment(2, 1, ray={"num_cpus": 2})
    assert experiment(2, 1, ray={"num_cpus": 3}).ray.num_cpus == 3
    elsewhere = {"num_cpus": 2, "address": "http://head:8265"}
    assert experiment(2, 1, ray=elsewhere).ray.num_cpus == 2


def test_a_student_in_float16_is_refused() -> None:
    with pytest.raises(ValidationError, match="loss scaler: write bfloat16"):
        StudentConfig(model="/m", dtype="float16")  # type: ignore[arg-type]
