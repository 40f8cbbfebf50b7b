"""What a run needs on each device: numbers by hand, the issue's cases, and what autograd keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from opd_core.planning import Cards, Device, estimate, smallest_card
from opd_core.planning.cards import GB, HOST
from opd_core.planning.items import Item, total
from opd_core.planning.shapes import read_shape
from opd_core.planning.training import training_items
from tests.opd_core.planning.planned_recipes import cards_of, recipe

DAPO = "dapo_math_qwen3_8b"
STUDENT, TEACHER = 8_190_735_360, 32_762_123_264
SERVER_0 = "student server 0"


def device(name: str, devices: tuple[Device, ...]) -> Device:
    return next(found for found in devices if found.name == name)


def line(found: Device | list[Item], what: str) -> Item:
    items = found.items if isinstance(found, Device) else found
    (item,) = (item for item in items if item.what == what)
    return item


def test_the_32b_teacher_at_0_6_of_an_80_gb_card_is_refused_with_the_arithmetic() -> None:
    teacher = device("7", estimate(recipe(DAPO), cards_of(80)))
    (problem,) = teacher.problems
    assert TEACHER * 2 > 0.6 * 80 * GB
    assert "weights 65.5 GB (32.76e9 parameters x 2 bytes / TP 1)" in problem
    assert "KV cache of one rollout 4.8 GB (18,432 tokens x 262,144 bytes / TP 1)" in problem
    assert "need 70.4 GB, more than the 48.0 GB of launch.memory_fraction 0.6 x 80.0 GB" in problem
    assert "launch.tp_size" in problem


@pytest.mark.parametrize(
    ("name", "gb"),
    [
        (DAPO, 141),
        (f"{DAPO}_80gb", 80),
        (f"{DAPO}_lmdeploy", 96),
        (f"{DAPO}_mixed", 141),
        (f"{DAPO}_two_nodes", 96),
    ],
)
def test_each_recipe_fits_the_cards_that_it_is_for_and_no_smaller_ones(name: str, gb: int) -> None:
    assert smallest_card(recipe(name)) == gb
    assert not any(found.problems for found in estimate(recipe(name), cards_of(gb)))


def test_on_80_gb_two_nodes_need_fewer_rows_as_the_recipe_says() -> None:
    fewer = recipe(f"{DAPO}_two_nodes", "sampling.max_rows=6")
    assert smallest_card(fewer) == 80


def test_adam_takes_sixteen_bytes_a_parameter_divided_by_the_ranks() -> None:
    one = device("0", estimate(recipe(DAPO), cards_of(141)))
    assert line(one, "fp32 weights and Adam's moments").bytes == STUDENT * 12 // 4
    assert line(one, "gradients").bytes == STUDENT * 4 // 4
    copies = recipe(DAPO, "training.shard_ranks=2")
    one = device("0", estimate(copies, cards_of(141)))
    assert line(one, "fp32 weights and Adam's moments").bytes == STUDENT * 12 // 2
    assert line(one, "gradients").bytes == STUDENT * 4 // 2


def test_adapters_have_an_optimizer_and_the_weights_have_none() -> None:
    config = recipe(DAPO, "student.lora={rank: 16}")
    items = device("0", estimate(config, cards_of(141))).items
    shape = read_shape(config.student.model)
    assert shape is not None
    adapters = shape.adapter_parameters(16)
    held = line(list(items), "fp32 weights and Adam's moments")
    assert held.bytes == (4 * STUDENT + 8 * adapters) // 4
    assert not any(item.what == "the head's gradient in fp32" for item in items)


def test_the_loss_holds_the_logits_of_one_chunk() -> None:
    for chunk in (512, 1024):
        config = recipe(DAPO, f"training.logprob_chunk_tokens={chunk}")
        one = device("0", estimate(config, cards_of(141)))
        assert line(one, "logits of a chunk").bytes == chunk * 151_936 * 6


def test_without_checkpointing_the_activations_of_every_layer_are_too_much() -> None:
    plain = recipe(DAPO, "training.gradient_checkpointing=false")
    kept, less = (device("0", estimate(c, cards_of(141))) for c in (plain, recipe(DAPO)))
    one_layer = line(less, "activations of one layer").bytes
    assert line(kept, "activations").bytes == 36 * one_layer
    assert kept.fullest == "training"
    assert "training.gradient_checkpointing: true" in kept.problems[0]


def test_servers_that_share_give_their_memory_away_while_the_student_trains() -> None:
    one = device("0", estimate(recipe(DAPO), cards_of(141)))
    pool = line(one, "weights and KV cache")
    assert pool.bytes == pytest.approx(0.6 * 141 * GB)
    assert pool in one.at("sampling")
    assert pool not in one.at("training")
    assert one.needed == total(one.at("sampling"))
    assert not any(item.what == "gradients" for item in one.at("sampling"))


def test_servers_on_devices_of_their_own_are_not_beside_training() -> None:
    apart = recipe(DAPO, "sampling.devices=['2','3']", "sampling.actors=2", "training.actors=2")
    found = estimate(apart, cards_of(141))
    assert "training actor" not in device("2", found).users
    assert not any(user.startswith("student server") for user in device("0", found).users)


def test_sampling_actors_share_a_gpu_only_where_there_are_too_few() -> None:
    plain = ["sampling.engine=transformers", "sampling.server=null", "ray.num_cpus=null"]
    shared = recipe(DAPO, *plain)
    assert device("0", estimate(shared, cards_of(141))).users == (
        "training actor",
        "sampling actor",
    )
    apart = recipe(DAPO, *plain, "training.actors=2", "sampling.actors=2")
    found = estimate(apart, cards_of(141))
    assert [device(name, found).users for name in "0123"] == [
        ("training actor",),
        ("training actor",),
        ("sampling actor",),
        ("sampling actor",),
    ]


def test_tensor_parallelism_divides_weights_and_cache() -> None:
    found = estimate(recipe(f"{DAPO}_80gb"), cards_of(80))
    for name in ("6", "7"):
        (bound,) = device(name, found).bounds
        weights, cache = bound.needs
        assert weights.bytes == TEACHER * 2 // 2
        assert cache.bytes == 18_432 * 262_144 // 2
        assert bound.limit == pytest.approx(0.85 * 80 * GB)
        assert dict(device(name, found).rollouts)["teacher 'teacher'"] == pytest.approx(
            (bound.limit - weights.bytes) / cache.bytes
        )


def test_lmdeploys_share_is_of_what_its_weights_and_its_reserve_leave() -> None:
    teacher = device("7", estimate(recipe(f"{DAPO}_lmdeploy"), cards_of(141)))
    reserve = (4096 + 2 * 1024) * 151_936 * 2
    free = 141 * GB - TEACHER * 2 - reserve
    assert line(teacher, "KV cache").bytes == pytest.approx(0.6 * free)
    small = device("7", estimate(recipe(f"{DAPO}_lmdeploy"), cards_of(65)))
    assert "needs 4.8 GB, more than the 0.0 MB" in small.problems[0]


def test_a_server_without_a_fraction_is_judged_by_what_it_cannot_do_without() -> None:
    config = recipe(DAPO, "opd.teachers.0.launch.memory_fraction=null")
    assert not device("7", estimate(config, cards_of(80))).bounds
    assert device("7", estimate(config, cards_of(80))).problems
    assert not device("7", estimate(config, cards_of(96))).problems


def test_the_clusters_gpus_are_not_judged_by_those_of_this_host() -> None:
    config = recipe(f"{DAPO}_two_nodes")
    here = Cards({str(number): 24 * GB for number in range(8)})
    found = estimate(config, here)
    assert {one.name for one in found if one.here} == {"0", "1", "2", "3"}
    assert all(one.problems for one in found if one.here)
    elsewhere = [one for one in found if not one.here]
    assert len(elsewhere) == 8
    assert all(one.card is None and not one.problems for one in elsewhere)


def test_all_cpu_slots_are_one_host() -> None:
    (host,) = estimate(recipe("tiny", "student.devices=['cpu:0']"), Cards())
    assert host.name == HOST
    assert host.users == ("training actor", "sampling actor", "teacher 'teacher'")
    assert not host.problems


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        (["sampling.actors=2"], {SERVER_0: 128, "student server 1": 128}),
        (
            ["opd.teachers.0.backend=lmdeploy", "opd.teachers.0.launch.dtype=bfloat16"],
            {SERVER_0: 128, "teacher 'teacher'": 8},
        ),
    ],
)
def test_two_lmdeploy_servers_without_a_gpu_need_their_rows_and_no_share_of_the_host(
    changes: list[str], rows: dict[str, int]
) -> None:
    plain = ["sampling.engine=lmdeploy", "student.dtype=bfloat16"]
    (host,) = estimate(recipe("tiny", *plain, *changes), Cards())
    caches = {item.who: item.bytes for item in host.items if item.what == "KV cache"}
    token = 2 * 6 * 16 * 2 * 2  # layers, heads, their size, key and value, bytes
    assert caches == {who: number * 80 * token for who, number in rows.items()}
    assert not host.rollouts
    assert host.needed < 1 * GB


def test_only_on_gpus_the_update_holds_one_more_set_of_the_parameters() -> None:
    one = device("0", estimate(recipe(DAPO), cards_of(141)))
    assert line(one, "temporaries of the update").bytes == STUDENT * 4 // 4
    (host,) = estimate(recipe("tiny"), Cards())
    assert "temporaries of the update" not in {item.what for item in host.items}


def test_a_model_of_unknown_size_is_named_and_not_counted() -> None:
    config = recipe(DAPO, "student.model=/nowhere/strange")
    one = device("0", estimate(config, cards_of(141)))
    assert one.unknown == ("training actor", SERVER_0)
    assert not one.items


SHAPES = [
    {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 16},
    {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "head_dim": 16},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_activations_are_what_autograd_keeps_in_bf16(shape: dict[str, int], tmp_path: Path) -> None:
    common = {"vocab_size": 64, "num_key_value_heads": 2, "num_hidden_layers": 3}
    config = Qwen3Config(**common, **shape)
    config.save_pretrained(tmp_path)
    found = read_shape(str(tmp_path))
    assert found is not None
    tokens = 64
    experiment = recipe(
        DAPO,
        "data.max_prompt_tokens=32",
        "sampling.max_new_tokens=32",
        f"training.micro_batch_tokens={tokens}",
        "training.gradient_checkpointing=false",
    )
    estimated = line(training_items(experiment, found, gpu=True), "activations").bytes
    config.num_hidden_layers = 1
    with_one = kept_by_autograd(config, tokens)
    config.num_hidden_layers = 3
    measured = (kept_by_autograd(config, tokens) - with_one) * 3 / 2
    assert 0.97 < estimated / measured < 1.1


def kept_by_autograd(config: Any, tokens: int) -> int:
    """Bytes of all storages but the weights that a forward leaves for its backward pass."""
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return sum(size for size, _ in kept.values())
