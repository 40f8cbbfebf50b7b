"""Held-out accuracy of the current student. Never asks a teacher and never needs one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from opd_core.agent_loop.judging import JudgeRunner
from opd_core.agent_loop.loop import AgentLoop, GroupRequest, LoopSettings
from opd_core.agent_loop.turns import Turns
from opd_core.errors import TrainingError
from opd_core.rollout import Group, Prompt, Status
from opd_core.sampling.protocol import Sampler

RIGHT_REWARD = 1.0
"""For pass@k an answer is right from this reward on; accuracy is the mean reward as it is."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Accuracy over all samples, its standard error over questions, and the answers' length.

    ``by_source`` has accuracy and standard error of each data source, where there are several;
    ``pass_at`` has pass@k and its standard error over questions for each k asked for; ``groups``
    are the judged answers of each question.
    """

    questions: int
    samples: int
    accuracy: float
    accuracy_stderr: float
    response_tokens_mean: float
    truncated_fraction: float
    by_source: dict[str, tuple[float, float]] = field(default_factory=dict)
    pass_at: dict[int, tuple[float, float]] = field(default_factory=dict)
    groups: tuple[Group, ...] = field(default=(), repr=False)

    def metrics(self) -> dict[str, float]:
        """Metric names and values."""
        metrics = {
            "eval/accuracy": self.accuracy,
            "eval/accuracy_stderr": self.accuracy_stderr,
            "eval/response_tokens_mean": self.response_tokens_mean,
            "eval/truncated_fraction": self.truncated_fraction,
        }
        for source, (accuracy, stderr) in self.by_source.items():
            metrics[f"eval/accuracy/{source}"] = accuracy
            metrics[f"eval/accuracy_stderr/{source}"] = stderr
        for k, (value, stderr) in self.pass_at.items():
            metrics[f"eval/pass_at_{k}"] = value
            metrics[f"eval/pass_at_{k}_stderr"] = stderr
        return metrics


async def evaluate(
    prompts: Sequence[Prompt],
    *,
    sampler: Sampler,
    judge: JudgeRunner | None = None,
    batch_judge: JudgeRunner | None = None,
    decode: Callable[[Sequence[int]], str],
    settings: LoopSettings,
    turns: Turns | None = None,
    pass_at: Sequence[int] = (),
) -> Evaluation:
    """Sample ``settings.group_size`` answers a question and judge them.

    ``pass_at`` are the k of pass@k, none above the number of answers.

    The same seeds are used at every evaluation, so before and after differ by the weights only.
    Raises :class:`TrainingError` if an answer could not be judged: accuracy is not guessed.
    """
    loop = AgentLoop(
        settings,
        sampler=sampler,
        decode=decode,
        judge=judge,
        batch_judge=batch_judge,
        turns=turns,
    )
    requests = [GroupRequest(i, prompt) for i, prompt in enumerate(prompts)]
    groups = await loop.run(requests, train_step=0)
    lost = next((group for group in groups if group.status is not Status.COMPLETED), None)
    if lost is not None:
        raise TrainingError(f"evaluation of row {lost.prompt.row}: {lost.error_msg or lost.cause}")
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    accuracy, stderr = _accuracy(groups)
    return Evaluation(
        questions=len(groups),
        samples=len(rollouts),
        accuracy=accuracy,
        accuracy_stderr=stderr,
        response_tokens_mean=sum(r.sampled_tokens for r in rollouts) / len(rollouts),
        truncated_fraction=sum(r.truncated for r in rollouts) / len(rollouts),
        by_source=_by_source(groups),
        pass_at={k: _mean([_passes(group, k) for group in groups]) for k in pass_at},
        groups=tuple(groups),
    )


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that k of a question's ``samples`` answers, ``right`` of which are right, hold a
    right one: the unbiased estimate of pass@k.

    1 - C(n - c, k) / C(n, k): Chen et al. 2021, "Evaluating Large Language Models Trained on Code",
    equation 1. Whole numbers until the one division, so nothing overflows or cancels. Raises
    ValueError for a k above the number of samples.
    """
    if k > samples:
        raise ValueError(f"pass@{k} needs at least {k} samples a question, got {samples}")
    choices = math.comb(samples, k)
    return (choices - math.comb(samples - right, k)) / choices


def _passes(group: Group, k: int) -> float:
    rewards = [rollout.reward or 0.0 for rollout in group.rollouts]
    return pass_at_k(len(rewards), sum(reward >= RIGHT_REWARD for reward in rewards), k)


def _accuracy(groups: Sequence[Group]) -> tuple[float, float]:
    """Mean reward and its standard error over questions."""
    return _mean([sum(r.reward or 0.0 for r in g.rollouts) / len(g.rollouts) for g in groups])


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Mean of one value a question, and its standard error (0 for one question)."""
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    return mean, (variance / len(values)) ** 0.5


def _by_source(groups: Sequence[Group]) -> dict[str, tuple[float, float]]:
    """Accuracy per data source; empty with a single one, of which the total says it all."""
    members: dict[str, list[Group]] = {}
    for group in groups:
        members.setdefault(group.prompt.data_source, []).append(group)
    if len(members) < 2:
        return {}
    return {source: _accuracy(members[source]) for source in sorted(members)}
