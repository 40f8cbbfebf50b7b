"""An update on sequences with a tool's tokens and stale ones, against plain torch token by
token."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from opd_core.training.batch import TrainBatch
from tests.opd_core.training.engine import learner_of, opd_config, scored_batch, with_tools
from tests.opd_core.training.ranks import RecordingSGD

CUTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed in small micro-batches": {"micro_batch_tokens": 20},
    "padded": {"packing": False},
    "padded in small micro-batches": {"packing": False, "micro_batch_tokens": 30},
}


def updated(
    student: Path, batch: TrainBatch, **settings: Any
) -> tuple[list[Tensor], dict[str, float]]:
    """The first optimizer step's gradients, before any clipping, and the metrics."""
    made: list[RecordingSGD] = []

    def sgd(parameters: list[Any], training: Any) -> RecordingSGD:
        made.append(RecordingSGD([{"params": [p]} for p in parameters], lr=0.1))
        return made[0]

    learner = learner_of(student, opd_config(), make_optimizer=sgd, max_grad_norm=1e9, **settings)
    metrics = learner.update(batch)
    assert made[0].first is not None
    return made[0].first, metrics


def by_hand(
    student: Path, batch: TrainBatch, cap: float | None
) -> tuple[list[Tensor], dict[str, float]]:
    """The gradients of -1/N sum of w * A * logprob, and means over the N tokens that the student
    sampled; one forward a sample, one token after the other."""
    model = AutoModelForCausalLM.from_pretrained(student)
    tokens = []
    for sample in batch.mini_batches[0].samples:
        logprobs = model(torch.tensor([sample.token_ids])).logits[0].log_softmax(-1)
        for t, sampled in enumerate(sample.response_mask):
            place = sample.prompt_tokens + t
            logprob = logprobs[place - 1, sample.token_ids[place]]
            k = logprob.item() - sample.teacher_logprobs[t]
            gap = logprob.item() - sample.rollout_logprobs[t]
            if sampled:
                tokens.append((logprob, k, gap, sample.staleness[t], sample.rollout[0]))
    count = len(tokens)
    weights = [math.exp(gap) if cap is not None else 1.0 for _, _, gap, _, _ in tokens]
    capped = [min(w, cap or math.inf) for w in weights]
    terms = [
        w * (k - batch.baseline) * logprob
        for w, (logprob, k, *_) in zip(capped, tokens, strict=True)
    ]
    (torch.stack(terms).sum() / count).backward()
    ks = [k for _, k, _, _, _ in tokens]
    mean = sum(ks) / count
    rollouts = {number for *_, number in tokens}
    residuals = [sum(k - mean for _, k, *_, of in tokens if of == r) for r in rollouts]
    n = len(rollouts)
    fresh = [abs(gap) for _, _, gap, stale, _ in tokens if stale == 0]
    stale = [abs(gap) for _, _, gap, stale, _ in tokens if stale > 0]
    steps = [s for *_, s, _ in tokens]
    told = {
        "opd_reverse_kl": mean,
        "opd_reverse_kl_stderr": math.sqrt(sum(r * r for r in residuals) * n / (n - 1)) / count,
        "opd_abs_logprob_diff": sum(map(abs, ks)) / count,
        "advantage_max": max(batch.baseline - k for k in ks),
        "response_tokens": count,
        "engine_logprob_gap": sum(fresh) / len(fresh),
        "stale_logprob_gap": sum(stale) / len(stale),
        "staleness_mean": sum(steps) / count,
        "staleness_max": max(steps),
    }
    if cap is not None:
        told["importance_weight_mean"] = sum(capped) / count
        told["importance_truncated_fraction"] = sum(w > cap for w in weights) / count
    return [p.grad for p in model.parameters() if p.grad is not None], told


