"""Whole runs whose sampling actors are killed on the way: that costs time and nothing else."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from opd_core.sampling.protocol import SampleRequest, rollout_seed
from opd_core.sampling.transformers_engine import TransformersEngine
from opd_core.training.models import end_ids, load_model, load_tokenizer, pad_id

pytestmark = pytest.mark.timeout(600)

StartRun = Callable[..., Any]
TINY_STUDENT = "deployments/recipes/assets/tiny/student"
SEED, MAX_NEW_TOKENS = 1234, 48
"""Of the recipe."""
GROUPS, STALENESS = 48, 1
AT_ONCE_S = 60.0
"""For the end of a run that cannot go on, its teardown included."""


def settings(*more: str) -> list[str]:
    """Overrides of the tiny recipe: all batches stay on the disk."""
    return [
        f"training.prompts_per_step={GROUPS}",
        f"sampling.max_staleness={STALENESS}",
        "training.checkpoint_every=0",
        "data.evaluation_rows=16",
        "evaluation.samples=1",
        "tracking.mlflow=false",
        "tracking.tensorboard=false",
        *more,
    ]


def sampling_actors(run: Any) -> list[int]:
    """Processes that are sampling actors, loading ones too."""
    found = []
    for pid in run.processes():
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:  # gone meanwhile
            continue
        if title.startswith(b"ray::SamplingActor"):
            found.append(pid)
    return found


def kill(pids: list[int]) -> int:
    """SIGKILL them; how many they are."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return len(pids)


def kill_in_the_first_step(run: Any) -> int:
    """Kill all sampling actors as soon as the student is evaluated; how many they are."""
    run.wait_for(lambda: (run.directory() / "metrics.jsonl").exists(), "the job")
    actors = sampling_actors(run)
    run.wait_for(run.journal, "the first evaluation")
    return kill(actors)


def kill_at_random_moments(run: Any, times: int) -> int:
    """Kill some or all sampling actors, each time a train step or two later and anywhere in a step;
    how many were killed."""
    draw, killed = random.Random(times), 0
    for _ in range(times):
        step = run.trained_steps() + draw.randint(1, 2)
        run.wait_for(lambda step=step: run.trained_steps() >= step, f"train step {step}")
        actors = run.wait_for(lambda: sampling_actors(run), "sampling actors")
        steps_s = [r["metrics"].get("time/step_s", math.inf) for r in run.journal()]
        time.sleep(draw.uniform(0, min(steps_s)))
        killed += kill(draw.sample(actors, draw.randint(1, len(actors))))
    return killed


def batches(run: Any) -> list[dict[str, Any]]:
    """The recorded batches, in the order of their train steps."""
    files = sorted((run.directory() / "batches").glob("step-*.json"))
    return [json.loads(file.read_text()) for file in files]


