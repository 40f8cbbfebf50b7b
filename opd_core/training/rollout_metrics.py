"""What the driver itself knows of a train step's rollouts, as metrics."""

from __future__ import annotations

from collections.abc import Sequence

from opd_core.rollout import RolloutState


def rollout_metrics(rollouts: Sequence[RolloutState]) -> dict[str, float]:
    """Of the rollouts of the groups that train: lengths and how they ended, reward, teacher's work.

    ``rollout/end_token_kl`` is the mean of ``rollout_logprob - teacher_logprob`` in nats over the
    last tokens of the rollouts that ended by themselves and were scored. What nothing can be said
    of is left out: rewards without a judge, all of ``teacher/…`` without scores.
    """
    return _ends(rollouts) | _teacher([r for r in rollouts if r.teacher_attempts])


def _ends(rollouts: Sequence[RolloutState]) -> dict[str, float]:
    count = max(len(rollouts), 1)
    ended = [r for r in rollouts if r.finish_reason == "stop"]
    metrics = {
        "rollout/response_tokens_mean": sum(r.sampled_tokens for r in rollouts) / count,
        "rollout/response_tokens_max": float(max((r.sampled_tokens for r in rollouts), default=0)),
        "rollout/truncated_fraction": sum(r.truncated for r in rollouts) / count,
        "rollout/eos_fraction": len(ended) / count,
    }
    rewards = [r.reward for r in rollouts if r.reward is not None]
    if rewards:
        metrics["rollout/reward_mean"] = sum(rewards) / len(rewards)
    gaps = [r.rollout_logprobs[-1] - r.teacher_logprobs[-1] for r in ended if r.teacher_logprobs]
    if gaps:
        metrics["rollout/end_token_kl"] = sum(gaps) / len(gaps)
    return metrics


def _teacher(scored: Sequence[RolloutState]) -> dict[str, float]:
    if not scored:
        return {}
    metrics = {
        "teacher/scored_tokens": float(sum(map(_scored_tokens, scored))),
        "teacher/latency_s_mean": sum(r.teacher_latency_s for r in scored) / len(scored),
        "teacher/latency_s_max": max(r.teacher_latency_s for r in scored),
        "teacher/queue_s_mean": sum(r.teacher_queue_s for r in scored) / len(scored),
        "teacher/attempts_mean": sum(r.teacher_attempts for r in scored) / len(scored),
    }
    told = [r for r in scored if r.teacher_cached_tokens is not None]
    if told:
        cached = sum(r.teacher_cached_tokens or 0 for r in told)
        metrics["teacher/cached_fraction"] = cached / sum(map(_scored_tokens, told))
    return metrics


def _scored_tokens(rollout: RolloutState) -> int:
    """Of the sequence that the teacher read: prompt and response."""
    return len(rollout.prompt.token_ids) + len(rollout.response_ids)
