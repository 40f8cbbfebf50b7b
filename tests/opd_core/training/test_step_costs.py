"""What a train step costs, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opd_core.rollout import RolloutState
from opd_core.training.step_costs import cost_metrics, time_metrics
from tests.opd_core.training.whole_loop import config_of

LAUNCHED = {"model": "/models/teacher", "devices": ["1", "2"]}


@pytest.fixture
def rollouts(make_rollout: Any, make_prompt: Any) -> list[RolloutState]:
    """Two of three prompt tokens and two sampled ones, of which one was scored."""
    prompt = make_prompt(0)
    return [make_rollout(0, prompt, teacher_attempts=2), make_rollout(1, prompt)]


def config(**changes: Any) -> Any:
    teacher = {"name": "teacher", "backend": "embedded", "launch": LAUNCHED}
    opd = {"teachers": [teacher], "default_teacher": "teacher"}
    here = Path("/nowhere")
    return config_of(here, here, "http://h:1", opd=opd, **changes)


def test_a_step_costs_the_time_of_all_devices_that_the_run_holds(
    rollouts: list[RolloutState],
) -> None:
    found = cost_metrics(config(), rollouts, 10.0, {})
    assert found == {
        "cost/device_seconds": 30.0,
        "total/device_seconds": 30.0,
        "total/student_tokens": 4.0,
        "total/teacher_tokens": 5.0,  # prompt and response of the one that was scored
    }


def test_money_is_told_once_there_are_prices(rollouts: list[RolloutState]) -> None:
    prices = {"device_hour": 3.6, "teacher_million_tokens": {"teacher": 1e6}}
    found = cost_metrics(config(cost=prices), rollouts, 10.0, {})
    assert found["cost/money"] == pytest.approx(3 * 0.001 * 10 + 5)
    dear = cost_metrics(config(cost={**prices, "teacher_device_hour": 36.0}), rollouts, 10.0, {})
    assert dear["cost/money"] == pytest.approx(0.001 * 10 + 2 * 0.01 * 10 + 5)
    free = cost_metrics(config(cost={**prices, "teacher_device_hour": 0.0}), rollouts, 10.0, {})
    assert free["total/money"] == pytest.approx(0.001 * 10 + 5)


def test_totals_go_on_from_the_step_before(rollouts: list[RolloutState]) -> None:
    first = cost_metrics(config(), rollouts, 10.0, {})
    second = cost_metrics(config(), rollouts, 1.0, first | {"grad_norm": 1.0})
    assert second["total/device_seconds"] == 33.0
    assert second["total/student_tokens"] == 8.0
    assert second["cost/device_seconds"] == 3.0


def test_a_total_whose_beginning_is_not_known_is_not_told(rollouts: list[RolloutState]) -> None:
    first = cost_metrics(config(), rollouts, 10.0, {})
    later = cost_metrics(config(cost={"device_hour": 1.0}), rollouts, 10.0, first)
    assert "cost/money" in later
    assert "total/money" not in later
    assert "total/device_seconds" in later


def test_a_run_without_teachers_pays_for_the_student(rollouts: list[RolloutState]) -> None:
    here = Path("/nowhere")
    task = {"judge": "m:f", "group_size": 2}
    alone = config_of(here, here, None, task=task)
    found = cost_metrics(alone, rollouts, 2.0, {})
    assert found["cost/device_seconds"] == 2.0
    assert found["total/teacher_tokens"] == 0.0


def test_shares_are_of_the_steps_time() -> None:
    found = time_metrics({"training": 3.0, "tracking": 0.5}, 4.0)
    assert found["time/training_share"] == 0.75
    assert found["time/tracking_s"] == 0.5
    assert found["time/tracking_share"] == 0.125