def rollouts(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return [rollout for group in batch["groups"] for rollout in group["rollouts"]]


def assert_whole(run: Any, steps: int, recorded: list[dict[str, Any]]) -> None:
    """All train steps are there with all of their groups, none too old, and nothing is left."""
    summary = run.json_file("summary.json")
    assert (summary["status"], summary["train_steps"]) == ("completed", steps)
    assert summary["job_restarts"] == 0
    assert [batch["train_step"] for batch in recorded] == list(range(1, steps + 1))
    assert [len(batch["groups"]) for batch in recorded] == steps * [GROUPS]
    for batch in recorded:
        newest = batch["train_step"] - 1
        versions = {version for r in rollouts(batch) for version in r["policy_versions"]}
        assert versions <= set(range(newest - STALENESS, newest + 1))
    assert run.json_file("receipt.json")["clean"]
    assert not run.processes()


def assert_every_group_is_accounted_for(run: Any, recorded: list[dict[str, Any]]) -> None:
    """Each group that was started was trained once, or lost with a cause, or waits; after every
    step, since a resume knows the others only from the step's record."""
    log = (run.directory() / "logs/student.log").read_text()
    told = re.findall(r" group (\d+) \(data row \d+\) is \w+: (\w+)", log)
    assert run.json_file("summary.json")["lost"] == Counter(cause for _, cause in told)
    ended = [int(group) for group, _ in told]
    for batch in recorded:
        ended += [group["group_id"] for group in batch["groups"]]
        state = batch["state"]
        waiting = {group["group_id"] for group in [*state["buffer"], *state["under_way"]]}
        assert waiting.union(ended) >= set(range(state["next_group_id"]))
    assert len(set(ended)) == len(ended)
    assert not waiting.intersection(ended)


def assert_sampled_as_if_nobody_had_died(batch: dict[str, Any]) -> None:
    """The first batch holds the tokens that an engine in this process draws."""
    model = load_model(TINY_STUDENT, "float32", torch.device("cpu"))
    tokenizer = load_tokenizer(TINY_STUDENT)
    engine = TransformersEngine(
        model, end_ids=end_ids(model, tokenizer), max_rows=16, pad_id=pad_id(tokenizer)
    )
    asked = [
        SampleRequest(
            (group["group_id"], 0),
            tuple(group["prompt"]["token_ids"]),
            rollout_seed(SEED, batch["train_step"], group["prompt"]["row"], 0, 0),
            MAX_NEW_TOKENS,
        )
        for group in batch["groups"]
    ]
    drawn = {ticket: done for some in engine.sample(asked) for ticket, done in some}
    for ticket, rollout in enumerate(rollouts(batch)):
        assert set(rollout["policy_versions"]) == {0}
        assert rollout["response_ids"] == list(drawn[ticket].response_ids)


@pytest.mark.long
def test_the_only_actor_is_killed_twice_and_no_group_is_lost(opd: StartRun) -> None:
    steps = 6
    slowly = "sampling.max_rows=1"
    run = opd(*settings(f"training.steps={steps}", slowly))
    killed = kill_in_the_first_step(run) + kill_at_random_moments(run, 1)
    assert run.finish() == 0, run.output()
    recorded = batches(run)
    assert_whole(run, steps, recorded)
    assert_every_group_is_accounted_for(run, recorded)
    assert_sampled_as_if_nobody_had_died(recorded[0])
    replaced = [r["metrics"].get("sampling/replaced") for r in run.journal()]
    assert (replaced[1], replaced[steps]) == (1, killed) == (1, 2)


@pytest.mark.long
def test_two_actors_are_killed_at_random_moments_and_no_group_is_lost(opd: StartRun) -> None:
    steps, times = 20, 4
    slowly = ("sampling.actors=2", "sampling.max_rows=8")
    run = opd(*settings(f"training.steps={steps}", "sampling.max_restarts=20", *slowly))
    killed = kill_at_random_moments(run, times)
    assert run.finish() == 0, run.output()
    recorded = batches(run)
    assert_whole(run, steps, recorded)
    assert_every_group_is_accounted_for(run, recorded)
    replaced = [r["metrics"].get("sampling/replaced") for r in run.journal()]
    assert replaced[steps] == killed >= times


@pytest.mark.long
def test_without_replacements_the_run_ends_at_once_and_says_why(opd: StartRun) -> None:
    run = opd(*settings("training.steps=500", "sampling.max_restarts=0"))
    run.wait_for(lambda: run.trained_steps() >= 2, "two train steps")
    kill(sampling_actors(run))
    killed_at = time.monotonic()
    assert run.finish() == 1, run.output()
    assert time.monotonic() - killed_at < AT_ONCE_S
    summary = run.json_file("summary.json")
    assert (summary["status"], summary["job_restarts"]) == ("failed", 0)
    assert "no sampling actor is left after 0 replacements" in summary["error"]
    assert "its worker process has died" in summary["error"]
    assert run.json_file("receipt.json")["clean"]
    assert not run.processes()
