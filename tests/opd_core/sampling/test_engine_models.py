"""Which models the in-process engine samples, exactly, and which ones it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opd_core.errors import SamplingError
from opd_core.sampling import slots
from opd_core.sampling.slots import SlotModel
from tests.opd_core.sampling.models import PAD, assert_exact, engine_of, model_of, requests_of, run

ALTERNATING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
    "use_sliding_window": True,
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gpt_neox", "gpt2", "olmo2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_any_attention_is_sampled_exactly(family: str, attention: str) -> None:
    assert_exact(model_of(family, attention), requests_of(12), max_rows=5)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": 4}),
        ("qwen2", ALTERNATING),
        ("qwen3", ALTERNATING),
        ("gemma3_text", ALTERNATING | {"head_dim": 16}),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sliding_attention_is_sampled_exactly(
    family: str, changes: dict[str, Any], attention: str
) -> None:
    model = model_of(family, attention, **changes)
    model.config._attn_implementation = attention
    assert_exact(model, requests_of(12), max_rows=5)


def test_a_mixture_of_experts_is_sampled_exactly() -> None:
    model = model_of("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    assert_exact(model, requests_of(12), max_rows=5)


def test_a_short_dtype_samples_with_small_gaps() -> None:
    model = model_of("qwen3").to(torch.bfloat16)
    assert len(run(engine_of(model), requests_of(4))) == 4


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mamba", {"state_size": 4}),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        (
            "qwen3",
            {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 4},
        ),
    ],
)
def test_a_model_that_keeps_more_than_keys_and_values_is_refused(
    family: str, changes: dict[str, Any]
) -> None:
    model = model_of("qwen3") if family == "qwen3" else model_of(family, "eager", **changes)
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(SamplingError, match=f"'{family}' cannot be.*sampling.engine: sglang"):
        engine_of(model)


def test_a_model_whose_decoding_differs_from_its_forward_is_refused() -> None:
    model = model_of("qwen3")
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: (
            args,
            kwargs if kwargs["input_ids"].shape[1] > 1 else kwargs | {"attention_mask": None},
        ),
        with_kwargs=True,
    )
    with pytest.raises(SamplingError, match=r"'qwen3' cannot be.*away from a plain forward's"):
        engine_of(model)


def test_prompts_are_prefilled_together_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "PREFILL_TOKENS", 10)
    model, shapes = model_of("qwen3"), []
    held = SlotModel(model, pad_id=PAD, max_rows=8)
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    follows = held.prefill({0: [3] * 4, 1: [3] * 30, 2: [3] * 5, 3: [3] * 2})
    assert shapes == [(2, 4), (1, 5), (1, 30)]
    assert sorted(follows) == [0, 1, 2, 3]
