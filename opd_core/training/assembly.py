"""Puts a train loop together from a configuration and its two engines."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from opd_core.agent_loop.collect import Collector
from opd_core.agent_loop.evaluation import Evaluation, evaluate
from opd_core.agent_loop.functions import import_function
from opd_core.agent_loop.judging import JudgeRunner
from opd_core.agent_loop.loop import AgentLoop, LoopSettings
from opd_core.agent_loop.parking import ParkingLot
from opd_core.agent_loop.prompts import PromptQueue
from opd_core.agent_loop.replay_buffer import ReplayBuffer
from opd_core.agent_loop.tools import ToolRunner, stop_ids_of
from opd_core.agent_loop.turns import Turns
from opd_core.config import ExperimentConfig, OPDTeacherConfig
from opd_core.data import load_prompts
from opd_core.errors import TrainingError
from opd_core.rollout import Group, Prompt, Status
from opd_core.sampling.protocol import Sampler
from opd_core.scoring.facts import read_facts
from opd_core.scoring.routing import TeacherRouter
from opd_core.scoring.state import ScoringState, state_to_json
from opd_core.scoring.store import ScoreStore
from opd_core.training.checkpoint_folder import CheckpointFolder
from opd_core.training.files import (
    BATCHES_FOLDER,
    CHECKPOINTS_FOLDER,
    JOURNAL_FILE,
    PARKED_FOLDER,
    SCORING_FILE,
    TEACHERS_FILE,
    TOKEN_KL_FOLDER,
)
from opd_core.training.kl_sums import TokenKLWriter
from opd_core.training.loop import TrainLoop
from opd_core.training.models import end_ids_at, load_tokenizer
from opd_core.training.organs import LearnerHandle, SamplerHandle, Sleeper
from opd_core.training.step_log import StepLog
from opd_core.training.step_records import StepRecords
from opd_core.training.system_metrics import SystemMetrics
from opd_core.training.vocabulary import Vocabulary
from opd_core.whole_file import write_whole

logger = logging.getLogger(__name__)


class StudentSampler(Sampler, SamplerHandle, Protocol):
    """An engine that samples and takes weights."""


async def build_loop(
    config: ExperimentConfig,
    run_dir: Path,
    sampler: StudentSampler,
    learner: LearnerHandle,
    exits: AsyncExitStack,
    environ: Mapping[str, str],
    sleeper: Sleeper | None = None,
) -> tuple[TrainLoop, dict[str, int]]:
    """The loop, and the counts of prompts read and left out. What must be closed is put on
    ``exits``; ``sleeper`` is the sampler where it shares its device with training. Teacher keys
    are taken from ``environ``; raises :class:`TrainingError` for one that is not there."""
    tokenizer = load_tokenizer(config.student.model)
    data = load_prompts(config.data.train, tokenizer, config.data.max_prompt_tokens)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    task = config.task
    judge, batch_judge = (
        exits.enter_context(JudgeRunner(path, task.judge_timeout_s)) if path else None
        for path in (task.judge, task.batch_judge)
    )
    turns = turns_of(config, tokenizer, exits, decode)
    sampling = config.sampling
    parking = ParkingLot(run_dir / PARKED_FOLDER)
    teachers = await _teachers(config, run_dir, parking, exits, environ)
    loop = AgentLoop(
        LoopSettings(
            task.group_size,
            sampling.max_new_tokens,
            config.seed,
            sampling.temperature,
            sampling.max_staleness,
            config.training.truncated,
        ),
        sampler=sampler,
        decode=decode,
        scorer=teachers,
        judge=judge,
        batch_judge=batch_judge,
        filter_func=import_function(task.filter_func) if task.filter_func else None,
        turns=turns,
        in_order=config.deterministic,
    )
    collector = Collector(
        PromptQueue(data.prompts, seed=config.seed, max_requeue=task.max_requeue),
        loop,
        ReplayBuffer(
            needs_scores=config.opd is not None,
            needs_rewards=config.task_adv_weight > 0,
            truncated=config.training.truncated,
        ),
        groups_per_step=config.training.prompts_per_step,
        limit=config.groups_per_step_limit,
        max_staleness=sampling.max_staleness,
        over_sampling=sampling.over_sampling,
        teachers=teachers,
        on_group=_tell_lost,
    )
    exits.push_async_callback(collector.aclose)
    if config.deterministic:
        # Who was parked depends on when the teacher went away; a step sampled anew does not.
        shutil.rmtree(run_dir / PARKED_FOLDER, ignore_errors=True)
    else:
        collector.restore_parked(parking)
    training = config.training
    counts = {"read": data.rows, "too_long": data.too_long}
    return TrainLoop(
        config=config,
        collector=collector,
        agent_loop=loop,
        learner=learner,
        sampler=sampler,
        sources=tuple(sorted({prompt.data_source for prompt in data.prompts})),
        prompts=_hash_of(data.prompts),
        run_dir=run_dir,
        log=exits.enter_context(StepLog(run_dir / JOURNAL_FILE)),
        records=StepRecords(run_dir / BATCHES_FOLDER),
        checkpoints=CheckpointFolder(
            run_dir / CHECKPOINTS_FOLDER,
            keep=training.keep_checkpoints,
            keep_every=training.keep_every,
        ),
        evaluate=evaluator(
            config, tokenizer, judge, batch_judge, sampler=sampler, decode=decode, turns=turns
        ),
        sleeper=sleeper,
        token_kl=_token_kl(config, run_dir, tokenizer),
        system=exits.enter_context(SystemMetrics(run_dir))
        if config.tracking.system_metrics
        else None,
    ), counts


def turns_of(
    config: ExperimentConfig,
    tokenizer: Any,
    exits: AsyncExitStack,
    decode: Callable[[Sequence[int]], str],
) -> Turns | None:
    task = config.task
    if task.tool is None:
        return None

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    return Turns(
        exits.enter_context(ToolRunner(task.tool, task.judge_timeout_s)),
        stop_ids_of(task.tool_stop, tokenizer, end_ids_at(config.student.model, tokenizer)),
        encode,
        decode,
        task.max_turns,
    )


def _token_kl(config: ExperimentConfig, run_dir: Path, tokenizer: Any) -> TokenKLWriter | None:
    if config.opd is None:
        return None
    vocabulary = Vocabulary(tokenizer, end_ids_at(config.student.model, tokenizer))
    return TokenKLWriter(run_dir / TOKEN_KL_FOLDER, vocabulary, config)


def _hash_of(prompts: Sequence[Prompt]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        found.update(repr((prompt.row, prompt.data_source, prompt.token_ids)).encode())
    return found.hexdigest()


def _tell_lost(group: Group) -> None:
    """One line in the job's log for every group that was lost, with its reason."""
    if group.status in (Status.FAILED, Status.ABORTED, Status.EXPIRED):
        logger.warning(
            "group %d (data row %d) is %s: %s: %s",
            group.group_id,
            group.prompt.row,
            group.status.value,
            group.cause,
            group.error_msg,
        )


