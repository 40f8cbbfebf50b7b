"""Learners and fixed batches for tests of the training engine."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from opd_core.config import OPDConfig, OPDTeacherConfig, StudentConfig, TrainingConfig
from opd_core.training.batch import MiniBatch, TrainBatch, TrainSample
from opd_core.training.learner import Learner
from opd_core.training.models import load_model, load_tokenizer

CPU = torch.device("cpu")


def tiny_config(**changes: Any) -> Qwen3Config:
    """A Qwen3 of 2 layers over 18 symbols (vocabulary padded to 20)."""
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 48,
        "vocab_size": 20,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return Qwen3Config(**(settings | changes))


def opd_config(**changes: Any) -> OPDConfig:
    teacher = OPDTeacherConfig(name="t", endpoint="http://127.0.0.1:1")
    return OPDConfig(teachers=(teacher,), default_teacher="t", **changes)


def training_config(**changes: Any) -> TrainingConfig:
    settings = {"steps": 1, "prompts_per_step": 6, "learning_rate": 1e-3, "weight_decay": 0.0}
    return TrainingConfig(**(settings | changes))


def learner_of(
    path: Path,
    opd: OPDConfig | None = None,
    dtype: str = "float32",
    *,
    student: dict[str, Any] | None = None,
    importance_cap: float | None = None,
    make_optimizer: Any = None,
    **training: Any,
) -> Learner:
    """A learner of this process; of one rank unless the process has joined others."""
    return Learner(
        load_model(str(path), "float32", CPU),
        load_tokenizer(str(path)),
        StudentConfig(model=str(path), dtype=dtype, **(student or {})),
        training_config(**training),
        opd,
        device=CPU,
        importance_cap=importance_cap,
        make_optimizer=make_optimizer,
    )


def scored_batch(
    student: Path, teacher: Path, mini_batches: int = 1, samples: int = 6, seed: int = 5
) -> TrainBatch:
    """Ragged random sequences with the student's and the teacher's true logprobs."""
    models = [
        AutoModelForCausalLM.from_pretrained(p).requires_grad_(False) for p in (student, teacher)
    ]
    draw = torch.Generator().manual_seed(seed)
    made = []
    for number in range(samples):
        prompt, length = 1 + number % 3, 4 + 2 * (number % 6)
        ids = torch.randint(2, 18, (1, prompt + length), generator=draw)
        exact = [m(ids).logits[0].log_softmax(-1) for m in models]
        own, theirs = (
            e[prompt - 1 : -1].gather(-1, ids[0, prompt:, None])[:, 0].tolist() for e in exact
        )
        made.append(
            TrainSample(
                tuple(ids[0].tolist()),
                prompt,
                tuple(own),
                tuple(theirs),
                0.0,
                number % 2,
                (number // 2, number % 2),
            )
        )
    parts = [tuple(made[i::mini_batches]) for i in range(mini_batches)]
    return TrainBatch(tuple(map(_mini_batch, parts)), ("a", "b"), scored=True)


def with_tools(batch: TrainBatch, seed: int = 6) -> TrainBatch:
    """The same sequences, in which a tool wrote some tokens; the others are stale by 0 to 2 steps,
    and stale weights liked them otherwise."""
    draw = random.Random(seed)

    def changed(sample: TrainSample) -> TrainSample:
        tokens = len(sample.rollout_logprobs)
        mask = (True, *(draw.random() < 0.6 for _ in range(tokens - 1)))
        stale = tuple(draw.randrange(3) for _ in range(tokens))
        own = tuple(
            logprob + draw.uniform(-2, 2) * bool(steps) if sampled else 0.0
            for logprob, steps, sampled in zip(sample.rollout_logprobs, stale, mask, strict=True)
        )
        return replace(sample, rollout_logprobs=own, response_mask=mask, staleness=stale)

    minis = (_mini_batch(tuple(map(changed, mini.samples))) for mini in batch.mini_batches)
    return replace(batch, mini_batches=tuple(minis))


def _mini_batch(samples: tuple[TrainSample, ...]) -> MiniBatch:
    return MiniBatch(samples, sum(sample.response_tokens for sample in samples))
