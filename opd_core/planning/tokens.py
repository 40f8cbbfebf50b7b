"""The tokens of a train step, at most, and what they mean for the teachers."""

from __future__ import annotations

from dataclasses import dataclass

from opd_core.config import ExperimentConfig
from opd_core.planning.serving import LMDEPLOY_PREFILL, SGLANG_PREFILL
from opd_core.planning.training import forward_tokens
from opd_core.serving.servers import teacher_servers


@dataclass(frozen=True, slots=True)
class Tokens:
    """Most tokens of one train step; a rollout's are those of its prompt and its response."""

    rollouts: int
    rollout: int
    step: int
    response: int
    run: int
    micro_batch: int
    micro_batches: int
    """Of each training actor."""
    teachers: tuple[TeacherTokens, ...]


@dataclass(frozen=True, slots=True)
class TeacherTokens:
    """What scoring the longest batch asks of a teacher, were it the only one. ``chunks`` are the
    prefill passes of a rollout, None where its servers do not cut it or are external; ``at_once``
    the rollouts that are scored at a time."""

    name: str
    chunk: int | None
    chunks: int | None
    at_once: int


def count_tokens(config: ExperimentConfig) -> Tokens:
    """Every rollout as long as it may be."""
    training, rollout = config.training, config.rollout_tokens
    rollouts = training.prompts_per_step * config.task.group_size
    step, forward = rollouts * rollout, forward_tokens(config)
    together = max(1, forward // rollout)
    return Tokens(
        rollouts=rollouts,
        rollout=rollout,
        step=step,
        response=rollouts * config.sampling.max_new_tokens,
        run=step * training.steps,
        micro_batch=forward,
        micro_batches=-(-rollouts // (together * training.actors)),
        teachers=tuple(_teachers(config, rollout)),
    )


def _teachers(config: ExperimentConfig, rollout: int) -> list[TeacherTokens]:
    found = []
    for teacher in config.opd.teachers if config.opd else ():
        servers = [s for s in teacher_servers(config.opd) if s.teacher == teacher.name]
        chunk = None
        if servers and servers[0].backend != "embedded":  # that one computes a rollout whole
            default = LMDEPLOY_PREFILL if servers[0].backend == "lmdeploy" else SGLANG_PREFILL
            chunk = servers[0].launch.prefill_tokens or default
        found.append(
            TeacherTokens(
                teacher.name,
                chunk,
                -(-rollout // chunk) if chunk else None,
                min(teacher.max_concurrency, max(1, teacher.max_tokens_in_flight // rollout)),
            )
        )
    return found
