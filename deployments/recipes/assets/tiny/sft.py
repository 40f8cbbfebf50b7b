"""Supervised training of one tiny model, and the measurements of a finished pair.

Everything runs on one CPU thread in fp32 with fixed seeds: the same torch build on the same
kind of processor gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from . import task
from .tokenizer import ASSISTANT, END, END_ID, MAX_LENGTH, PAD_ID, USER

IGNORED = -100
MAX_NEW_TOKENS = 48


def new_model(seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 model of 225 k parameters with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=32,  # 18 are used: servers misreport the last id, so it must stay free
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=16,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.1,  # the usual 0.02 learns half as fast at this width
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
    )
    model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(pad_token_id=PAD_ID, eos_token_id=END_ID)
    return model


def pad(rows: Sequence[Sequence[int]], value: int, *, left: bool = False) -> Tensor:
    """Rows of different lengths as one tensor [B, T], filled up with `value`."""
    length = max(map(len, rows))
    filler = [[value] * (length - len(row)) for row in rows]
    joined = [[*f, *r] if left else [*r, *f] for f, r in zip(filler, rows, strict=True)]
    return torch.tensor(joined)


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids that the chat template gives for one user message and a generation prompt."""
    return list(tokenizer.encode(f"{USER}{prompt}{ASSISTANT}").ids)


def batches(tokenizer: Tokenizer, recipe: task.SftRecipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Per step `token_ids` and `targets`, both [B, T]; only response tokens are targets."""
    pairs = task.corpus(recipe)
    for _ in range(recipe.steps):
        ids, targets = [], []
        for _ in range(recipe.batch_size):
            prompt, response = next(pairs)
            head = encode_prompt(tokenizer, prompt)
            tail = list(tokenizer.encode(response + END).ids)
            ids.append(head + tail)
            targets.append([IGNORED] * len(head) + tail)
        yield pad(ids, PAD_ID), pad(targets, IGNORED)


def train(tokenizer: Tokenizer, recipe: task.SftRecipe, *, name: str) -> Qwen3ForCausalLM:
    """Train one model from scratch, printing the loss (nats per response token) as it goes.

    AdamW without weight decay; the learning rate falls linearly to 5 %.
    """
    model = new_model(recipe.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=recipe.steps)
    for step, (ids, targets) in enumerate(batches(tokenizer, recipe), start=1):
        logits = model(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"{name}: step {step}/{recipe.steps}, loss {loss.item():.4f}", flush=True)
    return model.eval()


@torch.no_grad()
def respond(
    model: Qwen3ForCausalLM, prompts: Sequence[Sequence[int]], *, seed: int | None
) -> list[list[int]]:
    """One response per prompt, end token included: sampled at T = 1, greedy without a seed."""
    ids = pad(prompts, PAD_ID, left=True)
    if seed is not None:
        torch.manual_seed(seed)
    # The default top_k of 50 cuts nothing from a vocabulary of 32.
    output = model.generate(
        ids,
        attention_mask=(ids != PAD_ID).long(),
        do_sample=seed is not None,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    rows = output[:, ids.shape[1] :].tolist()
    return [r[: r.index(END_ID) + 1] if END_ID in r else r for r in rows]


def accuracy(
    tokenizer: Tokenizer, responses: Sequence[Sequence[int]], truths: Sequence[str]
) -> float:
    """Share of the responses that end with the right answer."""
    texts = tokenizer.decode_batch(responses)
    return sum(task.final_answer(t) == a for t, a in zip(texts, truths, strict=True)) / len(truths)


@torch.no_grad()
def reverse_kl(
    student: Qwen3ForCausalLM,
    teacher: Qwen3ForCausalLM,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
) -> float:
    """KL(student || teacher) in nats, mean over the tokens of the student's own responses.

    Summed over the whole vocabulary at each token, so it is exact given the responses.
    """
    ids = pad([[*p, *r] for p, r in zip(prompts, responses, strict=True)], PAD_ID)
    rows = zip(prompts, responses, strict=True)
    mask = pad([[0] * len(p) + [1] * len(r) for p, r in rows], 0).bool()[:, 1:]
    log_p = log_softmax(student(input_ids=ids).logits[:, :-1][mask], dim=-1)
    log_q = log_softmax(teacher(input_ids=ids).logits[:, :-1][mask], dim=-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def measure(
    tokenizer: Tokenizer,
    teacher: Qwen3ForCausalLM,
    student: Qwen3ForCausalLM,
    expressions: Sequence[str],
    seeds: Sequence[int],
) -> dict[str, float]:
    """Accuracies and the student's reverse KL; sampled figures are means over the seeds."""
    prompts = [encode_prompt(tokenizer, task.prompt_of(e)) for e in expressions]
    truths = [task.answer_of(e) for e in expressions]
    figures: dict[str, float] = {"parameters": student.num_parameters()}
    for name, model in (("teacher", teacher), ("student", student)):
        greedy = respond(model, prompts, seed=None)
        samples = [respond(model, prompts, seed=seed) for seed in seeds]
        sampled = fmean(accuracy(tokenizer, rows, truths) for rows in samples)
        divergence = fmean(reverse_kl(model, teacher, prompts, rows) for rows in samples)
        figures[f"{name}_greedy_accuracy"] = accuracy(tokenizer, greedy, truths)
        figures[f"{name}_sampled_accuracy"] = sampled
        figures[f"{name}_reverse_kl_nats_per_token"] = divergence
    return {name: round(value, 4) for name, value in figures.items()}


def save(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors into the folder."""
    disable_progress_bar()
    model.save_pretrained(folder)


def load(folder: Path) -> Qwen3ForCausalLM:
    """What `save` wrote, ready to answer."""
    return Qwen3ForCausalLM.from_pretrained(folder, local_files_only=True).eval()
