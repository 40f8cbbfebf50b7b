"""Packed sequences give the numbers that each gives alone, and know nothing of each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from opd_core.errors import TrainingError
from opd_core.objective import token_logprobs
from opd_core.training.attention import (
    NAME,
    PACKABLE_MODELS,
    _by_kernel,
    _by_runs,
    boundaries_of,
    packed_attention,
    use_packed_attention,
    why_not_packed,
)
from opd_core.training.batch import TrainSample
from opd_core.training.packing import MicroBatch, collate

CPU = torch.device("cpu")
LENGTHS = (12, 12, 9, 4, 4, 2)
WINDOW = 5
MIXED: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 20,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3_text": MIXED | {"head_dim": 8},
    "granite": {},
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW, "num_local_experts": 4},
    "olmo2": {},
    "olmo3": MIXED,
    "phi3": {"sliding_window": WINDOW},
    "qwen2": MIXED | {"use_sliding_window": True},
    "qwen3": MIXED | {"use_sliding_window": True, "head_dim": 8},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    },
    "smollm3": MIXED | {"use_sliding_window": True, "no_rope_layers": [1, 0]},
    "starcoder2": {
        "sliding_window": WINDOW,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "attention_dropout": 0.0,
    },
}


def student(model_type: str, packed: bool = False, **changes: Any) -> Any:
    config = AutoConfig.for_model(model_type, **(BASE | CONFIGS[model_type] | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            parameter.add_(0.1 * torch.randn_like(parameter))
    if packed:
        use_packed_attention(model)
    return model


def samples() -> list[TrainSample]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for length in LENGTHS:
        ids = torch.randint(2, 20, (length,), generator=generator).tolist()
        made.append(TrainSample(tuple(ids), 1, (-1.0,) * (length - 1), (), 0.0, 0))
    return made


def logprobs(model: Any, batch: MicroBatch, **inputs: Any) -> Tensor:
    """[B, T]; ``inputs`` replace the batch's own."""
    given = {"input_ids": batch.token_ids} | batch.model_inputs | inputs
    body = model.base_model(position_ids=batch.position_ids, use_cache=False, **given)
    head = model.get_output_embeddings()
    return token_logprobs(body.last_hidden_state, head.weight, batch.token_ids, head_bias=head.bias)


def trained(model: Any, batches: list[MicroBatch]) -> tuple[Tensor, dict[str, Tensor]]:
    """The logprobs of the responses, sample after sample, and the gradient of a weighted sum."""
    told = torch.cat([logprobs(model, b).flatten().index_select(0, b.flat) for b in batches])
    weights = torch.linspace(-1, 1, len(told))
    (told * weights).sum().backward()
    return told.detach(), {n: p.grad for n, p in model.named_parameters()}


def batched(packed: bool, given: list[TrainSample] | None = None) -> MicroBatch:
    return collate(samples() if given is None else given, packed=packed, pad_id=0, device=CPU)


def test_every_packable_model_type_is_compared_below() -> None:
    assert set(CONFIGS) == PACKABLE_MODELS


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_packed_padded_and_alone_give_the_same_logprobs_and_gradients(
    model_type: str, checkpointed: bool
) -> None:
    plain, packed = student(model_type), student(model_type, packed=True)
    if checkpointed:
        packed.gradient_checkpointing_enable()
    alone, gradient = trained(plain, [batched(False, [s]) for s in samples()])
    plain.zero_grad()
    padded, padded_gradient = trained(plain, [batched(False)])
    found, found_gradient = trained(packed, [batched(True)])
    assert alone.std() > 0.1
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(found, padded, atol=1e-5, rtol=0)
    largest = max(float(g.abs().max()) for g in gradient.values())
    for name, expected in gradient.items():
        for got in (found_gradient[name], padded_gradient[name]):
            torch.testing.assert_close(got, expected, atol=1e-5 * max(largest, 1), rtol=0)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3"])
def test_mixed_precision_gives_the_same_logprobs_as_padding(model_type: str) -> None:
    told = []
    for packed in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            told.append(trained(student(model_type, packed), [batched(packed)])[0])
    torch.testing.assert_close(told[1], told[0], atol=0.1, rtol=0)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3"])
def test_a_sequence_changes_no_bit_of_the_others(model_type: str) -> None:
    model, batch = student(model_type, packed=True), batched(True)
    before = logprobs(model, batch)
    changed = (batch.rollout_index == 1) & (batch.position_ids == 0)
    batch.token_ids[changed] = (batch.token_ids[changed] + 7) % 20
    after = logprobs(model, batch)
    others = (batch.rollout_index != 1) & batch.response_mask
    own = (batch.rollout_index == 1) & batch.response_mask
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[own], after[own])


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3"])
def test_no_gradient_crosses_into_another_sequence(model_type: str) -> None:
    model, batch = student(model_type, packed=True), batched(True)
    embedded = model.get_input_embeddings()(batch.token_ids).detach().requires_grad_()
    told = logprobs(model, batch, input_ids=None, inputs_embeds=embedded)
    own = batch.rollout_index == 2
    told[own & batch.response_mask].sum().backward()
    assert embedded.grad is not None
    assert torch.count_nonzero(embedded.grad[~own]) == 0
    assert torch.count_nonzero(embedded.grad[own]) > 0


