"""A whole run that real servers sample, and that loses one of them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.flows.conftest import opd, prefect_api, wait_until

from .conftest import STARTUP_LIMIT_S, interpreter

__all__ = ["opd", "prefect_api"]
"""Fixtures of whole runs."""

pytestmark = [
    pytest.mark.timeout(2 * STARTUP_LIMIT_S),
    pytest.mark.slow,
    pytest.mark.servers,
]

STEPS, GROUPS = 6, 32
STUDENT = "student-0"
ROUNDING = 1e-3
"""Nats between a sampled token's logprob in the server and in training, with the same weights."""


def ended(run: Any) -> bool:
    return run.process.poll() is not None


def test_a_killed_sampling_server_is_started_again_and_gets_the_current_weights(
    opd: Callable[..., Any],
) -> None:
    interpreter("sglang")
    run = opd(
        f"training.steps={STEPS}",
        f"training.prompts_per_step={GROUPS}",
        "training.checkpoint_every=0",
        "data.evaluation_rows=16",
        "evaluation.every=0",
        "tracking.mlflow=false",
        "tracking.tensorboard=false",
        recipe="tiny_sglang",
    )
    wait_until(lambda: ended(run) or run.trained_steps() >= 2, "two train steps", STARTUP_LIMIT_S)
    assert not ended(run), run.output()
    os.kill(run.pids_of(STUDENT)[0], signal.SIGKILL)
    assert run.process.wait(timeout=STARTUP_LIMIT_S) == 0, run.output()
    summary = run.json_file("summary.json")
    assert (summary["status"], summary["train_steps"]) == ("completed", STEPS)
    assert summary["server_restarts"] == {STUDENT: 1}
    assert summary["job_restarts"] == 0
    assert len(run.pids_of(STUDENT)) == 2
    assert_the_weights_that_sampled_are_those_that_trained(run)
    assert run.json_file("receipt.json")["clean"]
    assert not run.processes()


def assert_the_weights_that_sampled_are_those_that_trained(run: Any) -> None:
    """In every train step, before the loss and after it; and no group was trained twice."""
    files = sorted((run.directory() / "batches").glob("step-*.json"))
    recorded = [json.loads(file.read_text()) for file in files]
    groups = [group["group_id"] for batch in recorded for group in batch["groups"]]
    assert len(set(groups)) == len(groups) == STEPS * GROUPS
    for batch in recorded:
        rollouts = [rollout for group in batch["groups"] for rollout in group["rollouts"]]
        versions = {version for rollout in rollouts for version in rollout["policy_versions"]}
        assert versions == {batch["train_step"] - 1}
    steps = [r["metrics"] for r in run.journal() if "time/step_s" in r["metrics"]]
    assert all(0 < step["engine_logprob_gap"] < ROUNDING for step in steps)
    assert [step["sampling/replaced"] for step in (steps[0], steps[-1])] == [0, 1]
