"""How TRL's GRPO trainer samples without a server; run by TRL's own environment.

``python trl_sampling.py SETTING.json`` prints one line of JSON. Nothing of this project is
imported. The trainer is built as for training, and its own generation is called on batches of
prompts.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def trainer_of(setting: dict[str, Any], folder: str) -> GRPOTrainer:
    """A trainer at temperature 1, without any cut of the distribution."""
    rows = setting["batch_rows"]
    return GRPOTrainer(
        model=setting["student"],
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=rows,
            num_generations=setting["group_size"],
            max_completion_length=setting["max_new_tokens"],
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            seed=setting["seed"],
            use_transformers_continuous_batching=setting["continuous"],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"prompt": "1"}] * rows),
        processing_class=AutoTokenizer.from_pretrained(setting["student"], padding_side="left"),
    )


def main(setting: dict[str, Any]) -> dict[str, Any]:
    """Response tokens, wall and CPU seconds of each round."""
    torch.set_num_threads(1)
    prompts, rows = setting["prompts"], setting["batch_rows"]
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(setting, folder)
        for _ in range(setting["rounds"]):
            began, used, tokens = time.perf_counter(), time.process_time(), 0
            # Continuous batching makes its own batches.
            step = len(prompts) if setting["continuous"] else rows
            for first in range(0, len(prompts), step):
                batch = prompts[first : first + step]
                ids, _ = trainer._generate_single_turn(batch, None, {}, setting["group_size"])
                tokens += sum(map(len, ids))
            rounds.append((tokens, time.perf_counter() - began, time.process_time() - used))
    return {"rounds": rounds}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