@pytest.mark.parametrize("packed", [True, False])
def test_an_empty_micro_batch_gives_every_weight_a_gradient_of_zero(packed: bool) -> None:
    model = student("qwen3", packed=packed)
    batch = batched(packed, [])
    torch.where(batch.response_mask, logprobs(model, batch), 0.0).sum().backward()
    assert all(torch.count_nonzero(p.grad) == 0 for p in model.parameters())


def test_a_padded_micro_batch_needs_no_mask() -> None:
    masks = []

    def look(_: nn.Module, __: Any, inputs: dict[str, Any]) -> None:
        masks.append(inputs["attention_mask"])

    model = student("llama")
    model.model.layers[0].self_attn.register_forward_pre_hook(look, with_kwargs=True)
    logprobs(model, batched(packed=False))
    assert masks == [None]


def test_a_saved_model_says_nothing_of_packing(tmp_path: Path) -> None:
    student("llama", packed=True).save_pretrained(tmp_path)
    assert NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


def test_a_model_that_is_not_tested_is_padded() -> None:
    config = AutoConfig.for_model("mamba")
    assert "model type 'mamba'" in (why_not_packed(config) or "")
    assert why_not_packed(student("llama").config) is None


def test_layers_that_are_no_attention_are_padded() -> None:
    config = student("qwen3").config
    config.layer_types = ["linear_attention", "full_attention"]
    assert "layers of type linear_attention" in (why_not_packed(config) or "")
    model = student("qwen3")
    model.config.layer_types = config.layer_types
    with pytest.raises(TrainingError, match=r"set training\.packing: false"):
        use_packed_attention(model)


def heads(rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, 4, 5, 8), (rows, 2, 5, 8), (rows, 2, 5, 8))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"boundaries": None}, "without boundaries"),
        ({"boundaries": boundaries_of([3, 3], CPU)}, "expected one row of 6 tokens"),
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, "attention mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "both directions"),
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"output_attentions": True}, "output_attentions"),
    ],
)
def test_what_cannot_be_honoured_is_refused(asked: dict[str, Any], named: str) -> None:
    given = {"boundaries": boundaries_of([3, 2], CPU), "attention_mask": None} | asked
    with pytest.raises(TrainingError, match=f"{named}.*set training.packing: false"):
        packed_attention(nn.Identity(), *heads(), **given)


def test_rows_side_by_side_are_refused() -> None:
    with pytest.raises(TrainingError, match="one row"):
        packed_attention(nn.Identity(), *heads(rows=2), None, boundaries=boundaries_of([5], CPU))


def test_what_is_switched_off_is_not_refused() -> None:
    packed_attention(
        nn.Identity(),
        *heads(),
        None,
        boundaries=boundaries_of([5], CPU),
        softcap=None,
        output_attentions=False,
        position_ids=torch.arange(5)[None],
    )


def test_a_window_and_a_scale_by_hand() -> None:
    """Against softmax written out for each token of sequences of 3 and 2, window 2."""
    q, k, v = heads()
    found, _ = packed_attention(
        nn.Identity(),
        q,
        k,
        v,
        None,
        boundaries=boundaries_of([3, 2], CPU),
        scaling=0.7,
        sliding_window=2,
    )
    seen = {0: [0], 1: [0, 1], 2: [1, 2], 3: [3], 4: [3, 4]}
    for token, others in seen.items():
        for head in range(4):
            scores = 0.7 * k[0, head // 2, others] @ q[0, head, token]
            expected = scores.softmax(0) @ v[0, head // 2, others]
            torch.testing.assert_close(found[0, token, head], expected)


@pytest.mark.parametrize("window", [None, 2])
def test_the_gpu_kernel_is_called_as_its_signature_says(window: int | None) -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((1, 4, 5, 8),) * 3)
        out = _by_kernel(q, k[:, :2], v[:, :2], boundaries_of([3, 2], CPU), 0.7, window)
        assert out.shape == (1, 5, 4, 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel runs on GPUs only")
@pytest.mark.parametrize("window", [None, 2])
def test_the_gpu_kernel_agrees_with_runs(window: int | None) -> None:
    q, k, v = (x.to("cuda", torch.bfloat16).requires_grad_() for x in heads())
    boundaries = boundaries_of([3, 2], q.device)
    gradients = []
    for attend in (_by_kernel, _by_runs):
        attend(q, k, v, boundaries, 0.7, window).float().square().sum().backward()
        gradients.append([x.grad.clone() for x in (q, k, v) if x.grad is not None])
        for x in (q, k, v):
            x.grad = None
    torch.testing.assert_close(gradients[0], gradients[1], atol=3e-2, rtol=3e-2)
