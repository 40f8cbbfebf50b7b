"""What a run's metric was at a train step, question by question where that was kept."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from opd_core.agent_loop.evaluation import RIGHT_REWARD, pass_at_k
from opd_core.analysis.run_data import RunData
from opd_core.training.evaluation_records import EvaluationRecord, QuestionResult
from opd_core.training.results import AVERAGED_STEPS

OfQuestion = Callable[[QuestionResult], float]

LOWER_IS_BETTER = (
    "*kl*",
    "*_gap",
    "*abs_logprob_diff",
    "*truncated*",
    "*response_tokens*",
    "*latency*",
    "time/*",
    "cost/*",
    "total/*",
    "lost/*",
    "groups/failed",
)
"""Of all other metrics a larger value is the better one."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A run's metric after ``train_step``, where the target's axis stood at ``axis_value``.

    ``questions`` holds its value for each question by key; None where the run kept none, and then
    ``stderr`` is the recorded standard error, if there is one.
    """

    run: RunData
    train_step: int
    axis_value: float
    value: float
    questions: dict[str, float] | None
    stderr: float | None


def lower_is_better(metric: str) -> bool:
    """Whether a smaller value of the metric is the better one."""
    return any(fnmatchcase(metric, pattern) for pattern in LOWER_IS_BETTER)


def of_question(metric: str) -> OfQuestion | None:
    """How a question's value of that metric is made from its answers; None for a metric that is not
    made from questions."""
    name = metric.removeprefix("eval/")
    if metric == name:
        return None
    if name.startswith("accuracy/"):
        source = name.removeprefix("accuracy/")
        return lambda question: _accuracy(question) if question.data_source == source else math.nan
    if name.startswith("pass_at_") and name.removeprefix("pass_at_").isdecimal():
        k = int(name.removeprefix("pass_at_"))
        return lambda question: _pass_at(question, k)
    return {
        "accuracy": _accuracy,
        "response_tokens_mean": lambda question: float(np.mean(question.response_tokens)),
        "truncated_fraction": lambda question: float(np.mean(question.truncated)),
    }.get(name)


def question_values(record: EvaluationRecord, value_of: OfQuestion) -> dict[str, float]:
    """A value for each question by key; a question that occurs in several rows counts once, with
    their mean, and one without a finite value not at all."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for question in record.questions:
        if math.isfinite(value := value_of(question)):
            found[question.key].append(value)
    return {key: sum(values) / len(values) for key, values in found.items()}


def measured_steps(run: RunData, metric: str) -> tuple[list[int], list[int]]:
    """Train steps at which the run kept the metric's questions, and at which its journal has it."""
    steps, values = run.series.of(metric)
    value_of = of_question(metric)
    kept = [e.train_step for e in run.evaluations if value_of and question_values(e, value_of)]
    return kept, [int(step) for step in steps[np.isfinite(values)]]


def measure_questions(run: RunData, metric: str, train_step: int, axis_value: float) -> Measured:
    """The metric question by question, from the evaluation after ``train_step``."""
    record = next(each for each in run.evaluations if each.train_step == train_step)
    value_of = of_question(metric)
    questions = question_values(record, value_of) if value_of else {}
    value = sum(questions.values()) / len(questions)
    return Measured(run, train_step, axis_value, value, questions, None)


def measure_journal(run: RunData, metric: str, train_step: int, axis_value: float) -> Measured:
    """The metric as the journal has it.

    One that every train step records is noisy: it is averaged over the last five train steps up to
    ``train_step`` (token-weighted where it is a mean over tokens), as a run's summary does. The
    error of that mean takes the steps for independent: they sampled rollouts of their own.
    """
    steps, values = run.series.of(metric)
    usable = np.isfinite(values) & (steps <= train_step)
    count = 1 if metric.startswith("eval/") else AVERAGED_STEPS
    taken, kept = steps[usable][-count:], values[usable][-count:]
    tokens = metric.startswith("opd_")
    weights = [run.series.at("response_tokens", int(step)) if tokens else None for step in taken]
    share = np.array([1.0 if weight is None else weight for weight in weights])
    share = share / share.sum() if share.sum() > 0 else np.full(len(share), 1 / len(share))
    errors = [run.series.at(_stderr_name(metric), int(step)) for step in taken]
    known = [error for error in errors if error is not None and math.isfinite(error)]
    stderr = float(np.linalg.norm(share * known)) if len(known) == len(taken) else None
    return Measured(run, train_step, axis_value, float(share @ kept), None, stderr)


def _stderr_name(metric: str) -> str:
    if metric.startswith("eval/accuracy/"):
        return metric.replace("accuracy", "accuracy_stderr", 1)
    return f"{metric}_stderr"


def _accuracy(question: QuestionResult) -> float:
    rewards = [reward for reward in question.rewards if math.isfinite(reward)]
    return sum(rewards) / len(rewards) if rewards else math.nan


def _pass_at(question: QuestionResult, k: int) -> float:
    rewards = [reward for reward in question.rewards if math.isfinite(reward)]
    if len(rewards) < k:
        return math.nan
    return pass_at_k(len(rewards), sum(reward >= RIGHT_REWARD for reward in rewards), k)
