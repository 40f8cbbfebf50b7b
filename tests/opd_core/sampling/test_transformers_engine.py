"""The in-process engine against plain forward passes of the same model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from opd_core.errors import SamplingError
from opd_core.sampling.protocol import Completion, SampleRequest, rollout_seed
from opd_core.sampling.transformers_engine import TransformersEngine

END, PAD, VOCAB = 1, 0, 23


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    config = Qwen3Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        initializer_range=0.5,
    )
    return Qwen3ForCausalLM(config).requires_grad_(False)


def engine_of(model: Any, max_rows: int = 64) -> TransformersEngine:
    return TransformersEngine(model, end_ids=[END], pad_id=PAD, max_rows=max_rows)


def requests_of(count: int, *, temperature: float = 1.0, limit: int = 24) -> list[SampleRequest]:
    """Prompts of ragged lengths 1..6."""
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


def run(engine: TransformersEngine, requests: Sequence[SampleRequest]) -> dict[Any, Completion]:
    completions = [c for finished in engine.sample(requests) for c in finished]
    assert len(completions) == len({c.key for c in completions}) == len(requests)
    return {c.key: c for c in completions}


def assert_exact(model: Any, requests: Sequence[SampleRequest]) -> None:
    completions = run(engine_of(model), requests)
    for request in requests:
        completion = completions[request.key]
        ids = torch.tensor([request.prompt_ids + completion.response_ids])
        exact = model(ids).logits[0].log_softmax(-1)
        first = len(request.prompt_ids) - 1
        picked = exact[first:-1].gather(-1, ids[0, first + 1 :, None])[:, 0]
        assert torch.allclose(picked, torch.tensor(completion.rollout_logprobs), atol=2e-5)


def test_rollout_logprobs_are_the_models_own_over_ragged_batches(model: Any) -> None:
    assert_exact(model, requests_of(32))


def model_of(family: str, attention: str = "sdpa", **changes: Any) -> Any:
    torch.manual_seed(4)
    config = AutoConfig.for_model(
        family,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        initializer_range=0.5,
        **changes,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.requires_grad_(False)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gpt_neox"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_any_attention_is_sampled_exactly(family: str, attention: str) -> None:
    assert_exact(model_of(family, attention), requests_of(12))


def test_sliding_attention_is_sampled_exactly() -> None:
    assert_exact(model_of("mistral", sliding_window=4), requests_of(12))


def reads_of(model: Any) -> int:
    """How often decoding asks a tensor for its value; on a GPU each of them waits for the device
    (``tolist`` of what was copied is not seen here)."""
    reads = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal reads
            reads += func.name() in ("aten::is_nonzero", "aten::item", "aten::_local_scalar_dense")
            return func(*args, **(kwargs or {}))

    with Count():
        run(engine_of(model), requests_of(8, limit=6))
    return reads


def test_decoding_asks_the_device_for_nothing_but_the_samples(model: Any) -> None:
    assert reads_of(model) == 0
    assert reads_of(model_of("llama")) == 0
    assert reads_of(model_of("mistral", sliding_window=None)) == 0
    # Without a mask of our own it does: the count can see it.
    assert reads_of(model_of("gpt_neox")) > 0


def test_a_pad_sees_itself_only_and_a_token_sees_the_tokens_up_to_itself(model: Any) -> None:
    valid = torch.tensor([[False, False, True, True], [True, True, True, True]])
    padded, full = engine_of(model)._mask(valid, 4)[:, 0]
    assert padded.tolist() == [
        [True, False, False, False],
        [False, True, False, False],
        [False, False, True, False],
        [False, False, True, True],
    ]
    assert torch.equal(full, torch.ones(4, 4, dtype=torch.bool).tril())
    assert torch.equal(engine_of(model)._mask(valid, 1)[:, 0, 0], valid)


def test_what_a_row_samples_does_not_depend_on_its_neighbours(model: Any) -> None:
    requests = requests_of(24)
    together = run(engine_of(model), requests)
    few_rows = run(engine_of(model, max_rows=5), requests)
    backwards = run(engine_of(model), requests[::-1])
    for key, completion in together.items():
        assert few_rows[key].response_ids == completion.response_ids
        assert backwards[key].response_ids == completion.response_ids


def test_the_end_token_belongs_to_the_response_and_the_limit_truncates(model: Any) -> None:
    completions = run(engine_of(model), requests_of(64, limit=12)).values()
    stopped = [c for c in completions if c.finish_reason == "stop"]
    cut = [c for c in completions if c.finish_reason == "length"]
    assert stopped
    assert cut
    assert all(c.response_ids[-1] == END and END not in c.response_ids[:-1] for c in stopped)
    assert all(len(c.response_ids) == 12 and END not in c.response_ids for c in cut)


def test_short_answers_are_handed_out_before_long_ones_end(model: Any) -> None:
    parts = list(engine_of(model).sample(requests_of(32)))
    assert len(parts) > 1
    longest = [max(len(c.response_ids) for c in part) for part in parts]
    assert longest == sorted(longest)


def test_sampled_frequencies_follow_the_distribution(model: Any) -> None:
    prompt = (5, 9)
    count = 4000
    requests = [SampleRequest((i, 0), prompt, rollout_seed(i), 1) for i in range(count)]
    firsts = torch.tensor(
        [c.response_ids[0] for c in run(engine_of(model, max_rows=count), requests).values()]
    )
    observed = torch.bincount(firsts, minlength=VOCAB) / count
    expected = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    spread = (expected * (1 - expected) / count).sqrt()
    assert ((observed - expected).abs() < 5 * spread + 1e-6).all()


def test_low_temperature_samples_the_likeliest_token_and_keeps_true_logprobs(model: Any) -> None:
    request = requests_of(1, temperature=1e-3, limit=1)[0]
    completion = run(engine_of(model), [request])[request.key]
    logprobs = model(torch.tensor([request.prompt_ids])).logits[0, -1].log_softmax(-1)
    assert completion.response_ids[0] == int(logprobs.argmax())
    assert completion.rollout_logprobs[0] == pytest.approx(float(logprobs.max()), abs=2e-5)


def test_loaded_weights_change_the_samples_and_name_their_version(model: Any) -> None:
    import copy

    engine = engine_of(copy.deepcopy(model))
    requests = requests_of(8)
    before = run(engine, requests)
    weights = {name: torch.randn_like(w) for name, w in model.state_dict().items()}
    engine.load_weights(weights, policy_version=4)
    after = run(engine, requests)
    assert {c.policy_version for c in after.values()} == {4}
    assert any(after[key].response_ids != before[key].response_ids for key in before)


def test_weights_of_another_model_are_refused(model: Any) -> None:
    with pytest.raises(SamplingError, match="missing"):
        engine_of(model).load_weights({}, policy_version=1)
