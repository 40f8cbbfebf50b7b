"""Packed against padded micro-batches: seconds of a batch's forwards and backwards on one thread.

Below 1 packing is faster. Lengths come in two mixes: nearly equal, and a few long among many short.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from opd_core.objective.logprobs import token_logprobs
from opd_core.training.attention import use_packed_attention
from opd_core.training.batch import TrainSample
from opd_core.training.packing import MicroBatch, collate, plan

VOCABULARY = 64
ROUNDS = 5
# Layers, hidden size, token budgets of a micro-batch.
MODELS = {
    "2 layers of 96": (2, 96, (512, 2048, 8192)),
    "6 layers of 256": (6, 256, (512, 4096)),
}
# How many, and their lengths; the longest of a mix is 1.1 times, or 5 and 10 times, the mean.
MIXES: dict[str, tuple[int, Callable[[random.Random], int]]] = {
    "equal, short": (64, lambda draw: draw.randint(28, 36)),
    "mixed, short": (64, lambda draw: draw.choices([24, 160], [15, 1])[0] + draw.randint(-8, 8)),
    "equal, long": (12, lambda draw: draw.randint(220, 260)),
    "mixed, long": (24, lambda draw: draw.choices([60, 900], [15, 1])[0] + draw.randint(-40, 40)),
}


def samples(mix: str) -> list[TrainSample]:
    """Random tokens; half of each sample is prompt."""
    draw = random.Random(0)
    count, length = MIXES[mix]
    made = []
    for _ in range(count):
        ids = tuple(draw.randrange(VOCABULARY) for _ in range(length(draw)))
        prompt = len(ids) // 2
        told = (-1.0,) * (len(ids) - prompt)
        made.append(TrainSample(ids, prompt, told, told, 0.0, 0))
    return made


def student(layers: int, hidden: int) -> Qwen3ForCausalLM:
    """A random model whose heads are 16 wide, two to a key."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        num_key_value_heads=hidden // 32,
        head_dim=16,
        intermediate_size=3 * hidden,
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
    )
    return Qwen3ForCausalLM(config).train()


def step(model: Qwen3ForCausalLM, batches: list[MicroBatch]) -> None:
    """One optimizer step's forwards and backwards."""
    for batch in batches:
        body = model.base_model(
            input_ids=batch.token_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            **batch.model_inputs,
        )
        head = model.get_output_embeddings().weight
        logprobs = token_logprobs(body.last_hidden_state, head, batch.token_ids)
        logprobs[batch.response_mask].sum().backward()
    model.zero_grad()


def compare(layers: int, hidden: int, mix: str, max_tokens: int) -> str:
    """The best of rounds in which both take turns, so that a busy machine slows both."""
    device = torch.device("cpu")
    given = samples(mix)
    models, batches = {}, {}
    for packed in (False, True):
        models[packed] = student(layers, hidden)
        if packed:
            use_packed_attention(models[packed])
        (parts,) = plan(given, ranks=1, max_tokens=max_tokens, packed=packed, hidden_size=hidden)
        batches[packed] = [collate(p, packed=packed, pad_id=0, device=device) for p in parts]
        step(models[packed], batches[packed])
    wall: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for packed in (False, True):
            began, used = time.perf_counter(), time.process_time()
            step(models[packed], batches[packed])
            cpu[packed].append(time.process_time() - used)
            wall[packed].append(time.perf_counter() - began)
    told = {packed: min(cpu[packed]) for packed in cpu}
    ratios = [min(taken[True]) / min(taken[False]) for taken in (cpu, wall)]
    tokens = {packed: sum(b.token_ids.numel() for b in batches[packed]) for packed in batches}
    return (
        f"{mix:13} {max_tokens:5} tokens a micro-batch: "
        f"packed / padded {ratios[0]:.2f} CPU, {ratios[1]:.2f} wall "
        f"({told[True]:.2f} / {told[False]:.2f} s, {len(batches[True])} / {len(batches[False])} "
        f"micro-batches, {tokens[True]} / {tokens[False]} tokens)"
    )


def run() -> Iterator[str]:
    """A line for each model, mix and budget."""
    torch.set_num_threads(1)
    for name, (layers, hidden, budgets) in MODELS.items():
        yield name
        for mix in MIXES:
            for max_tokens in budgets:
                yield "  " + compare(layers, hidden, mix, max_tokens)
