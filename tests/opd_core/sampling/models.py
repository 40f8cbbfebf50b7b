"""Tiny models, requests and the exact answer, for the tests of the in-process engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from opd_core.sampling.protocol import Completion, SampleRequest, rollout_seed
from opd_core.sampling.transformers_engine import TransformersEngine

END, PAD, VOCAB = 1, 0, 23


def model_of(family: str, attention: str = "sdpa", **changes: Any) -> Any:
    """A random model with two layers, whose distributions are far from flat."""
    torch.manual_seed(4)
    settings = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "initializer_range": 0.5,
    }
    config = AutoConfig.for_model(family, **settings | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.requires_grad_(False).eval()


def engine_of(model: Any, max_rows: int = 64) -> TransformersEngine:
    """An engine over ``model``."""
    return TransformersEngine(model, end_ids=[END], pad_id=PAD, max_rows=max_rows)


def requests_of(count: int, *, temperature: float = 1.0, limit: int = 24) -> list[SampleRequest]:
    """Prompts of ragged lengths 1..6, all different."""
    return [
        SampleRequest(
            (i, 0),
            tuple(2 + (i * 5 + j) % (VOCAB - 2) for j in range(1 + i % 6)),
            rollout_seed(7, i),
            limit,
            temperature,
        )
        for i in range(count)
    ]


def run(engine: TransformersEngine, requests: Sequence[SampleRequest]) -> list[Completion]:
    """The completions in the order of the requests."""
    found = [pair for finished in engine.sample(requests) for pair in finished]
    assert sorted(ticket for ticket, _ in found) == list(range(len(requests)))
    assert engine.idle
    return [completion for _, completion in sorted(found, key=lambda pair: pair[0])]


def assert_exact(model: Any, requests: Sequence[SampleRequest], max_rows: int = 64) -> None:
    """All logprobs are those of plain forwards of one sequence after another."""
    completions = run(engine_of(model, max_rows), requests)
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.tensor([request.token_ids + completion.response_ids])
        exact = model(ids).logits[0].log_softmax(-1)
        first = len(request.token_ids) - 1
        picked = exact[first:-1].gather(-1, ids[0, first + 1 :, None])[:, 0]
        assert torch.allclose(picked, torch.tensor(completion.rollout_logprobs), atol=2e-5)