async def _teachers(
    config: ExperimentConfig,
    run_dir: Path,
    parking: ParkingLot,
    exits: AsyncExitStack,
    environ: Mapping[str, str],
) -> TeacherRouter | None:
    if config.opd is None:
        return None
    opd, place = config.opd, run_dir / TEACHERS_FILE
    facts = read_facts(place)
    keys = {t.name: _key(t, environ) for t in opd.teachers if t.api_key is not None}
    stores = {}
    for teacher in opd.teachers if opd.score_store else ():
        folder, fingerprint = Path(str(opd.score_store)), facts[teacher.name].fingerprint
        stores[teacher.name] = exits.enter_context(ScoreStore(folder, fingerprint))

    def publish(states: dict[str, ScoringState]) -> None:
        try:
            write_whole(run_dir / SCORING_FILE, state_to_json(states))
        except OSError as error:  # costs the flow's sight, not the run
            logger.warning("%s cannot be written: %s", SCORING_FILE, error)

    router = TeacherRouter.connect(
        opd,
        facts,
        keys,
        current_facts=lambda name: read_facts(place)[name],
        parking=parking,
        stores=stores,
        publish=publish,
    )
    return await exits.enter_async_context(router)


def _key(teacher: OPDTeacherConfig, environ: Mapping[str, str]) -> str:
    """The teacher's key: handed down by the flow, or in the variable that its reference names (on a
    cluster that the run did not start, where nothing is handed down)."""
    assert teacher.api_key is not None
    named = teacher.api_key.get_secret_value().removeprefix("env:")
    for variable in (teacher.key_variable, named):
        if environ.get(variable):
            return environ[variable]
    raise TrainingError(
        f"teacher {teacher.name!r}: its key is in none of {teacher.key_variable}, {named} in the "
        "environment of the student's job; export one of them where the Ray cluster was started"
    )


def evaluator(
    config: ExperimentConfig,
    tokenizer: Any,
    judge: JudgeRunner | None,
    batch_judge: JudgeRunner | None,
    **organs: Any,
) -> Callable[[], Awaitable[Evaluation]] | None:
    if config.data.evaluation is None or not config.task.judged:
        return None
    longest, rows = config.data.max_prompt_tokens, config.data.evaluation_rows
    held_out = load_prompts(config.data.evaluation, tokenizer, longest, rows)
    settings = LoopSettings(
        config.evaluation.samples,
        config.sampling.max_new_tokens,
        config.seed,
        config.evaluation.temperature,
    )
    return partial(
        evaluate,
        held_out.prompts,
        judge=judge,
        batch_judge=batch_judge,
        settings=settings,
        pass_at=config.evaluation.pass_at,
        **organs,
    )
