"""One of two ranks over gloo, started by ``test_learner``: RANK FOLDER STUDENT."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from opd_core.config import OPDConfig, OPDTeacherConfig, TrainingConfig
from opd_core.training.batch import shard
from opd_core.training.learner import Learner
from opd_core.training.models import load_model, load_tokenizer


def main() -> None:
    rank, folder, student = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    teacher = OPDTeacherConfig(name="t", endpoint="http://127.0.0.1:1")
    opd = OPDConfig(teachers=(teacher,), default_teacher="t")
    training = TrainingConfig(steps=1, prompts_per_step=6, learning_rate=1e-3, weight_decay=0.0)
    model = load_model(student, "float32", torch.device("cpu"))
    learner = Learner(model, load_tokenizer(student), training, opd)
    batch = torch.load(folder / "batch.pt", weights_only=False)
    metrics = learner.update(shard(batch, 2)[rank])
    (folder / f"metrics-{rank}.json").write_text(json.dumps(metrics))
    torch.save(learner.weights(), folder / f"weights-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
