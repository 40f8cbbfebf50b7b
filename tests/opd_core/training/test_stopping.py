"""When a target is reached, and when it never can be."""

from __future__ import annotations

import math
from typing import Any

import pytest

from opd_core.config import ExperimentConfig, StopConfig
from opd_core.training.stopping import reached, why_never

AT_LEAST = StopConfig(at_least=0.8)
AT_MOST = StopConfig(metric="opd_reverse_kl", at_most=0.05)


@pytest.mark.parametrize(
    ("metrics", "stop", "told"),
    [
        ({"eval/accuracy": 0.812}, AT_LEAST, "eval/accuracy 0.812 is at least 0.8"),
        ({"eval/accuracy": 0.8}, AT_LEAST, "eval/accuracy 0.8 is at least 0.8"),
        ({"eval/accuracy": 0.79}, AT_LEAST, ""),
        ({"opd_reverse_kl": 0.0312345}, AT_MOST, "opd_reverse_kl 0.03123 is at most 0.05"),
        ({"opd_reverse_kl": 0.05}, AT_MOST, "opd_reverse_kl 0.05 is at most 0.05"),
        ({"opd_reverse_kl": 0.06}, AT_MOST, ""),
    ],
)
def test_a_bound_is_reached_at_itself_and_beyond(
    metrics: dict[str, float], stop: StopConfig, told: str
) -> None:
    assert reached(metrics, stop) == told


@pytest.mark.parametrize(("bound", "told"), [("at_least", "at least 0"), ("at_most", "at most 0")])
def test_a_bound_of_zero_is_a_bound(bound: str, told: str) -> None:
    stop = StopConfig.model_validate({"metric": "x", bound: 0.0})
    assert reached({"x": 0.0}, stop) == f"x 0 is {told}"


@pytest.mark.parametrize("stop", [AT_LEAST, AT_MOST, None])
def test_a_record_without_the_metric_reaches_nothing(stop: StopConfig | None) -> None:
    assert reached({"grad_norm": 1.0}, stop) == ""


def test_nothing_is_reached_where_nothing_was_named() -> None:
    assert reached({"eval/accuracy": 1.0}, None) == ""


@pytest.mark.parametrize("stop", [AT_LEAST, AT_MOST])
def test_what_is_no_number_is_never_reached(stop: StopConfig) -> None:
    assert reached({stop.metric: math.nan}, stop) == ""


# ------------------------------------------------------------------ never

HELD_OUT = {"train": "/data/train.jsonl", "evaluation": "/data/held-out.jsonl"}
JUDGED = {"group_size": 2, "judge": "opd_core.agent_loop.judges:math"}


def experiment(stop: dict[str, Any] | None, **changes: Any) -> ExperimentConfig:
    whole: dict[str, Any] = {
        "name": "test",
        "student": {"model": "/models/student"},
        "data": HELD_OUT,
        "task": JUDGED,
        "sampling": {"max_new_tokens": 16},
        "opd": {
            "teachers": [{"name": "t", "endpoint": "http://127.0.0.1:13141"}],
            "default_teacher": "t",
        },
        "training": {
            "steps": 1,
            "prompts_per_step": 4,
            "learning_rate": 1e-6,
            "stop_when": stop,
        },
        "evaluation": {"samples": 8, "pass_at": (1, 8)},
    }
    return ExperimentConfig.model_validate(whole | changes)


def target(metric: str) -> dict[str, Any]:
    return {"metric": metric, "at_least": 0.5}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"data": {"train": "/data/train.jsonl"}}, "without held-out rows: name data.evaluation"),
        ({"task": {}}, "without a judge: name task.judge"),
    ],
)
def test_an_evaluation_that_never_happens_is_told(changes: dict[str, Any], told: str) -> None:
    reason = why_never(experiment(target("eval/accuracy"), **changes))
    assert reason is not None
    assert reason.startswith("training.stop_when: eval/accuracy is never recorded")
    assert told in reason
    assert why_never(experiment(target("opd_reverse_kl"), **changes)) is None


def test_a_pass_at_k_that_is_not_computed_is_told() -> None:
    reason = why_never(experiment(target("eval/pass_at_4")))
    assert reason is not None
    assert "add 4 to evaluation.pass_at" in reason


@pytest.mark.parametrize(
    "metric", ["eval/accuracy", "eval/accuracy/sums", "eval/pass_at_8", "eval/pass_at_1_stderr"]
)
def test_a_metric_that_may_come_is_not_told(metric: str) -> None:
    assert why_never(experiment(target(metric))) is None
    assert why_never(experiment(None, data={"train": "/data/train.jsonl"})) is None
