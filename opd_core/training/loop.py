"""The train loop: collect → record → update → sync weights → evaluate → save.

It sees its organs through protocols, so the same loop runs in one process and on Ray. It goes on
from whatever its run directory holds: the newest checkpoint, then the recorded batches after it,
which are trained again without sampling or scoring, then new ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd_core.agent_loop.collect import Collector
from opd_core.agent_loop.evaluation import Evaluation
from opd_core.agent_loop.loop import AgentLoop
from opd_core.config import ExperimentConfig
from opd_core.errors import ActorLost, SurvivorError, TrainingError
from opd_core.rollout_json import refused_as
from opd_core.training.batch import TrainBatch, build_batch
from opd_core.training.checkpoint_folder import Checkpoint, CheckpointFolder
from opd_core.training.evaluation_records import write_evaluation
from opd_core.training.files import EVALUATIONS_FOLDER
from opd_core.training.kl_sums import TokenKLWriter
from opd_core.training.organs import LearnerHandle, SamplerHandle, Sleeper
from opd_core.training.phase import tell_phase
from opd_core.training.questions import evaluation_record
from opd_core.training.rollout_metrics import rollout_metrics
from opd_core.training.step_costs import cost_metrics, time_metrics
from opd_core.training.step_files import path_of
from opd_core.training.step_log import EVALUATED, TRAINED, StepLog
from opd_core.training.step_records import StepRecord, StepRecords
from opd_core.training.stopping import reached
from opd_core.training.system_metrics import SystemMetrics

Metrics = dict[str, float]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainOutcome:
    """What a finished loop knows. ``stopped`` says which target ended it early."""

    student_path: str
    stopped: str = ""


@dataclass(slots=True)
class TrainLoop:
    """The loop's organs. ``evaluate`` is None without held-out data, ``token_kl`` without teachers;
    ``prompts`` is a hash of the data. Train steps are counted from 1, 0 is before the first."""

    config: ExperimentConfig
    collector: Collector
    agent_loop: AgentLoop
    learner: LearnerHandle
    sampler: SamplerHandle
    sources: tuple[str, ...]
    prompts: str
    run_dir: Path
    log: StepLog
    records: StepRecords
    checkpoints: CheckpointFolder
    evaluate: Callable[[], Awaitable[Evaluation]] | None = None
    sleeper: Sleeper | None = None
    token_kl: TokenKLWriter | None = None
    system: SystemMetrics | None = None
    writing: tuple[Checkpoint, Mapping[str, Any]] | None = None
    """The checkpoint that is being written, and the loop's state when it was begun."""

    async def run(self) -> TrainOutcome:
        """Train to ``training.steps`` or to the target; the student is then under ``student/``.

        Raises :class:`TrainingError` and its kinds.
        """
        train_step = await self._take_up()
        if train_step == 0 and self.config.sampling.by_servers:
            await self._sync(0)  # what a server has loaded by itself is not to be trusted
        if train_step == 0 or self._evaluation_due(train_step):
            await self._evaluate(train_step)
        stopped = self._reached(train_step)
        while train_step < self.config.training.steps and not stopped:
            train_step += 1
            await self._train_step(train_step)
            last = train_step == self.config.training.steps
            if last:
                await self.collector.aclose()
            if self._evaluation_due(train_step):
                await self._evaluate(train_step)
            stopped = self._reached(train_step)
            await self._checkpoint_if_due(train_step, last or bool(stopped))
        if stopped:
            logger.warning("stopped after train step %d: %s", train_step, stopped)
            await self.collector.aclose()
            await self._sync(train_step)
            await self._evaluate(train_step)
        await self._finish_checkpoint()
        path = await self.learner.save(self.run_dir / "student")
        return TrainOutcome(str(path), stopped)

    async def _take_up(self) -> int:
        """Go to where the newest checkpoint is; the train step that it was made after."""
        self.checkpoints.clean()
        newest = self.checkpoints.newest()
        if newest is None:
            return 0
        logger.warning("going on from %s", newest.path)
        await self.learner.restore(newest.state)
        facts = self.checkpoints.facts(newest)
        if facts["data"] == self._data():
            with refused_as(str(newest.path)):
                self.collector.restore(facts["loop"])
        else:  # only a fork gets here
            logger.warning("other data, or another seed: prompts are asked from the beginning")
        await self._sync(newest.train_step)
        return newest.train_step

    async def _train_step(self, train_step: int) -> None:
        started, sampled_before = time.perf_counter(), self.agent_loop.sampling.seconds
        tell_phase(self.run_dir, "sampling", train_step)
        try:
            record = await self._batch_of(train_step)
        finally:  # the write has had the whole collection's time
            await self._finish_checkpoint()
        collected = time.perf_counter()
        sampling_s = self.agent_loop.sampling.seconds - sampled_before
        tell_phase(self.run_dir, "training", train_step)
        # Written beside the update: of that nothing is on disk before the batch is.
        recording = asyncio.create_task(asyncio.to_thread(self._record, record))
        try:
            if self.sleeper is not None:
                await self.sleeper.sleep()
            metrics = await self._update(record)
            if self.sleeper is not None:
                await self.sleeper.wake()
        finally:
            trained = time.perf_counter()
            recorded = await recording
        self.log.tracking_s += time.perf_counter() - max(trained, recorded)
        if not metrics["optimizer_steps"]:
            logger.warning("train step %d: no valid token, so no optimizer step", train_step)
        updated = time.perf_counter()
        # Where batches are recorded the next step needs no sampler, unless this one is evaluated.
        if not self.records.path_of(train_step + 1).exists() or self._evaluation_due(train_step):
            await self._sync(train_step)
        synced = time.perf_counter()
        seconds = {
            "sampling": sampling_s,  # within the wait for the batch
            # What sampling did not hide of scoring, judging and tools.
            "scoring": collected - started - sampling_s,
            "training": updated - collected,
            "weight_sync": synced - updated,
            # Not a part of the step: what came between this record and the one before counts too.
            "tracking": self.log.take_tracking_s(),
        }
        self._tell(record, metrics, seconds, synced - started)

    def _tell(
        self, record: StepRecord, metrics: Metrics, seconds: Mapping[str, float], step_s: float
    ) -> None:
        train_step = record.train_step
        rollouts = [rollout for group in record.groups for rollout in group.rollouts]
        bias_z = self.collector.survivors.bias_z
        told = {
            **metrics,
            **rollout_metrics(rollouts),
            **record.survivors.as_metrics(),
            **({} if bias_z is None else {"survivors/bias_z": bias_z}),
            "data/epoch": self.collector.epoch,
            "sampling/groups_ahead": self.collector.ahead,
            "sampling/replaced": self.sampler.replaced,
            **time_metrics(seconds, step_s),
            TRAINED: step_s,
            "rollout/tokens_per_s": metrics["response_tokens"] / max(step_s, 1e-9),
            **cost_metrics(self.config, rollouts, step_s, self.log.of_training(train_step - 1)),
            **(self.system.take() if self.system is not None else {}),
        }
        self.log.record(train_step, told, TRAINED)

    async def _batch_of(self, train_step: int) -> StepRecord:
        """The step's batch: the recorded one, else a new one."""
        record = self.records.read(train_step)
        if record is not None:
            with refused_as(str(self.records.path_of(train_step))):
                self.collector.restore(record.state)
            return record
        if self.log.has(train_step, TRAINED):
            raise TrainingError(
                f"train step {train_step} was trained before, and its batch is neither in "
                f"{self.records.path_of(train_step).parent} nor in a checkpoint: what it came to "
                "is lost; put the files back that were moved away, or begin a new run"
            )
        try:
            further = self.config.training.steps - train_step
            groups, survivors = await self.collector.collect(train_step, further)
        except SurvivorError as error:
            counts = {name: float(n) for name, n in error.counts.items()}
            self.log.record(train_step, counts, next(iter(counts), ""))
            raise
        return StepRecord(train_step, tuple(groups), survivors, self.collector.state())

    def _record(self, record: StepRecord) -> float:
        """Write the batch, then what is only looked at; when the batch was on the disk."""
        if not self.records.path_of(record.train_step).exists():
            self.records.write(record)
        recorded = time.perf_counter()
        if self.token_kl is not None:
            self.token_kl.write(record)
        return recorded

    async def _update(self, record: StepRecord) -> Metrics:
        try:
            return await self.learner.update(self._batch(record))
        except ActorLost:
            raise
        except TrainingError as error:
            where = self.records.path_of(record.train_step)
            raise TrainingError(
                f"train step {record.train_step}: {error}. Its batch is kept in {where}; a resume "
                "would train on it again with the same settings, opd run --fork begins from the "
                "newest checkpoint with others"
            ) from None

    def _batch(self, record: StepRecord) -> TrainBatch:
        config = self.config
        step, every = record.train_step, config.training.teacher_gradient_every
        return build_batch(
            record.groups,
            policy_version=record.train_step - 1,
            truncated=config.training.truncated,
            sources=self.sources,
            scored=config.opd is not None,
            use_rewards=config.task_adv_weight > 0,
            use_baseline=config.opd is not None and config.opd.kl_baseline,
            mini_batches=config.training.optimizer_steps_per_batch,
            measure_teacher=every > 0 and (step == 1 or step % every == 0),
        )

    def _data(self) -> dict[str, Any]:
        """What the place in the data is a place in."""
        return {"seed": self.config.seed, "prompts": self.prompts}

    async def _sync(self, train_step: int) -> None:
        tell_phase(self.run_dir, "weight sync", train_step)
        await self.sampler.sync(self.learner, train_step)

    def _evaluation_due(self, train_step: int) -> bool:
        every = self.config.evaluation.every
        last = train_step == self.config.training.steps
        return last or bool(every and train_step % every == 0)

    async def _evaluate(self, train_step: int) -> None:
        if self.evaluate is None or self.log.has(train_step, EVALUATED):
            return
        tell_phase(self.run_dir, "evaluation", train_step)
        started = time.perf_counter()
        evaluation = await self.evaluate()
        seconds = time.perf_counter() - started
        kept = evaluation_record(evaluation, train_step, self.config)
        with self.log.tracking():
            write_evaluation(path_of(self.run_dir / EVALUATIONS_FOLDER, train_step), kept)
        self.log.record(train_step, evaluation.metrics() | {EVALUATED: seconds}, EVALUATED)

    def _reached(self, train_step: int) -> str:
        return reached(self.log.of_step(train_step), self.config.training.stop_when)

    async def _checkpoint_if_due(self, train_step: int, last: bool) -> None:
        every = self.config.training.checkpoint_every
        if not every or not (last or train_step % every == 0):
            return
        tell_phase(self.run_dir, "checkpoint", train_step)
        checkpoint = self.checkpoints.begin(train_step)
        self.writing = checkpoint, {"data": self._data(), "loop": self.collector.state()}
        await self.learner.start_checkpoint(checkpoint.state)
        if self.config.training.export_checkpoints and not last:
            await self.learner.save(checkpoint.student)

    async def _finish_checkpoint(self) -> None:
        """Commit the checkpoint that was begun, once it is written; the recorded batches that no
        kept checkpoint needs any more are removed."""
        if self.writing is None:
            return
        await self.learner.finish_checkpoint()
        writing, self.writing = self.writing, None
        await asyncio.to_thread(self.checkpoints.commit, *writing)
        if (oldest := self.checkpoints.oldest_kept()) is not None:
            self.records.prune(oldest)
