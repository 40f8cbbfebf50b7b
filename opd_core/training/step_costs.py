"""What a train step costs, and how its time is divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opd_core.config import ExperimentConfig
from opd_core.rollout import RolloutState

HOUR_S = 3600.0
MILLION = 1e6


def time_metrics(seconds: Mapping[str, float], total_s: float) -> dict[str, float]:
    """``time/<name>_s`` and ``time/<name>_share`` of ``total_s``."""
    total = max(total_s, 1e-9)
    return {
        **{f"time/{name}_s": spent for name, spent in seconds.items()},
        **{f"time/{name}_share": spent / total for name, spent in seconds.items()},
    }


def cost_metrics(
    config: ExperimentConfig,
    rollouts: Sequence[RolloutState],
    step_s: float,
    before: Mapping[str, float],
) -> dict[str, float]:
    """What a step of ``step_s`` seconds took (``cost/…``), and the run through it (``total/…``).

    ``rollouts`` are those of the groups that train; ``before`` are the metrics of the step before
    this one, none before the first. A total that the step before does not have, as of money in a
    run that learned its prices only later, is left out from there on.
    """
    devices, teacher_devices = len(config.student.devices), _teacher_devices(config)
    tokens = _teacher_tokens(config, rollouts)
    cost = {"device_seconds": step_s * (devices + teacher_devices)}
    if (prices := config.cost) is not None:
        hour = prices.teacher_device_hour
        of_teacher = prices.device_hour if hour is None else hour
        hourly = devices * prices.device_hour + teacher_devices * of_teacher
        billed = {
            name: tokens.get(name, 0) * m for name, m in prices.teacher_million_tokens.items()
        }
        cost["money"] = hourly * step_s / HOUR_S + sum(billed.values()) / MILLION
    spent = {
        "student_tokens": float(sum(rollout.sampled_tokens for rollout in rollouts)),
        "teacher_tokens": float(sum(tokens.values())),
        **cost,
    }
    totals = {f"total/{name}": amount for name, amount in spent.items()}
    if before:
        totals = {name: before[name] + more for name, more in totals.items() if name in before}
    return {f"cost/{name}": amount for name, amount in cost.items()} | totals


def _teacher_devices(config: ExperimentConfig) -> int:
    """Of the teachers that the run launches."""
    replicas = [r for t in (config.opd.teachers if config.opd else ()) for r in t.all_replicas]
    return sum(len(replica.launch.devices) for replica in replicas if replica.launch)


def _teacher_tokens(config: ExperimentConfig, rollouts: Sequence[RolloutState]) -> dict[str, int]:
    """Tokens that each teacher was asked to score, prompts included."""
    found: dict[str, int] = {}
    for rollout in rollouts:
        if config.opd is not None and rollout.teacher_attempts:
            name = config.opd.teacher_of(rollout.prompt.data_source) or ""
            tokens = len(rollout.prompt.token_ids) + len(rollout.response_ids)
            found[name] = found.get(name, 0) + tokens
    return found
