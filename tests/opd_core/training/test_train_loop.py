"""The whole train loop in one process, on real parts: engine, learner, teacher server, judge."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from opd_core.errors import SurvivorError, TeacherAway
from opd_core.lifecycle.ports import reserve_ports
from opd_core.tracking.journal import JournalReader
from opd_core.training.evaluation_records import read_evaluations
from opd_core.training.files import EVALUATIONS_FOLDER, JOURNAL_FILE, TOKEN_KL_FOLDER
from opd_core.training.results import summarise
from opd_core.training.token_kl import read_token_kls
from tests.opd_core.training.whole_loop import config_of, journal, records_of, steps_of, train


async def test_pure_opd_needs_no_judge_and_logs_every_step(
    student_dir: Path, data: Path, teacher_url: str, tmp_path: Path
) -> None:
    outcome = await train(config_of(student_dir, data, teacher_url), tmp_path / "run")
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


async def test_a_run_keeps_where_its_reverse_kl_lies_and_what_it_cost(
    student_dir: Path, data: Path, teacher_url: str, tmp_path: Path
) -> None:
    config = config_of(student_dir, data, teacher_url, cost={"device_hour": 3600.0})
    await train(config, tmp_path / "run")
    first, second = steps_of(tmp_path / "run")
    for step, record in zip(
        (first, second), read_token_kls(tmp_path / "run" / TOKEN_KL_FOLDER), strict=True
    ):
        tokens = sum(cell.tokens for cell in record.sums)
        assert tokens == step["response_tokens"]
        k = sum(cell.k for cell in record.sums) / tokens
        assert k == pytest.approx(step["opd_reverse_kl"], abs=1e-5)
        assert len(record.rollouts) == 4, "the first step and the last keep what there is"
    assert second["total/student_tokens"] == first["response_tokens"] + second["response_tokens"]
    scored = [step["teacher/scored_tokens"] for step in (first, second)]
    assert second["total/teacher_tokens"] == sum(scored)
    assert first["cost/money"] == pytest.approx(first["time/step_s"])
    assert second["total/money"] == pytest.approx(first["time/step_s"] + second["time/step_s"])
    assert 0 < second["time/tracking_share"] < 1


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
    config = config_of(student_dir, data, teacher_url, training={"steps": 1})
    await train(config, tmp_path / "run")
    (record,) = records_of(tmp_path / "run")
    both = [AutoModelForCausalLM.from_pretrained(p) for p in (student_dir, teacher_dir)]
    total, tokens = 0.0, 0
    for rollout in (r for group in record.groups for r in group.rollouts):
        ids = torch.tensor([rollout.prompt.token_ids + rollout.response_ids])
        first = len(rollout.prompt.token_ids)
        with torch.no_grad():
            own, theirs = (
                m(ids).logits[0, first - 1 : -1].log_softmax(-1).gather(-1, ids[0, first:, None])
                for m in both
            )
        assert torch.allclose(theirs[:, 0], torch.tensor(rollout.teacher_logprobs), atol=1e-4)
        total, tokens = total + float((own - theirs).sum()), tokens + len(rollout.response_ids)
    (step,) = steps_of(tmp_path / "run")
    assert step["opd_reverse_kl"] == pytest.approx(total / tokens, abs=1e-5)


async def test_the_same_seed_gives_the_same_run(
    student_dir: Path, data: Path, teacher_url: str, tmp_path: Path
) -> None:
    config = config_of(student_dir, data, teacher_url)
    other = config.model_copy(update={"seed": 5})
    for name, recipe in {"a": config, "b": config, "c": other}.items():
        await train(recipe, tmp_path / name)
    first, again, elsewhere = (steps_of(tmp_path / n)[-1]["opd_reverse_kl"] for n in "abc")
    assert first == pytest.approx(again, abs=1e-6)
    assert elsewhere != first


async def test_filtered_groups_are_replaced_and_counted(
    student_dir: Path, data: Path, teacher_url: str, tmp_path: Path
) -> None:
    task = {"filter_func": "loop_filters:some_pass"}
    await train(config_of(student_dir, data, teacher_url, task=task), tmp_path / "run")
    steps = steps_of(tmp_path / "run")
    assert sum(step["groups/completed"] for step in steps) == 8
    assert sum(step["groups/filtered"] for step in steps) > 0
    kept = [r.prompt.row for record in records_of(tmp_path / "run") for r in record.groups]
    assert len(kept) == 8


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
    await train(config, tmp_path / "run")
    evaluated = [r for r in journal(tmp_path / "run") if "eval/accuracy" in r["metrics"]]
    assert [record["train_step"] for record in evaluated] == [0, 1, 2]
    kept_evaluations = read_evaluations(tmp_path / "run" / EVALUATIONS_FOLDER)
    for record, evaluation in zip(evaluated, kept_evaluations, strict=True):
        assert record["train_step"] == evaluation.train_step
        means = [question.mean for question in evaluation.questions]
        assert record["metrics"]["eval/accuracy"] == pytest.approx(sum(means) / len(means))
    assert not (tmp_path / "run" / TOKEN_KL_FOLDER).exists(), "there is no teacher"
    step = steps_of(tmp_path / "run")[0]
    assert step["rollout/reward_mean"] > 0
    assert step["grad_norm"] > 0
    assert not any(name.startswith("opd_reverse_kl") for name in step)
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-000001", "step-000002"]
    exported = tmp_path / "run" / "checkpoints" / kept[0] / "student"
    assert AutoModelForCausalLM.from_pretrained(exported).config.vocab_size == 20
    assert not records_of(tmp_path / "run", after=0)[1:], "covered by the oldest kept checkpoint"


async def test_a_teacher_that_stays_away_ends_the_run(
    student_dir: Path, data: Path, tmp_path: Path
) -> None:
    with reserve_ports(1) as reserved:
        url = f"http://127.0.0.1:{reserved.ports[0]}"
    with pytest.raises(TeacherAway, match="teacher 'teacher'"):
        await train(config_of(student_dir, data, url), tmp_path / "run")
