"""On-policy distillation in one plain process: no Ray, no HTTP, no journal.

``python -m tests.benchmarks.bare_loop SETTING.json`` trains and prints one line of JSON. It samples
with our engine from the very weights that it trains, asks the teacher by a forward of its own,
and takes our maths for the update; whatever a run costs above this is the price of the system.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opd_core.data import load_prompts
from opd_core.objective import opd_advantages, policy_loss, reverse_kl
from opd_core.rollout import Prompt
from opd_core.sampling.protocol import Completion, SampleRequest, rollout_seed
from opd_core.sampling.transformers_engine import TransformersEngine
from opd_core.training import models


def main(setting: dict[str, Any]) -> dict[str, Any]:
    """Train; what each step took, and how long it was until the first one."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    tokenizer = models.load_tokenizer(setting["student"])
    student = models.load_model(setting["student"], "float32", cpu)
    teacher = models.load_model(setting["teacher"], "float32", cpu).requires_grad_(False).eval()
    prompts = load_prompts(setting["data"], tokenizer, setting["max_prompt_tokens"]).prompts
    ends, rows = models.end_ids(student, tokenizer), setting["prompts_per_step"]
    engine = TransformersEngine(student, end_ids=ends, pad_id=0, max_rows=rows)
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=setting["learning_rate"], betas=setting["betas"], weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / setting["warmup_steps"])
    )
    steps, start_s = [], time.time() - setting["began"]
    for step in range(setting["steps"]):
        wall, used = time.perf_counter(), time.process_time()
        asked = prompts[step * rows : (step + 1) * rows]
        completions = _sample(engine, asked, setting, step)
        _update(student, teacher, optimizer, asked, completions)
        schedule.step()
        lengths = [len(completion.response_ids) for completion in completions]
        steps.append(
            {
                "wall_s": time.perf_counter() - wall,
                "cpu_s": time.process_time() - used,
                "tokens": sum(lengths),
                "longest": max(lengths),
            }
        )
    return {"start_s": start_s, "steps": steps}


def _sample(
    engine: TransformersEngine, prompts: Sequence[Prompt], setting: dict[str, Any], step: int
) -> list[Completion]:
    requests = [
        SampleRequest(
            (row, 0),
            prompt.token_ids,
            rollout_seed(setting["seed"], step, row),
            setting["max_new_tokens"],
        )
        for row, prompt in enumerate(prompts)
    ]
    done = dict(pair for some in engine.sample(requests) for pair in some)
    return [done[number] for number in range(len(requests))]


def _update(
    student: Any,
    teacher: Any,
    optimizer: torch.optim.Optimizer,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
) -> None:
    """One optimizer step on the whole batch, padded to its longest sequence."""
    rows = [p.token_ids + c.response_ids for p, c in zip(prompts, completions, strict=True)]
    ids = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.long)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    rollout = torch.zeros(ids.shape)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        first, last = len(prompt.token_ids), len(rows[i])
        ids[i, :last] = torch.tensor(rows[i])
        mask[i, first:last] = True
        rollout[i, first:last] = torch.tensor(completion.rollout_logprobs)
    with torch.no_grad():
        told = _logprobs(teacher, ids)
    logprobs = _logprobs(student, ids)
    old = logprobs.detach()
    made = opd_advantages(
        reverse_kl=reverse_kl(old, told, mask),
        response_mask=mask,
        task_advantages=None,
        task_adv_weight=0.0,
        opd_adv_weight=1.0,
        kl_clamp=5.0,
        baseline=(rollout - told)[mask].mean(),
    )
    outcome = policy_loss(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=made.advantages,
        response_mask=mask,
        valid_tokens=int(mask.sum()),
    )
    outcome.loss.backward()
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _logprobs(model: Any, ids: Tensor) -> Tensor:
    """[B, T]; index i describes ``ids[:, i]``, and the first is 0."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen, (1, 0))


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
