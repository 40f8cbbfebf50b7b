"""Puts a train loop together from a configuration and its two engines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from opd_core.agent_loop.collect import Collector
from opd_core.agent_loop.evaluation import Evaluation, evaluate
from opd_core.agent_loop.judging import JudgeRunner, import_function
from opd_core.agent_loop.loop import AgentLoop, LoopSettings
from opd_core.agent_loop.prompts import PromptQueue
from opd_core.agent_loop.replay_buffer import ReplayBuffer
from opd_core.config import ExperimentConfig
from opd_core.data import load_prompts
from opd_core.rollout import Prompt
from opd_core.sampling.protocol import Sampler
from opd_core.scoring.client import TeacherFacts
from opd_core.scoring.routing import TeacherRouter
from opd_core.tracking.journal import Journal
from opd_core.training.driver import JOURNAL_FILE, TEACHERS_FILE
from opd_core.training.loop import LearnerHandle, SamplerHandle, TrainLoop
from opd_core.training.models import load_tokenizer


class StudentSampler(Sampler, SamplerHandle, Protocol):
    """An engine that samples and takes weights."""


@dataclass(frozen=True, slots=True)
class _Evaluator:
    prompts: Sequence[Prompt]
    sampler: Sampler
    judge: JudgeRunner
    decode: Any
    settings: LoopSettings

    async def __call__(self) -> Evaluation:
        return await evaluate(
            self.prompts,
            sampler=self.sampler,
            judge=self.judge,
            decode=self.decode,
            settings=self.settings,
        )


async def build_loop(
    config: ExperimentConfig,
    run_dir: Path,
    sampler: StudentSampler,
    learner: LearnerHandle,
    exits: AsyncExitStack,
    environ: Mapping[str, str],
) -> tuple[TrainLoop, dict[str, int]]:
    """The loop, and the counts of prompts read and left out. What must be closed is put on
    ``exits``. Teacher keys are taken from ``environ``."""
    tokenizer = load_tokenizer(config.student.model)
    data = load_prompts(config.data.train, tokenizer, config.data.max_prompt_tokens)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    task = config.task
    judge = exits.enter_context(JudgeRunner(task.judge)) if task.judge else None
    batch_judge = exits.enter_context(JudgeRunner(task.batch_judge)) if task.batch_judge else None
    loop = AgentLoop(
        LoopSettings(task.group_size, config.sampling.max_new_tokens, config.seed),
        sampler=sampler,
        decode=decode,
        scorer=await _teachers(config, run_dir, exits, environ),
        judge=judge,
        batch_judge=batch_judge,
        filter_func=import_function(task.filter_func) if task.filter_func else None,
    )
    collector = Collector(
        PromptQueue(data.prompts, seed=config.seed, max_requeue=task.max_requeue),
        loop,
        ReplayBuffer(needs_scores=config.opd is not None, needs_rewards=config.task_adv_weight > 0),
        groups_per_step=config.training.prompts_per_step,
        limit=config.groups_per_step_limit,
    )
    counts = {"read": data.rows, "too_long": data.too_long}
    return TrainLoop(
        config=config,
        collector=collector,
        agent_loop=loop,
        learner=learner,
        sampler=sampler,
        sources=tuple(sorted({prompt.data_source for prompt in data.prompts})),
        run_dir=run_dir,
        record=Journal(run_dir / JOURNAL_FILE).append,
        evaluate=_evaluator(config, sampler, judge, decode, tokenizer),
    ), counts


async def _teachers(
    config: ExperimentConfig, run_dir: Path, exits: AsyncExitStack, environ: Mapping[str, str]
) -> TeacherRouter | None:
    if config.opd is None:
        return None
    told = json.loads((run_dir / TEACHERS_FILE).read_text(encoding="utf-8"))
    facts = {name: TeacherFacts(**fact) for name, fact in told.items()}
    keys = {
        teacher.name: environ[teacher.key_variable]
        for teacher in config.opd.teachers
        if teacher.key_variable in environ
    }
    return await exits.enter_async_context(TeacherRouter.connect(config.opd, facts, keys))


def _evaluator(
    config: ExperimentConfig,
    sampler: Sampler,
    judge: JudgeRunner | None,
    decode: Any,
    tokenizer: Any,
) -> _Evaluator | None:
    if config.data.evaluation is None or judge is None:
        return None
    held_out = load_prompts(
        config.data.evaluation,
        tokenizer,
        config.data.max_prompt_tokens,
        config.data.evaluation_rows,
    )
    settings = LoopSettings(
        config.evaluation.samples,
        config.sampling.max_new_tokens,
        config.seed,
        config.evaluation.temperature,
    )
    return _Evaluator(held_out.prompts, sampler, judge, decode, settings)
