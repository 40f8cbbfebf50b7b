"""TRL's DistillationTrainer on the same models, prompts and limits; run by TRL's own environment.

``python trl_side.py SETTING.json`` trains and prints one line of JSON. Nothing of this project is
imported. Settings that differ from TRL's defaults are those that make both sides do the same work
(fp32, no recomputation, constant learning rate) or spare TRL work (no report, no save).
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
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import DistillationConfig, DistillationTrainer


class StepClock(TrainerCallback):
    """Wall and CPU seconds from the beginning of each step to the end of its bookkeeping."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []
        self.first = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Where the first step begins."""
        self.first = time.time()
        self._mark()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Where a step ends, and the next begins."""
        self._mark()

    def _mark(self) -> None:
        self.marks.append((time.perf_counter(), time.process_time()))


def arguments(setting: dict[str, Any], folder: str) -> DistillationConfig:
    """The trainer's arguments: one forward of the whole batch, the full reverse KL."""
    return DistillationConfig(
        output_dir=folder,
        max_steps=setting["steps"],
        per_device_train_batch_size=setting["prompts_per_step"],  # in four parts: no faster
        max_completion_length=setting["max_new_tokens"],
        beta=1.0,
        temperature=1.0,
        learning_rate=setting["learning_rate"],
        adam_beta1=setting["betas"][0],
        adam_beta2=setting["betas"][1],
        weight_decay=0.0,
        max_grad_norm=1.0,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=setting["warmup_steps"],
        seed=setting["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main(setting: dict[str, Any]) -> dict[str, Any]:
    """Train; what each step took, and how long it was until the first one."""
    torch.set_num_threads(1)
    rows = Path(setting["data"]).read_text(encoding="utf-8").splitlines()
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = DistillationTrainer(
            model=setting["student"],
            teacher_model=setting["teacher"],
            args=arguments(setting, folder),
            train_dataset=Dataset.from_list([{"prompt": json.loads(r)["prompt"]} for r in rows]),
            processing_class=AutoTokenizer.from_pretrained(setting["student"], padding_side="left"),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = [log for log in trainer.state.log_history if "completions/mean_length" in log]
    steps = [
        {
            "wall_s": after[0] - before[0],
            "cpu_s": after[1] - before[1],
            "tokens": round(log["completions/mean_length"] * setting["prompts_per_step"]),
            "longest": int(log["completions/max_length"]),
        }
        for before, after, log in zip(clock.marks, clock.marks[1:], logs, strict=False)
    ]
    return {
        "start_s": clock.first - setting["began"],
        "steps": steps,
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
