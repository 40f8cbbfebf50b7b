"""What an evaluation came to, question by question."""

from __future__ import annotations

import hashlib
import json

from opd_core.agent_loop.evaluation import Evaluation
from opd_core.config import ExperimentConfig
from opd_core.rollout import Group, Prompt
from opd_core.training.evaluation_records import EvaluationRecord, QuestionResult


def evaluation_record(
    evaluation: Evaluation, train_step: int, config: ExperimentConfig
) -> EvaluationRecord:
    """The record of an evaluation that was made after ``train_step`` as ``config`` says."""
    return EvaluationRecord(
        train_step,
        config.evaluation.samples,
        config.evaluation.temperature,
        config.seed,
        tuple(_question(group) for group in evaluation.groups),
    )


def _question(group: Group) -> QuestionResult:
    return QuestionResult(
        question_key(group.prompt),
        group.prompt.row,
        group.prompt.data_source,
        tuple(rollout.reward or 0.0 for rollout in group.rollouts),
        tuple(rollout.sampled_tokens for rollout in group.rollouts),
        tuple(rollout.truncated for rollout in group.rollouts),
    )


def question_key(prompt: Prompt) -> str:
    """The same for the same question in any run: of data source, rendered prompt, ground truth."""
    asked = json.dumps([prompt.data_source, prompt.text, prompt.ground_truth])
    return hashlib.blake2b(asked.encode(), digest_size=8).hexdigest()
