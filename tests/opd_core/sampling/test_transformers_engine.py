"""The in-process engine against plain forward passes of the same model."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opd_core.errors import SamplingError
from opd_core.sampling.protocol import Completion, SampleRequest, rollout_seed
from tests.opd_core.sampling.models import (
    END,
    VOCAB,
    assert_exact,
    engine_of,
    model_of,
    requests_of,
    run,
)


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of("qwen3", head_dim=16)


def test_rollout_logprobs_are_the_models_own_over_ragged_batches(model: Any) -> None:
    assert_exact(model, requests_of(32))


def reads_of(model: Any, requests: list[SampleRequest]) -> int:
    """How often sampling asks a tensor for its value; on a GPU each of them waits for the device
    (``tolist`` of what was copied is not seen here)."""
    engine = engine_of(model, max_rows=5)
    reads = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal reads
            reads += func.name() in ("aten::is_nonzero", "aten::item", "aten::_local_scalar_dense")
            return func(*args, **(kwargs or {}))

    with Count():
        run(engine, requests)
        counted = reads
        assert bool(torch.ones(1).any())
    assert reads == counted + 1, "the count can see it"
    return counted


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt_neox"])
def test_sampling_asks_the_device_for_nothing_but_the_samples(family: str) -> None:
    assert reads_of(model_of(family), requests_of(12, limit=6)) == 0


def test_the_end_token_belongs_to_the_response_and_the_limit_truncates(model: Any) -> None:
    completions = run(engine_of(model), requests_of(64, limit=12))
    stopped = [c for c in completions if c.finish_reason == "stop"]
    cut = [c for c in completions if c.finish_reason == "length"]
    assert stopped
    assert cut
    assert len(stopped) + len(cut) == len(completions)
    assert all(c.response_ids[-1] == END and END not in c.response_ids[:-1] for c in stopped)
    assert all(len(c.response_ids) == 12 and END not in c.response_ids for c in cut)


def test_a_stop_id_of_the_request_ends_it_and_belongs_to_the_response(model: Any) -> None:
    requests = requests_of(16)
    free = run(engine_of(model), requests)
    marks = [c.response_ids[len(c.response_ids) // 2] for c in free]
    stopping = [replace(r, stop_ids=(m, 99)) for r, m in zip(requests, marks, strict=True)]
    for before, after, mark in zip(free, run(engine_of(model), stopping), marks, strict=True):
        first = before.response_ids.index(mark) + 1
        assert after.response_ids == before.response_ids[:first]
        assert after.finish_reason == "stop"


def test_sampled_frequencies_follow_the_distribution(model: Any) -> None:
    prompt, count = (5, 9), 4000
    requests = [SampleRequest((i, 0), prompt, rollout_seed(i), 1) for i in range(count)]
    firsts = torch.tensor([c.response_ids[0] for c in run(engine_of(model, count), requests)])
    observed = torch.bincount(firsts, minlength=VOCAB) / count
    expected = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    spread = (expected * (1 - expected) / count).sqrt()
    assert ((observed - expected).abs() < 5 * spread + 1e-6).all()


def test_low_temperature_samples_the_likeliest_token_and_keeps_true_logprobs(model: Any) -> None:
    cold, warm = requests_of(1, temperature=1e-3, limit=1)[0], requests_of(1, limit=1)[0]
    completion, _ = run(engine_of(model), [cold, warm])
    logprobs = model(torch.tensor([cold.token_ids])).logits[0, -1].log_softmax(-1)
    assert completion.response_ids[0] == int(logprobs.argmax())
    assert completion.rollout_logprobs[0] == pytest.approx(float(logprobs.max()), abs=2e-5)


def test_each_request_has_its_own_temperature(model: Any) -> None:
    warm = requests_of(12)
    mixed = [replace(r, temperature=1.0 if i % 2 else 0.5) for i, r in enumerate(warm)]
    at_one, found = run(engine_of(model), warm), run(engine_of(model), mixed)
    assert [c.response_ids for c in found[1::2]] == [c.response_ids for c in at_one[1::2]]
    assert [c.response_ids for c in found[::2]] != [c.response_ids for c in at_one[::2]]


def test_loaded_weights_change_the_samples_and_name_their_version(model: Any) -> None:
    engine, requests = engine_of(copy.deepcopy(model)), requests_of(8)
    before = run(engine, requests)
    weights = {name: torch.randn_like(w) for name, w in model.state_dict().items()}
    engine.load_weights(weights, policy_version=4)
    after = run(engine, requests)
    assert all(c.policy_versions == (0,) * len(c.response_ids) for c in before)
    assert all(c.policy_versions == (4,) * len(c.response_ids) for c in after)
    assert [c.response_ids for c in after] != [c.response_ids for c in before]


def test_weights_that_were_not_finite_leave_no_trace(model: Any) -> None:
    engine, requests = engine_of(copy.deepcopy(model)), requests_of(8, limit=6)
    before = run(engine, requests)
    engine.load_weights({n: w * torch.nan for n, w in model.state_dict().items()}, 1)
    run(engine, requests)
    engine.load_weights(model.state_dict(), 2)
    assert [c.response_ids for c in run(engine, requests)] == [c.response_ids for c in before]


def test_weights_of_another_model_are_refused(model: Any) -> None:
    with pytest.raises(SamplingError, match="missing"):
        engine_of(model).load_weights({}, policy_version=1)


def test_weights_are_refused_while_rows_run(model: Any) -> None:
    engine = engine_of(model)
    engine.submit([(0, requests_of(1)[0])])
    with pytest.raises(SamplingError, match="interrupt it first"):
        engine.load_weights(model.state_dict(), policy_version=1)
    assert isinstance(engine.interrupt()[0][1], Completion)
    engine.load_weights(model.state_dict(), policy_version=1)
    assert engine.policy_version == 1
