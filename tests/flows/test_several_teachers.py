"""A whole run with two teachers, each for one data source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

StartRun = Callable[..., Any]


@pytest.mark.long
def test_each_data_source_is_scored_by_its_own_teacher(opd: StartRun) -> None:
    few = ["training.steps=2", "training.prompts_per_step=96", "data.evaluation_rows=16"]
    run = opd(*few, "evaluation.samples=1", recipe="tiny_multi_teacher")
    assert run.finish() == 0, run.output()
    assert run.json_file("summary.json")["groups"]["completed"] == 192
    children = {child["name"] for child in run.json_file("receipt.json")["children"]}
    assert children == {"ray-head", "teacher-adder", "teacher-subtractor"}
    steps = [r["metrics"] for r in run.journal() if "time/step_s" in r["metrics"]]
    # A student scored by the specialist of the other source would agree with it (0.02 nats).
    for source in ("chain_add", "chain_sub"):
        assert sum(step[f"opd_reverse_kl/{source}"] for step in steps) / len(steps) > 0.1
    assert not run.processes()
