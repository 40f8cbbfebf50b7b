"""What a run's metric was at a train step, question by question where that was kept."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from opd_core.agent_loop.evaluation import RIGHT_REWARD, pass_at_k
from opd_core.analysis.alignment import Spot
from opd_core.analysis.run_data import RunData
from opd_core.errors import ConfigError
from opd_core.training.evaluation_records import EvaluationRecord, QuestionResult
from opd_core.training.results import AVERAGED_STEPS

OfQuestion = Callable[[QuestionResult], float]

HIGHER_IS_BETTER = ("eval/accuracy", "eval/accuracy/*", "eval/pass_at_*", "rollout/reward_mean")
LOWER_IS_BETTER = (
    "opd_reverse_kl*",
    "opd_abs_logprob_diff*",
    "time/*",
    "cost/*",
    "total/money",
    "total/device_seconds",
)
"""Of any other metric neither is better: a longer answer may be the better one, or not."""
SHARES = ("accuracy", "fraction", "share", "pass_at_")
"""Words in the names of metrics that lie between 0 and 1."""
SHARE_MARGIN = 0.02
"""The smallest difference of a share that matters, where nobody said otherwise."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A run's metric at a spot.

    ``questions`` holds its value for each question by key; None where the run kept none, and then
    ``stderr`` is the recorded standard error, if there is one.
    """

    run: RunData
    spot: Spot
    value: float
    questions: dict[str, float] | None
    stderr: float | None


def lower_is_better(metric: str) -> bool | None:
    """Whether a smaller value of the metric is the better one; None where neither is."""
    if any(fnmatchcase(metric, pattern) for pattern in LOWER_IS_BETTER):
        return True
    return False if any(fnmatchcase(metric, each) for each in HIGHER_IS_BETTER) else None


def is_share(metric: str) -> bool:
    """Whether the metric is written in per cent, and its differences in points."""
    return any(word in metric for word in SHARES)


def margin_of(metric: str, given: float | None) -> float | None:
    """The margin that is meant; None where none is."""
    return SHARE_MARGIN if given is None and is_share(metric) else given


def of_question(metric: str) -> OfQuestion | None:
    """How a question's value of that metric is made from its answers; None for a metric that is not
    made from questions."""
    name = metric.removeprefix("eval/")
    if metric == name:
        return None
    if name.startswith("accuracy/"):
        source = name.removeprefix("accuracy/")
        return lambda question: _accuracy(question) if question.data_source == source else math.nan
    if match := re.fullmatch(r"pass_at_([1-9]\d*)", name):
        k = int(match[1])
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


def measure(run: RunData, metric: str, spot: Spot, *, by_question: bool) -> Measured:
    """The metric at a spot: question by question, or as the journal has it.

    Between two evaluations each question's value is on the straight line between its two. The
    errors of two evaluations are not independent (they ask the same questions), so between them the
    error is on that line too, which is the most that it can be.

    Raises :class:`ConfigError` where two evaluations have no question in common.
    """
    take = _from_questions if by_question else _from_journal
    before, *after = (take(run, metric, spot, step) for step in spot.train_steps)
    return _between(before, after[0], spot.fraction) if after else before


def _between(one: Measured, other: Measured, fraction: float) -> Measured:
    def mix(a: float, b: float) -> float:
        return (1 - fraction) * a + fraction * b

    if one.questions is None or other.questions is None:
        known = one.stderr is not None and other.stderr is not None
        stderr = mix(one.stderr or 0.0, other.stderr or 0.0) if known else None
        return replace(one, value=mix(one.value, other.value), stderr=stderr)
    second = other.questions
    questions = {k: mix(v, second[k]) for k, v in one.questions.items() if k in second}
    if not questions:
        raise ConfigError(
            f"{one.run.run_id}: its evaluations after train steps {one.spot.train_steps} answered "
            "different questions: expected the same; name the place of one of them"
        )
    return replace(one, value=sum(questions.values()) / len(questions), questions=questions)


def _from_questions(run: RunData, metric: str, spot: Spot, train_step: int) -> Measured:
    record = next(each for each in run.evaluations if each.train_step == train_step)
    value_of = of_question(metric)
    questions = question_values(record, value_of) if value_of else {}
    return Measured(run, spot, sum(questions.values()) / len(questions), questions, None)


def _from_journal(run: RunData, metric: str, spot: Spot, train_step: int) -> Measured:
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
    return Measured(run, spot, float(share @ kept), None, stderr)


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
