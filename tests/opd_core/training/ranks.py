"""One rank of several, as a process: ``python ranks.py RANK RANKS FOLDER STUDENT``.

Trains on the batches in FOLDER in every way that ``cases`` names and leaves what came out.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from opd_core.training.sharding import whole
from tests.opd_core.training.engine import learner_of, opd_config

CASES: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed in small micro-batches": {"micro_batch_tokens": 24, "logprob_chunk_tokens": 5},
    "padded": {"packing": False},
    "padded, one row each": {"packing": False, "micro_batch_tokens": 1},
    "checkpointed": {"gradient_checkpointing": True},
}
ADAPTED: dict[str, dict[str, Any]] = {
    "adapters and a reference": {
        "student": {"lora": {"rank": 4, "alpha": 8.0}},
        "reference_kl_weight": 0.5,
    },
    "all weights and a reference": {"reference_kl_weight": 0.5},
    "importance weights": {"importance_cap": 1.5},
}
"""These train something else: to be compared with themselves on one rank."""
HYBRID: dict[str, dict[str, Any]] = {
    "two copies over two ranks each": {"actors": 4, "shard_ranks": 2}
}


class RecordingSGD(torch.optim.SGD):
    """Keeps the gradients of its first step, whole."""

    first: list[torch.Tensor] | None = None

    def step(self, closure: Any = None) -> Any:
        if self.first is None:
            self.first = [whole(g["params"][0].grad).clone() for g in self.param_groups]
        return super().step(closure)


def run(student: Path, batches: list[Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Gradient of the first step, weights after all of them with SGD, the curve of AdamW, and where
    more than the teacher trains the weights without a measurement of the teacher's part."""
    made: list[RecordingSGD] = []

    def sgd(parameters: list[Any], training: Any) -> RecordingSGD:
        made.append(RecordingSGD([{"params": [p]} for p in parameters], lr=0.1))
        return made[-1]

    learner = learner_of(student, opd_config(), make_optimizer=sgd, **settings)
    metrics = [learner.update(batch) for batch in batches]
    weights = learner.weights()
    unmeasured: dict[str, torch.Tensor] = {}
    if "reference_kl_weight" in settings:
        other = learner_of(student, opd_config(), make_optimizer=sgd, **settings)
        for batch in batches:
            other.update(replace(batch, measure_teacher=False))
        unmeasured = other.weights()
    adam = learner_of(student, opd_config(), **settings)
    curve = [adam.update(batch)["opd_reverse_kl"] for batch in [*batches, *batches]]
    return {
        "gradient": made[0].first,
        "weights": weights,
        "unmeasured": unmeasured,
        "metrics": metrics,
        "curve": curve,
    }


def main() -> None:
    rank, ranks, folder, student = int(sys.argv[1]), int(sys.argv[2]), *map(Path, sys.argv[3:])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting-{ranks}", rank=rank, world_size=ranks
    )
    torch.set_num_threads(1)
    batches = torch.load(folder / "batches.pt", weights_only=False)
    cases = CASES | (HYBRID if ranks == 4 else ADAPTED)
    told = {name: run(student, batches, settings) for name, settings in cases.items()}
    torch.save(told, folder / f"told-{ranks}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
