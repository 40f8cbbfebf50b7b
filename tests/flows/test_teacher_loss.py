"""Whole runs whose teacher is lost on the way: the run goes on, and nothing is asked for twice."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opd_core.agent_loop.prompts import PromptQueue
from opd_core.data import load_prompts
from opd_core.scoring.facts import read_facts
from opd_core.serving.embedded.chaos_script import request_digest
from opd_core.training.models import load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

StartRun = Callable[..., Any]
TINY = Path("deployments/recipes/assets/tiny")
TEACHER = "teacher-teacher"
GROUPS = 64


def settings(script: Path, steps: int, *more: str) -> list[str]:
    """Overrides of the tiny recipe with the chaos teacher."""
    return [
        f"training.steps={steps}",
        f"training.prompts_per_step={GROUPS}",
        "evaluation.samples=1",
        "data.evaluation_rows=16",
        f"opd.teachers.0.launch.extra_args=[--chaos, {script}]",
        *more,
    ]


def assert_nothing_was_scored_twice(run: Any, answers: list[str]) -> None:
    """Every answered request was asked once; only the known sequences repeat."""
    facts = read_facts(run.directory() / "teachers.json")["teacher"]
    known = {
        request_digest(list(canary.token_ids), start)
        for canary in facts.canaries
        for start in range(len(canary.token_ids))
    }
    answered = Counter(digest for digest in answers if digest not in known)
    assert len(answered) >= GROUPS
    assert [digest for digest, count in answered.items() if count > 1] == []


@pytest.mark.long
def test_a_teacher_killed_and_then_stopped_costs_no_group_and_no_score(
    opd: StartRun, tmp_path: Path
) -> None:
    script, record = tmp_path / "script.json", tmp_path / "answered.txt"
    script.write_text(json.dumps({"faults": [], "record": str(record)}))
    run = opd(*settings(script, 9, "opd.teachers.0.hang_limit_s=8"))
    run.wait_for(lambda: "starting the student" in run.output(), "the student's job")
    proof = len(record.read_text().split())
    run.wait_for(lambda: run.trained_steps() >= 2, "two train steps")
    os.kill(run.pids_of(TEACHER)[0], signal.SIGKILL)
    run.wait_for(lambda: run.output().count("is back at") == 1, "the first restart")
    trained = run.trained_steps()
    run.wait_for(lambda: run.trained_steps() > trained, "a train step after it")
    os.kill(run.pids_of(TEACHER)[1], signal.SIGSTOP)
    assert run.finish() == 0, run.output()
    summary = run.json_file("summary.json")
    assert summary["train_steps"] == 9
    assert summary["groups"] == {"completed": 9 * GROUPS, "filtered": 0, "failed": 0}
    assert summary["server_restarts"] == {TEACHER: 2}
    assert "hangs" in run.output()
    assert_nothing_was_scored_twice(run, record.read_text().split()[proof:])
    assert list((run.directory() / "parked").iterdir()) == []
    assert run.json_file("receipt.json")["clean"]
    assert not run.processes()


@pytest.mark.long
def test_a_poison_is_found_and_the_others_are_scored(opd: StartRun, tmp_path: Path) -> None:
    """Beside it one death in the middle of an answer, and health checks that lie."""
    tokenizer = load_tokenizer(str(TINY / "student"))
    prompts = load_prompts(str(TINY / "train.jsonl"), tokenizer, 32).prompts
    ((poison, _),) = PromptQueue(prompts, seed=1234, max_requeue=2).take(1)
    script = tmp_path / "script.json"
    deadly = {"fault": "die", "containing": list(poison.token_ids)}
    death = {"fault": "die_mid_answer", "first": 70, "once": True}
    lie = {"fault": "health", "answer": "bad", "first": 60}
    script.write_text(json.dumps({"faults": [deadly, death, lie]}))
    run = opd(*settings(script, 2, "opd.teachers.0.launch.max_restarts=5"))
    assert run.finish() == 0, run.output()
    summary = run.json_file("summary.json")
    assert summary["train_steps"] == 2
    assert summary["groups"] == {"completed": 2 * GROUPS, "filtered": 0, "failed": 1}
    assert summary["lost"] == {"poison": 1}
    assert summary["server_restarts"] == {TEACHER: 4}
    assert not run.processes()
