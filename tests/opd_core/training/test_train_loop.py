"""The whole train loop in one process, on real parts: engine, learner, teacher server, judge."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from opd_core.config import ExperimentConfig
from opd_core.errors import SurvivorError, TeacherAway
from opd_core.lifecycle.ports import reserve_ports
from opd_core.sampling.transformers_engine import TransformersEngine
from opd_core.scoring.facts import TeacherFacts, facts_to_json
from opd_core.serving.readiness import wait_until_healthy
from opd_core.tracking.journal import JournalReader
from opd_core.training import models
from opd_core.training.assembly import build_loop
from opd_core.training.files import JOURNAL_FILE, TEACHERS_FILE
from opd_core.training.learner import Learner
from opd_core.training.local import LocalLearner, LocalSampler
from opd_core.training.loop import TrainOutcome
from opd_core.training.results import summarise

FILTERS = """
def none_pass(group):
    return False

def some_pass(group):
    return all(sum(r.response_ids) % 3 for r in group)

def length(text, prompt):
    return len(text) / 10
"""


@pytest.fixture(scope="module")
def teacher_url(teacher_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The embedded server with the random teacher, in a process of its own."""
    with reserve_ports(1) as reserved:
        (port,) = reserved.ports
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "opd_core.serving.embedded", "--model-path", str(teacher_dir)]
    log = tmp_path_factory.mktemp("teacher-log") / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen([*command, "--port", str(port)], stdout=output, stderr=output)

    def still_alive() -> None:
        assert server.poll() is None, log.read_text()

    try:
        wait_until_healthy(url, "embedded", limit_s=120, still_alive=still_alive)
        yield url
    finally:
        server.terminate()
        server.wait(timeout=30)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [
        {
            "data_source": "odd" if number % 2 else "even",
            "prompt": [{"role": "user", "content": f"{number}+1="}],
            "reward_model": {"ground_truth": str(number + 1)},
        }
        for number in range(9)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "loop_filters.py").write_text(FILTERS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "rows.jsonl"


def config_of(student: Path, rows: Path, url: str | None, **changes: Any) -> ExperimentConfig:
    teacher = {"name": "teacher", "endpoint": url, "backend": "embedded", "away_limit_s": 1.0}
    opd = {"teachers": [teacher], "default_teacher": "teacher"} if url else None
    tree: dict[str, Any] = {
        "name": "loop",
        "student": {"model": str(student)},
        "data": {"train": str(rows), "max_prompt_tokens": 16},
        "sampling": {"max_new_tokens": 8},
        "opd": opd,
        "training": {"steps": 2, "prompts_per_step": 4, "learning_rate": 1e-3},
    }
    for key, value in changes.items():
        tree[key] = {**tree.get(key, {}), **value}
    return ExperimentConfig.model_validate(tree)


async def train(config: ExperimentConfig, run_dir: Path) -> TrainOutcome:
    """Build the loop as the driver does, with engines of this process, and run it."""
    cpu = torch.device("cpu")
    tokenizer = models.load_tokenizer(config.student.model)
    sampled, trained = (models.load_model(config.student.model, "float32", cpu) for _ in range(2))
    sampler = LocalSampler(
        TransformersEngine(
            sampled.requires_grad_(False),
            end_ids=models.end_ids(sampled, tokenizer),
            pad_id=models.pad_id(tokenizer),
            max_rows=config.sampling.max_rows,
        )
    )
    learner = LocalLearner(Learner(trained, tokenizer, config.training, config.opd))
    run_dir.mkdir(exist_ok=True)
    facts = {"teacher": TeacherFacts(20, 128, fingerprint="random-2")}
    (run_dir / TEACHERS_FILE).write_text(facts_to_json(facts))
    async with AsyncExitStack() as exits:
        loop, _ = await build_loop(config, run_dir, sampler, learner, exits, {})
        return await loop.run()


def journal(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / JOURNAL_FILE).read_text().splitlines()]


async def test_pure_opd_needs_no_judge_and_logs_every_step(
    student_dir: Path, data: Path, teacher_url: str, tmp_path: Path
) -> None:
    outcome = await train(config_of(student_dir, data, teacher_url), tmp_path / "run")
    assert outcome.survivors.by_status == {"completed": 8}
    result = summarise(JournalReader(tmp_path / "run" / JOURNAL_FILE).read())
    assert result.groups["completed"] == 8
    assert result.accuracy.before is None
    records = journal(tmp_path / "run")
    assert [record["train_step"] for record in records] == [1, 2]
    metrics = records[0]["metrics"]
    assert metrics["opd_reverse_kl"] == pytest.approx(result.opd_reverse_kl.before, rel=0.5)
    assert metrics["engine_logprob_gap"] < 1e-5
    assert "rollout/reward_mean" not in metrics
    assert {"opd_reverse_kl/even", "opd_reverse_kl/odd"} <= set(metrics)
    shares = [
        metrics[f"time/{n}_share"] for n in ("sampling", "scoring", "training", "weight_sync")
    ]
    assert sum(shares) == pytest.approx(1.0)
    assert AutoModelForCausalLM.from_pretrained(outcome.student_path).config.vocab_size == 20


