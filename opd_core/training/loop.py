"""The train loop: collect → update → sync weights → evaluate → save.

It sees its organs through protocols, so the same loop runs in one process and on Ray.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from opd_core.agent_loop.collect import Collector
from opd_core.agent_loop.evaluation import Evaluation
from opd_core.agent_loop.loop import AgentLoop
from opd_core.agent_loop.survivors import Survivors
from opd_core.config import ExperimentConfig
from opd_core.errors import SurvivorError
from opd_core.rollout import Group, RolloutState
from opd_core.training.batch import TrainBatch, build_batch

Metrics = dict[str, float]

logger = logging.getLogger(__name__)


class LearnerHandle(Protocol):
    """All ranks of the learner behind one name."""

    async def update(self, batch: TrainBatch) -> Metrics: ...
    async def weights(self) -> Any:
        """The weights, in the form that :meth:`SamplerHandle.load_weights` takes."""

    async def save(self, path: Path) -> Path: ...


class SamplerHandle(Protocol):
    """The part of a sampling engine that the loop itself uses."""

    async def load_weights(self, weights: Any, policy_version: int) -> None: ...


@dataclass(slots=True)
class TrainOutcome:
    """What a finished loop knows."""

    survivors: Survivors
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    steps: list[Metrics] = field(default_factory=list)
    student_path: str = ""


@dataclass(frozen=True, slots=True)
class TrainLoop:
    """The loop's organs. ``evaluate`` is None without held-out data; ``record`` takes
    ``(train_step, metrics)``; train steps are counted from 1, 0 is before the first."""

    config: ExperimentConfig
    collector: Collector
    agent_loop: AgentLoop
    learner: LearnerHandle
    sampler: SamplerHandle
    sources: tuple[str, ...]
    run_dir: Path
    record: Callable[[int, Metrics], None]
    evaluate: Callable[[], Awaitable[Evaluation]] | None = None

    async def run(self) -> TrainOutcome:
        """Train for ``training.steps``; the student is saved at the end under ``student/``."""
        outcome = TrainOutcome(self.collector.survivors)
        await self._evaluate(0, outcome)
        for train_step in range(1, self.config.training.steps + 1):
            metrics = await self._train_step(train_step, outcome)
            outcome.steps.append(metrics)
            self.record(train_step, metrics)
            await self._after_step(train_step, outcome)
        outcome.student_path = str(await self.learner.save(self.run_dir / "student"))
        return outcome

    async def _train_step(self, train_step: int, outcome: TrainOutcome) -> Metrics:
        started = time.perf_counter()
        sampled_before = self.agent_loop.sampling_s
        try:
            groups, survivors = await self.collector.collect(train_step)
        except SurvivorError as error:
            self.record(train_step, {name: float(n) for name, n in error.counts.items()})
            raise
        collected = time.perf_counter()
        metrics = await self.learner.update(self._batch(groups))
        if not metrics["optimizer_steps"]:
            logger.warning("train step %d: no valid token, so no optimizer step", train_step)
        updated = time.perf_counter()
        await self.sampler.load_weights(await self.learner.weights(), train_step)
        synced = time.perf_counter()
        sampling_s = self.agent_loop.sampling_s - sampled_before
        shares = {
            "sampling": sampling_s,
            "scoring": collected - started - sampling_s,  # what sampling did not hide
            "training": updated - collected,
            "weight_sync": synced - updated,
        }
        total = max(synced - started, 1e-9)
        return {
            **metrics,
            **rollout_metrics([r for group in groups for r in group.rollouts]),
            **survivors.as_metrics(),
            "data/epoch": self.collector.epoch,
            **{f"time/{name}_s": seconds for name, seconds in shares.items()},
            **{f"time/{name}_share": seconds / total for name, seconds in shares.items()},
            "time/step_s": total,
            "rollout/tokens_per_s": metrics["response_tokens"] / total,
        }

    def _batch(self, groups: Sequence[Group]) -> TrainBatch:
        config = self.config
        return build_batch(
            groups,
            sources=self.sources,
            scored=config.opd is not None,
            use_rewards=config.task_adv_weight > 0,
            use_baseline=config.opd is not None and config.opd.kl_baseline,
            mini_batches=config.training.optimizer_steps_per_batch,
        )

    async def _after_step(self, train_step: int, outcome: TrainOutcome) -> None:
        training, every = self.config.training, self.config.evaluation.every
        last = train_step == training.steps
        if last or (every and train_step % every == 0):
            await self._evaluate(train_step, outcome)
        if training.checkpoint_every and train_step % training.checkpoint_every == 0 and not last:
            checkpoints = self.run_dir / "checkpoints"
            checkpoints.mkdir(exist_ok=True)
            await self.learner.save(checkpoints / f"step-{train_step:06d}")
            prune_checkpoints(checkpoints, training.keep_checkpoints)

    async def _evaluate(self, train_step: int, outcome: TrainOutcome) -> None:
        if self.evaluate is None:
            return
        started = time.perf_counter()
        evaluation = await self.evaluate()
        outcome.evaluations[train_step] = evaluation
        seconds = time.perf_counter() - started
        self.record(train_step, evaluation.metrics() | {"time/evaluation_s": seconds})


def rollout_metrics(rollouts: Sequence[RolloutState]) -> Metrics:
    """Means over the rollouts that train: length, truncation, reward, teacher latency."""
    count = max(len(rollouts), 1)
    metrics = {
        "rollout/response_tokens_mean": sum(len(r.response_ids) for r in rollouts) / count,
        "rollout/truncated_fraction": sum(r.truncated for r in rollouts) / count,
    }
    rewards = [r.reward for r in rollouts if r.reward is not None]
    if rewards:
        metrics["rollout/reward_mean"] = sum(rewards) / len(rewards)
    scored = [r for r in rollouts if r.teacher_attempts]
    if scored:
        metrics |= {
            "teacher/latency_s_mean": sum(r.teacher_latency_s for r in scored) / len(scored),
            "teacher/latency_s_max": max(r.teacher_latency_s for r in scored),
            "teacher/queue_s_mean": sum(r.teacher_queue_s for r in scored) / len(scored),
            "teacher/attempts_mean": sum(r.teacher_attempts for r in scored) / len(scored),
        }
    told = [r for r in scored if r.teacher_cached_tokens is not None]
    if told:
        tokens = sum(len(r.prompt.token_ids) + len(r.response_ids) for r in told)
        cached = sum(r.teacher_cached_tokens or 0 for r in told)
        metrics["teacher/cached_fraction"] = cached / tokens
    return metrics


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest ``step-*`` directories."""
    for old in sorted(folder.glob("step-" + "[0-9]" * 6))[:-keep]:
        shutil.rmtree(old)
