"""The in-process engine against plain ``generate`` on the same prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from opd_core.data import load_prompts
from opd_core.sampling.protocol import SampleRequest, rollout_seed
from opd_core.sampling.transformers_engine import TransformersEngine
from opd_core.training import models

ASSETS = Path("deployments/recipes/assets/tiny")
ROWS, NEW_TOKENS, ROUNDS = 128, 48, 3


def run() -> Iterator[str]:
    """Response tokens per second of both, and the ratio."""
    torch.set_num_threads(1)
    path = str(ASSETS / "student")
    tokenizer = models.load_tokenizer(path)
    model = models.load_model(path, "float32", torch.device("cpu")).requires_grad_(False)
    prompts = load_prompts(ASSETS / "train.jsonl", tokenizer, 32, limit=ROWS).prompts
    ends = models.end_ids(model, tokenizer)
    engine = TransformersEngine(model, end_ids=ends, pad_id=0, max_rows=ROWS)

    def ours(seed: int) -> int:
        requests = [
            SampleRequest((i, 0), p.token_ids, rollout_seed(seed, i), NEW_TOKENS)
            for i, p in enumerate(prompts)
        ]
        return sum(len(c.response_ids) for done in engine.sample(requests) for c in done)

    def generate(seed: int) -> int:
        torch.manual_seed(seed)
        batch = tokenizer([p.text for p in prompts], return_tensors="pt", padding=True)
        output = model.generate(
            **batch, do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, eos_token_id=list(ends)
        )
        answers = output[:, batch["input_ids"].shape[1] :]
        return int((answers != tokenizer.pad_token_id).sum())

    speed = {}
    for name, sample in (("generate", generate), ("ours", ours)):
        sample(0)
        best = 0.0
        for seed in range(1, ROUNDS + 1):
            began = time.perf_counter()
            best = max(best, sample(seed) / (time.perf_counter() - began))
        speed[name] = best
        yield f"{name:8} {best:,.0f} response tokens/s"
    yield f"ours / generate: {speed['ours'] / speed['generate']:.2f} (ours with rollout_logprobs)"