async def test_with_a_store_no_score_is_paid_for_twice(
    student_dir: Path, teacher_dir: Path, data: Path, teacher_url: str, tmp_path: Path
) -> None:
    def scored() -> int:
        return int(httpx.get(f"{teacher_url}/server_info", trust_env=False).json()["sequences"])

    store = {"score_store": str(tmp_path / "scores")}
    teacher = {
        "endpoint": teacher_url,
        "backend": "embedded",
        "launch": {"model": str(teacher_dir)},
    }
    teacher |= {"name": "teacher", "canary_every": 1}
    config = config_of(student_dir, data, teacher_url, opd={"teachers": [teacher], **store})
    before = scored()
    await train(config, tmp_path / "first")
    paid = scored()
    await train(config, tmp_path / "again")
    canaries = 2  # one a train step
    assert paid - before == 8 + canaries
    assert scored() - paid == canaries
    first, again = (journal(tmp_path / run) for run in ("first", "again"))
    for one, other in zip(first, again, strict=True):
        assert one["metrics"]["opd_reverse_kl"] == other["metrics"]["opd_reverse_kl"]


async def test_teacher_logprobs_in_training_are_the_teachers_own(
    student_dir: Path, teacher_dir: Path, data: Path, teacher_url: str, tmp_path: Path
) -> None:
    """Against transformers: the mean reverse KL of the step, from the sampled tokens themselves."""
    from opd_core.training import loop as loop_module

    seen: list[Any] = []
    make = loop_module.build_batch

    def spy(groups: Any, **settings: Any) -> Any:
        seen.extend(groups)
        return make(groups, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_module, "build_batch", spy)
        config = config_of(student_dir, data, teacher_url, training={"steps": 1})
        outcome = await train(config, tmp_path / "run")
    both = [AutoModelForCausalLM.from_pretrained(p) for p in (student_dir, teacher_dir)]
    total, tokens = 0.0, 0
    for rollout in (r for group in seen for r in group.rollouts):
        ids = torch.tensor([rollout.prompt.token_ids + rollout.response_ids])
        first = len(rollout.prompt.token_ids)
        with torch.no_grad():
            own, theirs = (
                m(ids).logits[0, first - 1 : -1].log_softmax(-1).gather(-1, ids[0, first:, None])
                for m in both
            )
        assert torch.allclose(theirs[:, 0], torch.tensor(rollout.teacher_logprobs), atol=1e-4)
        total, tokens = total + float((own - theirs).sum()), tokens + len(rollout.response_ids)
    assert outcome.steps[0]["opd_reverse_kl"] == pytest.approx(total / tokens, abs=1e-5)


async def test_the_same_seed_gives_the_same_run(
    student_dir: Path, data: Path, teacher_url: str, tmp_path: Path
) -> None:
    config = config_of(student_dir, data, teacher_url)
    first, again = [
        (await train(config, tmp_path / name)).steps[-1]["opd_reverse_kl"] for name in "ab"
    ]
    other = config.model_copy(update={"seed": 5})
    assert first == pytest.approx(again, abs=1e-6)
    assert (await train(other, tmp_path / "c")).steps[-1]["opd_reverse_kl"] != first


async def test_filtered_groups_are_replaced_and_counted(
    student_dir: Path, data: Path, teacher_url: str, tmp_path: Path
) -> None:
    task = {"filter_func": "loop_filters:some_pass"}
    outcome = await train(config_of(student_dir, data, teacher_url, task=task), tmp_path / "run")
    counts = outcome.survivors.by_status
    assert counts["completed"] == 8
    assert counts["filtered"] > 0
    assert sum(step["groups/filtered"] for step in outcome.steps) == counts["filtered"]


async def test_a_filter_that_lets_nothing_pass_stops_with_the_table(
    student_dir: Path, data: Path, teacher_url: str, tmp_path: Path
) -> None:
    task = {"filter_func": "loop_filters:none_pass"}
    with pytest.raises(SurvivorError, match="filtered: 16"):
        await train(config_of(student_dir, data, teacher_url, task=task), tmp_path / "run")
    (record,) = journal(tmp_path / "run")
    assert record["metrics"]["groups/filtered"] == 16


async def test_without_a_teacher_the_reward_trains_and_evaluation_measures(
    student_dir: Path, data: Path, tmp_path: Path
) -> None:
    config = config_of(
        student_dir,
        data,
        None,
        data={"evaluation": str(data)},
        task={"group_size": 3, "judge": "loop_filters:length"},
        evaluation={"every": 1, "samples": 2},
        training={"checkpoint_every": 1},
    )
    outcome = await train(config, tmp_path / "run")
    assert sorted(outcome.evaluations) == [0, 1, 2]
    assert outcome.evaluations[0].samples == 18
    assert outcome.steps[0]["rollout/reward_mean"] > 0
    assert outcome.steps[0]["grad_norm"] > 0
    assert not any(name.startswith("opd_reverse_kl") for name in outcome.steps[0])
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]


async def test_a_teacher_that_stays_away_ends_the_run(
    student_dir: Path, data: Path, tmp_path: Path
) -> None:
    with reserve_ports(1) as reserved:
        url = f"http://127.0.0.1:{reserved.ports[0]}"
    with pytest.raises(TeacherAway, match="teacher 'teacher'"):
        await train(config_of(student_dir, data, url), tmp_path / "run")
