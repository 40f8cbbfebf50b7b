"""Sizes of models, held against the models themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from opd_core.config import LoRAConfig
from opd_core.planning.shapes import KNOWN, read_shape
from opd_core.training.lora import add_lora

TINY = Path(__file__).parents[3] / "deployments/recipes/assets/tiny/student"
SMALL = {
    "vocab_size": 50,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def config_of(kind: str, **settings: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **settings)


def parameters_of(config: PreTrainedConfig) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_models_size_is_that_of_its_architecture(name: str) -> None:
    shape = read_shape(f"/nowhere/models/{name}")
    assert shape is not None
    assert "not here" in shape.source
    wanted = {"Qwen3-8B": 8_190_735_360, "Qwen3-32B": 32_762_123_264}[name]
    settings = {k: v for k, v in KNOWN[name].items() if k not in ("model_type", "dtype")}
    assert shape.parameters == parameters_of(config_of("qwen3", **settings)) == wanted


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("llama", {"attention_bias": False}),
        ("qwen3_moe", EXPERTS),
    ],
)
def test_a_config_gives_the_number_of_parameters_that_the_model_has(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    config = config_of(kind, **SMALL | more)
    if kind == "qwen2":
        config.head_dim = 6  # else transformers divides the hidden size
    config.save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path))
    assert shape is not None
    assert shape.parameters == parameters_of(config)


def test_the_tiny_student_is_counted_as_its_file_has_it() -> None:
    with safe_open(TINY / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    shape = read_shape(str(TINY))
    assert shape is not None
    assert shape.parameters == stored


def test_a_token_in_the_cache_is_a_key_and_a_value_in_every_layer() -> None:
    student, teacher = read_shape("Qwen3-8B"), read_shape("Qwen3-32B")
    assert student is not None
    assert teacher is not None
    assert student.kv_bytes("bfloat16") == 36 * 8 * 128 * 2 * 2 == 147_456
    assert teacher.kv_bytes("bfloat16") == 64 * 8 * 128 * 2 * 2 == 262_144


def test_adapters_are_counted_as_peft_makes_them(tmp_path: Path) -> None:
    config = config_of("qwen3", **SMALL)
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config)
    add_lora(model, LoRAConfig(rank=3), seed=0)
    shape = read_shape(str(tmp_path))
    assert shape is not None
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert shape.adapter_parameters(3) == trained


def test_of_a_quantised_model_the_files_tell_the_size(tmp_path: Path) -> None:
    config = config_of("qwen3", **SMALL).to_dict() | {"quantization_config": {"bits": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(str(tmp_path)) is None
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1234)
    shape = read_shape(str(tmp_path))
    assert shape is not None
    assert shape.weights_bytes == 1234


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"hidden_size": "wide"}'])
def test_a_config_that_is_none_has_no_size(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert read_shape(str(tmp_path)) is None
    assert read_shape(str(tmp_path / "nothing")) is None
