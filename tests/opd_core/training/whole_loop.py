"""The whole train loop in one process, as the driver builds it; shared by several tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch

from opd_core.config import ExperimentConfig
from opd_core.sampling.transformers_engine import TransformersEngine
from opd_core.scoring.facts import TeacherFacts, facts_to_json
from opd_core.training import models
from opd_core.training.assembly import build_loop
from opd_core.training.files import BATCHES_FOLDER, JOURNAL_FILE, TEACHERS_FILE
from opd_core.training.learner import Learner
from opd_core.training.local import LocalLearner, LocalSampler
from opd_core.training.loop import TrainOutcome
from opd_core.training.step_records import StepRecord, StepRecords


def config_of(student: Path, rows: Path, url: str | None, **changes: Any) -> ExperimentConfig:
    teacher = {"name": "teacher", "endpoint": url, "backend": "embedded", "away_limit_s": 1.0}
    opd = {"teachers": [teacher], "default_teacher": "teacher"} if url else None
    tree: dict[str, Any] = {
        "name": "loop",
        "student": {"model": str(student)},
        "data": {"train": str(rows), "max_prompt_tokens": 16},
        "sampling": {"max_new_tokens": 8},
        "opd": opd,
        "training": {
            "steps": 2,
            "prompts_per_step": 4,
            "learning_rate": 1e-3,
            "checkpoint_every": 0,
        },
    }
    for key, value in changes.items():
        tree[key] = {**tree.get(key, {}), **value}
    return ExperimentConfig.model_validate(tree)


async def train(
    config: ExperimentConfig,
    run_dir: Path,
    *,
    around: Callable[[Any], Any] = lambda learner: learner,
) -> TrainOutcome:
    """Build the loop as the driver does, with engines of this process, and run it. ``around`` may
    put something around the learner."""
    cpu = torch.device("cpu")
    tokenizer = models.load_tokenizer(config.student.model)
    sampled, trained = (models.load_model(config.student.model, "float32", cpu) for _ in range(2))
    sampler = LocalSampler(
        TransformersEngine(
            sampled.requires_grad_(False),
            end_ids=models.end_ids(sampled, tokenizer),
            pad_id=models.pad_id(tokenizer),
            max_rows=config.sampling.max_rows,
        )
    )
    learner = Learner(
        trained,
        tokenizer,
        config.student,
        config.training,
        config.opd,
        device=cpu,
        seed=config.seed,
        importance_cap=config.importance_cap,
    )
    run_dir.mkdir(exist_ok=True)
    facts = {"teacher": TeacherFacts(20, 128, fingerprint="random-2")}
    (run_dir / TEACHERS_FILE).write_text(facts_to_json(facts))
    async with AsyncExitStack() as exits:
        loop, _ = await build_loop(
            config, run_dir, sampler, around(LocalLearner(learner)), exits, {}
        )
        return await loop.run()


def journal(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / JOURNAL_FILE).read_text().splitlines()]


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    """The metrics of all train steps in the journal."""
    metrics = [record["metrics"] for record in journal(run_dir)]
    return [found for found in metrics if "time/step_s" in found]


def records_of(run_dir: Path, after: int = 0) -> list[StepRecord]:
    """The recorded batches after a train step."""
    records = StepRecords(run_dir / BATCHES_FOLDER)
    found = [records.read(step) for step in records.steps() if step > after]
    return [record for record in found if record is not None]
