"""Adapters that train alone, merge exactly, are saved as peft's, and can be switched off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3ForCausalLM

from opd_core.config import LoRAConfig
from opd_core.errors import ConfigError
from opd_core.training.lora import (
    adapter_state,
    add_lora,
    merged,
    plain_weights,
    save_adapter,
    without_lora,
)
from tests.opd_core.training.engine import tiny_config

LORA = LoRAConfig(rank=4, alpha=12.0)
SCALING = 3.0
TOKENS = torch.tensor([[2, 5, 7, 11, 3, 9]])


def plain(*, tied: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    """A random Qwen3 of 2 layers with biases in its attention, the same at every call."""
    torch.manual_seed(1)
    config = tiny_config(attention_bias=True, tie_word_embeddings=tied)
    return Qwen3ForCausalLM(config).to(dtype)


def adapted(config: LoRAConfig = LORA, seed: int = 3, **settings: Any) -> Any:
    model = plain(**settings)
    add_lora(model, config, seed)
    return model


def trained(**settings: Any) -> Any:
    """An adapted model whose adapters do something: B is no longer 0."""
    model = adapted(**settings)
    draw = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=draw) * 0.1
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=TOKENS).logits


def adapters_of(model: Any) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def adapted_layers(model: Any) -> set[str]:
    return {name.partition(".lora_")[0] for name in adapters_of(model)}


# ------------------------------------------------------------------ adding


def test_the_policy_is_unchanged_until_something_is_learned() -> None:
    model = adapted()
    assert type(model) is Qwen3ForCausalLM
    assert torch.equal(logits(model), logits(plain()))


def test_only_the_adapters_train() -> None:
    model = adapted()
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable == set(adapters_of(model)) != set()
    model(input_ids=TOKENS).logits.sum().backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == trainable


def test_adapters_are_in_full_precision_whatever_the_model_is() -> None:
    model = adapted(dtype=torch.bfloat16)
    assert {p.dtype for p in adapters_of(model).values()} == {torch.float32}
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16


def test_training_has_no_dropout() -> None:
    model = trained().train()
    assert torch.equal(logits(model), logits(model.eval()))


def test_the_same_seed_gives_the_same_adapters_whatever_was_drawn_before() -> None:
    first = adapters_of(adapted(seed=3))
    model = plain()
    torch.rand(5)
    add_lora(model, LORA, seed=3)
    second, other = adapters_of(model), adapters_of(adapted(seed=4))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "lora_A" in name)


def test_no_two_layers_begin_with_the_same_adapter() -> None:
    state = adapters_of(adapted())
    layers = [state[f"model.layers.{i}.self_attn.q_proj.lora_A.default.weight"] for i in (0, 1)]
    assert not torch.equal(*layers)


def test_the_global_generator_does_not_notice() -> None:
    model = plain()
    torch.manual_seed(9)
    before = torch.get_rng_state()
    add_lora(model, LORA, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------ which layers


@pytest.mark.parametrize("tied", [True, False])
def test_all_linear_is_every_layer_but_the_head(tied: bool) -> None:
    names = {layer.rpartition(".")[2] for layer in adapted_layers(adapted(tied=tied))}
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert names == attention | {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("named", ["q_proj", ("q_proj",), ("self_attn.q_proj", "q_proj")])
def test_a_name_stands_for_all_layers_that_end_with_it(named: Any) -> None:
    config = LoRAConfig(target_modules=named)
    expected = {f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)}
    assert adapted_layers(adapted(config)) == expected


def test_one_single_layer_can_be_named() -> None:
    config = LoRAConfig(target_modules=("layers.1.mlp.up_proj",))
    assert adapted_layers(adapted(config)) == {"model.layers.1.mlp.up_proj"}


@pytest.mark.parametrize(
    ("named", "told"),
    [
        (("q_proj", "query"), "got query: name some of down_proj, gate_proj, k_proj"),
        (("proj",), "got proj"),  # a part of a name is no name
        (("lm_head",), "other than its output head, got lm_head"),
        (("embed_tokens",), "got embed_tokens"),
        ((), "got none"),
    ],
)
def test_what_is_no_linear_layer_is_refused_with_those_that_are(named: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        adapted(LoRAConfig(target_modules=named), tied=False)


def test_a_model_without_linear_layers_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=20))
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel has no torch\.nn\.Linear"):
        add_lora(model, LORA, seed=3)


# ------------------------------------------------------------------ merging


@pytest.mark.parametrize("tied", [True, False])
def test_merged_weights_make_the_plain_model_the_same_policy(tied: bool) -> None:
    model, target = trained(tied=tied), plain(tied=tied)
    assert not torch.allclose(logits(model), logits(target), atol=0.1)
    target.load_state_dict(merged(model.state_dict(), SCALING))  # strict: the names are its own
    assert torch.allclose(logits(model), logits(target), atol=1e-5)


def test_merging_is_w_plus_scaling_times_b_a() -> None:
    state = {
        "x.base_layer.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        "x.base_layer.bias": torch.tensor([7.0, 8.0, 9.0]),
        "x.lora_A.default.weight": torch.tensor([[1.0, 10.0]]),
        "x.lora_B.default.weight": torch.tensor([[1.0], [2.0], [3.0]]),
        "y.weight": torch.tensor([0.5]),
    }
    plain = merged(state, scaling=0.5)
    assert list(plain) == ["x.bias", "x.weight", "y.weight"]
    assert plain["x.weight"].tolist() == [[1.5, 7.0], [4.0, 14.0], [6.5, 21.0]]
    assert plain["x.bias"].tolist() == [7.0, 8.0, 9.0]
    assert state["x.base_layer.weight"][0].tolist() == [1.0, 2.0]  # the input is as it was


def test_merging_keeps_the_weights_dtype_and_sums_in_full_precision() -> None:
    state = {
        "x.base_layer.weight": torch.tensor([[256.0]], dtype=torch.bfloat16),
        "x.lora_A.default.weight": torch.tensor([[1.002]]),
        "x.lora_B.default.weight": torch.tensor([[1.0]]),
    }
    # 257.002 lies nearer to 258 than to 256; an increment rounded first would be 1 and end at 256.
    assert merged(state, 1.0)["x.weight"].dtype == torch.bfloat16
    assert merged(state, 1.0)["x.weight"].item() == 258.0


def test_a_weight_is_given_as_soon_as_its_own_matrices_are_there() -> None:
    model, taken = trained(), []

    def named() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in model.state_dict().items():
            taken.append(name)
            yield name, tensor

    layers, given = adapted_layers(model), []
    for name, _ in plain_weights(named(), SCALING):
        layer, _, kind = name.rpartition(".")
        last = f"{layer}.lora_B.default.weight" if kind == "weight" and layer in layers else name
        assert taken[-1].replace(".base_layer.", ".") == last
        given.append(name)
    assert sorted(given) == sorted(plain().state_dict())


def test_a_layer_of_which_a_matrix_is_missing_is_an_error() -> None:
    state = trained().state_dict()
    del state["model.layers.1.mlp.up_proj.lora_B.default.weight"]
    with pytest.raises(ValueError, match=r"layer model\.layers\.1\.mlp\.up_proj: expected"):
        merged(state, SCALING)


# ------------------------------------------------------------------ saving


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "layers.1.mlp.up_proj")])
def test_peft_loads_the_saved_adapters_as_the_same_policy(targets: Any, tmp_path: Path) -> None:
    config = LoRAConfig(rank=4, alpha=12.0, target_modules=targets)
    model = trained(config=config)
    save_adapter(model.state_dict(), config, "/models/base", tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(plain(), str(tmp_path / "adapter"))
    assert torch.allclose(logits(loaded), logits(model), atol=1e-5)
    merged_model = plain()
    merged_model.load_state_dict(merged(model.state_dict(), SCALING))
    assert torch.allclose(logits(loaded), logits(merged_model), atol=1e-5)
    written = peft.PeftConfig.from_pretrained(str(tmp_path / "adapter"))
    assert written.base_model_name_or_path == "/models/base"


def test_an_adapter_file_holds_nothing_but_adapters() -> None:
    saved = adapter_state(adapted(LoRAConfig(target_modules="o_proj")).state_dict())
    assert set(saved) == {
        f"base_model.model.model.layers.{i}.self_attn.o_proj.lora_{side}.weight"
        for i in (0, 1)
        for side in "AB"
    }


# ------------------------------------------------------------------ the reference policy


def test_without_its_adapters_the_student_is_the_reference_policy() -> None:
    model = trained()
    learned = logits(model)
    with without_lora(model):
        assert torch.equal(logits(model), logits(plain()))
    assert torch.equal(logits(model), learned)


def test_adapters_are_back_after_an_error_and_still_train() -> None:
    model = trained()
    learned = logits(model)
    before = {name for name, p in model.named_parameters() if p.requires_grad}
    with pytest.raises(RuntimeError, match="forward"), without_lora(model):
        raise RuntimeError("forward")
    assert torch.equal(logits(model), learned)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == before


def test_a_gradient_that_is_under_way_does_not_notice_the_reference_forward() -> None:
    alone, mixed = trained(), trained()
    alone(input_ids=TOKENS).logits.sum().backward()
    loss = mixed(input_ids=TOKENS).logits.sum()
    with without_lora(mixed):
        logits(mixed)
    loss.backward()
    expected, found = adapters_of(alone), adapters_of(mixed)
    assert all(torch.equal(expected[name].grad, found[name].grad) for name in expected)