def apart(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest relative distance of two gradients of one parameter."""
    return max(float((f - w).norm() / w.norm()) for f, w in zip(found, wanted, strict=True))


@pytest.fixture(scope="module")
def batch(student_dir: Path, teacher_dir: Path) -> TrainBatch:
    return replace(with_tools(scored_batch(student_dir, teacher_dir)), baseline=0.4)


@pytest.mark.parametrize("cap", [None, 1.5, 1e9])
@pytest.mark.parametrize("cut", CUTS)
def test_an_update_counts_the_tokens_that_the_student_sampled_and_no_others(
    student_dir: Path, batch: TrainBatch, cut: str, cap: float | None
) -> None:
    assert batch.mini_batches[0].valid_tokens < sum(
        len(s.rollout_logprobs) for s in batch.mini_batches[0].samples
    )
    found, metrics = updated(student_dir, batch, importance_cap=cap, **CUTS[cut])
    wanted, told = by_hand(student_dir, batch, cap)
    assert apart(found, wanted) < 1e-5
    assert {name: metrics[name] for name in told} == pytest.approx(told, rel=1e-4, abs=1e-5)
    assert any(name.startswith("importance_") for name in metrics) == (cap is not None)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    tokens=st.integers(1, 80),
    packed=st.booleans(),
    cap=st.sampled_from([None, 1.5]),
)
def test_any_cut_of_any_masks_gives_the_same_update(
    student_dir: Path, teacher_dir: Path, seed: int, tokens: int, packed: bool, cap: float | None
) -> None:
    batch = with_tools(scored_batch(student_dir, teacher_dir, seed=seed), seed)
    whole, expected = updated(student_dir, batch, importance_cap=cap)
    found, metrics = updated(
        student_dir, batch, importance_cap=cap, micro_batch_tokens=tokens, packing=packed
    )
    assert apart(found, whole) < 1e-5
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_what_a_tool_wrote_is_context_and_moves_what_comes_after(
    student_dir: Path, batch: TrainBatch
) -> None:
    """Other placeholders and scores on its tokens change no bit; other tokens do."""
    (mini,) = batch.mini_batches

    def retold(values: tuple[float, ...], mask: tuple[bool, ...], other: float) -> Any:
        return tuple(v if m else other for v, m in zip(values, mask, strict=True))

    scores, ids = [], []
    for sample in mini.samples:
        mask = sample.response_mask
        scores.append(
            replace(
                sample,
                rollout_logprobs=retold(sample.rollout_logprobs, mask, -50.0),
                teacher_logprobs=retold(sample.teacher_logprobs, mask, -3.0),
                staleness=retold(sample.staleness, mask, 9),
            )
        )
        prompt, response = (
            sample.token_ids[: sample.prompt_tokens],
            sample.token_ids[sample.prompt_tokens :],
        )
        ids.append(replace(sample, token_ids=prompt + retold(response, mask, 3)))
    first, retold_scores, other_ids = (
        updated(student_dir, replace(batch, mini_batches=(replace(mini, samples=tuple(s)),)))
        for s in (mini.samples, scores, ids)
    )
    assert retold_scores[1] == first[1]
    assert all(torch.equal(a, b) for a, b in zip(retold_scores[0], first[0], strict=True))
    assert other_ids[1]["opd_reverse_kl"] != first[1]["opd_reverse_kl"]


@pytest.mark.parametrize(("stale", "told"), [(0, "engine_logprob_gap"), (3, "stale_logprob_gap")])
def test_a_gap_that_no_token_has_is_not_told(
    student_dir: Path, batch: TrainBatch, stale: int, told: str
) -> None:
    (mini,) = batch.mini_batches
    samples = tuple(replace(s, staleness=(stale,) * len(s.rollout_logprobs)) for s in mini.samples)
    metrics = updated(student_dir, replace(batch, mini_batches=(replace(mini, samples=samples),)))[
        1
    ]
    assert [name for name in metrics if name.endswith("_logprob_gap")] == [told]
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (stale, stale)
    assert not any(map(math.isnan, metrics.values()))
