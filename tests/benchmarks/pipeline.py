"""How much of a teacher's time a train step hides behind sampling and training.

The run's own loop, collector and scoring client, with a student that only takes time and a serial
teacher behind HTTP, which scores a whole batch in 0.5, 1 and 2 times the time of sampling it.
Serial: sample all, then score all, then train. Bounds of a step: synchronous, sampling (or scoring,
if that takes longer), the last score and training; with stale rollouts sampling and training, or
scoring, whichever takes longer.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from opd_core.agent_loop.collect import Collector
from opd_core.agent_loop.loop import AgentLoop, LoopSettings
from opd_core.agent_loop.prompts import PromptQueue
from opd_core.agent_loop.replay_buffer import ReplayBuffer
from opd_core.config import ExperimentConfig
from opd_core.rollout import Prompt
from opd_core.scoring.facts import TeacherFacts
from opd_core.scoring.routing import TeacherRouter
from opd_core.tracking.journal import JournalReader
from opd_core.training.checkpoint_folder import CheckpointFolder
from opd_core.training.files import BATCHES_FOLDER, JOURNAL_FILE
from opd_core.training.loop import TrainLoop
from opd_core.training.step_log import StepLog
from opd_core.training.step_records import StepRecords
from tests.benchmarks.scoring import fixed_latency_server
from tests.benchmarks.simulated import LONGEST, SHORTEST, SimulatedLearner, SimulatedSampler

GROUPS, ROWS = 64, 16
SAMPLING_S, TRAINING_S = 1.0, 0.5
TOKEN_S = SAMPLING_S * ROWS / GROUPS / statistics.fmean((SHORTEST, LONGEST))
SCORING = (0.5, 1.0, 2.0)
"""Of sampling."""
STEPS, FIRST, LAST = 12, 3, 9
"""All steps, and those after ``FIRST`` up to ``LAST`` that count: the pipeline is filled before,
and emptied after."""
STALENESS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Measured:
    """Means over the steps that count."""

    step_s: float
    sampling_s: float


def run() -> Iterator[str]:
    """A table: seconds a step, and their ratio to the bound."""
    yield (
        f"{GROUPS} rollouts a step, {ROWS} at once: sampling about {SAMPLING_S:g} s, training "
        f"{TRAINING_S:g} s; seconds a step (ratio to its bound)"
    )
    yield "| scoring | serial | synchronous | max_staleness 1 | max_staleness 2 | serial / these |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for ratio in SCORING:
        scoring_s = ratio * SAMPLING_S
        with fixed_latency_server(scoring_s / GROUPS, serial=True) as endpoint:
            serial = measure(endpoint, 0, serial=True)
            by_staleness = [measure(endpoint, staleness) for staleness in STALENESS]
        sampling_s = by_staleness[0].sampling_s
        synchronous = max(sampling_s, scoring_s) + scoring_s / GROUPS + TRAINING_S
        pipelined = max(sampling_s + TRAINING_S, scoring_s)
        bounds = [synchronous, *[pipelined] * (len(STALENESS) - 1)]
        cells = [
            f"{one.step_s:.3f} ({one.step_s / bound:.2f})"
            for one, bound in zip(by_staleness, bounds, strict=True)
        ]
        gains = ", ".join(f"{serial.step_s / one.step_s:.2f}" for one in by_staleness)
        yield f"| {scoring_s:g} s | {serial.step_s:.3f} | {' | '.join(cells)} | {gains} |"


def measure(endpoint: str, max_staleness: int, *, serial: bool = False) -> Measured:
    """Train ``STEPS`` steps."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_train(endpoint, max_staleness, Path(folder), serial=serial))
        records = {record.train_step: record for record in JournalReader(_journal(folder)).read()}
    counted = [records[step] for step in range(FIRST + 1, LAST + 1)]
    return Measured(
        (records[LAST].time_s - records[FIRST].time_s) / len(counted),
        statistics.fmean(record.metrics["time/sampling_s"] for record in counted),
    )


async def _train(endpoint: str, max_staleness: int, folder: Path, *, serial: bool) -> None:
    config = _config(endpoint, max_staleness)
    assert config.opd is not None
    sampler, learner = SimulatedSampler(ROWS, TOKEN_S), SimulatedLearner(TRAINING_S)
    async with AsyncExitStack() as exits:
        teachers = await exits.enter_async_context(
            TeacherRouter.connect(config.opd, {"teacher": TeacherFacts(32)}, {})
        )
        loop = AgentLoop(
            LoopSettings(1, LONGEST + 1, config.seed, max_staleness=max_staleness),
            sampler=sampler,
            decode=lambda ids: "",
            scorer=teachers,
            in_order=serial,
        )
        prompts = [Prompt(row, "sums", (2, 4, 5, 3)) for row in range(GROUPS)]
        collector = Collector(
            PromptQueue(prompts, seed=config.seed, max_requeue=0),
            loop,
            ReplayBuffer(needs_scores=True, needs_rewards=False),
            groups_per_step=GROUPS,
            limit=config.groups_per_step_limit,
            max_staleness=max_staleness,
            teachers=teachers,
        )
        exits.push_async_callback(collector.aclose)
        await TrainLoop(
            config=config,
            collector=collector,
            agent_loop=loop,
            learner=learner,
            sampler=sampler,
            sources=("sums",),
            prompts="",
            run_dir=folder,
            log=exits.enter_context(StepLog(_journal(folder))),
            records=StepRecords(folder / BATCHES_FOLDER),
            checkpoints=CheckpointFolder(folder / "checkpoints", keep=1, keep_every=0),
        ).run()


def _journal(folder: Path | str) -> Path:
    return Path(folder) / JOURNAL_FILE


def _config(endpoint: str, max_staleness: int) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "name": "pipeline",
            "student": {"model": "none"},
            "data": {"train": "none"},
            "sampling": {"max_new_tokens": LONGEST + 1, "max_staleness": max_staleness},
            "opd": {
                "teachers": [
                    {
                        "name": "teacher",
                        "backend": "embedded",
                        "endpoint": endpoint,
                        "adaptive": False,
                        "canary_every": 0,
                    }
                ],
                "default_teacher": "teacher",
            },
            "training": {
                "steps": STEPS,
                "prompts_per_step": GROUPS,
                "learning_rate": 1e-3,
                "checkpoint_every": 0,
            },
        }
    )
