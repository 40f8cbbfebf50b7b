"""The in-process engine against plain ``generate``, and against what TRL samples with.

Every side samples the same prompts with the same weights, in fp32 with one thread.
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opd_core.data import load_prompts
from opd_core.sampling.protocol import SampleRequest, rollout_seed
from opd_core.sampling.transformers_engine import TransformersEngine
from opd_core.training import models
from tests.benchmarks import whole_step

ASSETS = Path("deployments/recipes/assets/tiny").absolute()
ROUNDS = 5
LIKE_ROWS, LIKE_TOKENS = 128, 48
GROUPS, GROUP_SIZE, MIXED_ROWS = 64, 4, 64
SHORTEST, LONGEST = 8, 240
"""Of the mixed lengths; the student has 256 positions."""
CONTINUOUS_LIMIT_S = 900.0

Side = Callable[[int], int]
"""Samples with a seed; how many of its tokens are wanted."""


class Student:
    """The tiny student, its tokenizer, and a way to sample from it for each side."""

    def __init__(self) -> None:
        path = str(ASSETS / "student")
        self.tokenizer = models.load_tokenizer(path)
        cpu = torch.device("cpu")
        self.model = models.load_model(path, "float32", cpu).requires_grad_(False)
        self.ends = models.end_ids(self.model, self.tokenizer)

    def prompts(self, file: Path, count: int) -> list[tuple[int, ...]]:
        """The first prompts of a file, as token ids."""
        found = load_prompts(file, self.tokenizer, 48, limit=count).prompts
        return [prompt.token_ids for prompt in found]

    def ours(self, prompts: Sequence[tuple[int, ...]], limits: Sequence[int], **how: Any) -> Side:
        """Our engine; ``how`` is its ``max_rows`` and ``end_ids``."""
        engine = TransformersEngine(self.model, pad_id=0, **how)

        def sample(seed: int) -> int:
            requests = [
                SampleRequest((i, 0), ids, rollout_seed(seed, i), limit)
                for i, (ids, limit) in enumerate(zip(prompts, limits, strict=True))
            ]
            return sum(len(c.response_ids) for done in engine.sample(requests) for _, c in done)

        return sample

    def generate(self, prompts: Sequence[tuple[int, ...]], limit: int, **how: Any) -> torch.Tensor:
        """Plain ``generate`` on a batch: the responses [B, longest]."""
        batch = self.tokenizer.pad(
            {"input_ids": [list(ids) for ids in prompts]}, return_tensors="pt", padding_side="left"
        )
        output: torch.Tensor = self.model.generate(
            **batch, do_sample=True, top_k=0, max_new_tokens=limit, **how
        )
        return output[:, batch["input_ids"].shape[1] :]


def run() -> Iterator[str]:
    """Wanted response tokens per second of every side, and ratios."""
    torch.set_num_threads(1)
    student = Student()
    yield f"like lengths: {LIKE_ROWS} prompts, at most {LIKE_TOKENS} tokens"
    yield from compare(like_lengths(student))
    yield (
        f"mixed lengths: {GROUPS} prompts x {GROUP_SIZE}, {SHORTEST} to {LONGEST} tokens, "
        f"{MIXED_ROWS} rows at a time"
    )
    yield from compare(mixed_lengths(student))
    yield (
        f"TRL's generation: {GROUPS} prompts x {GROUP_SIZE}, the student's own ends, at most "
        f"200 tokens, {MIXED_ROWS} rows at a time"
    )
    yield from against_trl(student)


def like_lengths(student: Student) -> dict[str, Side]:
    """Both end where the student does."""
    prompts = student.prompts(ASSETS / "train.jsonl", LIKE_ROWS)

    def generate(seed: int) -> int:
        torch.manual_seed(seed)
        answers = student.generate(prompts, LIKE_TOKENS, eos_token_id=list(student.ends))
        return int((answers != student.tokenizer.pad_token_id).sum())

    limits = [LIKE_TOKENS] * LIKE_ROWS
    ours = student.ours(prompts, limits, max_rows=LIKE_ROWS, end_ids=student.ends)
    return {"generate": generate, "ours": ours}


def mixed_lengths(student: Student) -> dict[str, Side]:
    """No end tokens, but a limit for each row: both sides give the same number of wanted tokens.

    The limits are long-tailed (log-normal). ``generate`` takes batch after batch, in the order of
    the prompts, each to its longest limit; our engine all at once.
    """
    rng = random.Random(0)
    count = GROUPS * GROUP_SIZE
    limits = [min(LONGEST, SHORTEST + int(rng.lognormvariate(3.2, 1.1))) for _ in range(count)]
    groups = student.prompts(ASSETS / "train.jsonl", GROUPS)
    prompts = [prompt for prompt in groups for _ in range(GROUP_SIZE)]

    def generate(seed: int) -> int:
        torch.manual_seed(seed)
        for first in range(0, count, MIXED_ROWS):
            some = slice(first, first + MIXED_ROWS)
            student.generate(prompts[some], max(limits[some]), suppress_tokens=list(student.ends))
        return sum(limits)

    ours = student.ours(prompts, limits, max_rows=MIXED_ROWS, end_ids=())
    return {"generate": generate, "ours": ours}


def compare(sides: Mapping[str, Side]) -> Iterator[str]:
    """The sides take turns; each one's best round."""
    best = dict.fromkeys(sides, 0.0)
    for seed in range(ROUNDS + 1):
        for name, sample in sides.items():
            began = time.process_time()
            tokens = sample(seed)
            if seed:
                best[name] = max(best[name], tokens / (time.process_time() - began))
    for name, speed in best.items():
        yield f"{name:16} {speed:10,.0f} tokens per CPU second"
    yield f"ours / generate: {best['ours'] / best['generate']:.2f} (ours with rollout_logprobs)"


def against_trl(student: Student) -> Iterator[str]:
    """TRL's trainer with ``generate`` and with transformers' continuous batching, in its own
    environment, and ours; prompts of which one in eight is long."""
    python = whole_step.trl_environment()
    with tempfile.TemporaryDirectory() as folder:
        *_, mixed = whole_step.settings(Path(folder))
        groups = student.prompts(Path(mixed.data), GROUPS)
        prompts = [prompt for prompt in groups for _ in range(GROUP_SIZE)]
        speeds = {}
        for name, continuous in (("TRL generate", False), ("TRL continuous", True)):
            setting = {
                "student": mixed.student,
                "prompts": prompts,
                "batch_rows": MIXED_ROWS,
                "group_size": GROUP_SIZE,
                "max_new_tokens": mixed.max_new_tokens,
                "seed": mixed.seed,
                "continuous": continuous,
                "rounds": 1 if continuous else ROUNDS,
            }
            file = Path(folder) / "sampling.json"
            file.write_text(json.dumps(setting), encoding="utf-8")
            command = [python, "tests/benchmarks/trl_sampling.py", str(file)]
            speeds[name], told = _asked(command)
            yield f"{name:16} {told}"
    ours = student.ours(prompts, [200] * len(prompts), max_rows=MIXED_ROWS, end_ids=student.ends)
    best = 0.0
    for seed in range(ROUNDS):
        began = time.process_time()
        best = max(best, ours(seed) / (time.process_time() - began))
    yield f"{'ours':16} {best:10,.0f} tokens per CPU second"
    for name, speed in speeds.items():
        if speed:
            yield f"ours / {name}: {best / speed:.2f}"


def _asked(command: list[str]) -> tuple[float, str]:
    """Run TRL's side: its best speed, and a line about it."""
    try:
        done = subprocess.run(
            command,
            env=whole_step.one_thread(),
            capture_output=True,
            text=True,
            timeout=CONTINUOUS_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 0.0, f"not done after {CONTINUOUS_LIMIT_S:.0f} s"
    if done.returncode:
        return 0.0, f"failed: {done.stderr.strip().splitlines()[-1]}"
    rounds = json.loads(done.stdout.splitlines()[-1])["rounds"]
    speed = max(tokens / cpu_s for tokens, _, cpu_s in rounds)
    return speed, f"{speed:10,.0f} tokens per CPU second, {rounds[0][0]} tokens in the first round"
