"""The teacher's own gradient is measured beside the update, and leaves it as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from opd_core.config import OPDConfig
from opd_core.training.batch import TrainBatch, TrainSample
from opd_core.training.learner import Learner
from tests.opd_core.training.engine import learner_of, opd_config, scored_batch, with_tools
from tests.opd_core.training.whole_loop import config_of, steps_of, train

MIXED = {"task_adv_weight": 0.7, "opd_adv_weight": 0.5}


def measured_batch(student: Path, teacher: Path, **changes: Any) -> TrainBatch:
    """Tool tokens, stale tokens and task advantages; the teacher's gradient is asked for."""
    batch = with_tools(scored_batch(student, teacher, **changes))
    minis = tuple(
        replace(mini, samples=tuple(replace(s, task_advantage=0.5 - n % 3) for n, s in numbered))
        for mini in batch.mini_batches
        for numbered in [list(enumerate(mini.samples))]
    )
    return replace(batch, mini_batches=minis, measure_teacher=True)


def gradient_norm_by_autograd(
    student: Path, samples: Sequence[TrainSample], weight: float, cap: float | None = None
) -> float:
    """Of -sum w * A * logprob / tokens with A = weight * (teacher - student), by the library's
    model."""
    model = AutoModelForCausalLM.from_pretrained(student)
    loss, tokens = torch.zeros(()), 0
    for sample in samples:
        ids = torch.tensor([sample.token_ids])
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        own = logprobs[sample.prompt_tokens - 1 :]
        mask = torch.tensor(sample.response_mask)
        gap = torch.tensor(sample.teacher_logprobs) - own.detach()
        ratio = (own.detach() - torch.tensor(sample.rollout_logprobs)).exp()
        weighed = torch.ones_like(own) if cap is None else ratio.clamp(max=cap)
        loss = loss - (weighed * weight * gap * own)[mask].sum()
        tokens += int(mask.sum())
    (loss / tokens).backward()  # type: ignore[no-untyped-call]
    return float(torch.stack([p.grad.norm() for p in model.parameters()]).norm())


@pytest.mark.parametrize(
    ("opd", "settings"),
    [
        (opd_config(**MIXED), {"micro_batch_tokens": 20}),
        (opd_config(**MIXED), {"importance_cap": 1.5, "packing": False}),
        (opd_config(opd_adv_weight=0.5), {"reference_kl_weight": 0.3}),
    ],
    ids=["task reward", "task reward and importance weights", "reference"],
)
def test_it_is_the_gradient_of_the_teachers_term_alone(
    student_dir: Path, teacher_dir: Path, opd: OPDConfig, settings: dict[str, Any]
) -> None:
    batch = measured_batch(student_dir, teacher_dir)
    metrics = learner_of(student_dir, opd, **settings).update(batch)
    samples, cap = batch.mini_batches[0].samples, settings.get("importance_cap")
    wanted = gradient_norm_by_autograd(student_dir, samples, 0.5, cap)
    assert metrics["grad_norm_teacher"] == pytest.approx(wanted, rel=1e-4)


def test_with_several_optimizer_steps_it_is_that_of_the_first(
    student_dir: Path, teacher_dir: Path
) -> None:
    batch = measured_batch(student_dir, teacher_dir, mini_batches=2)
    settings = {"optimizer_steps_per_batch": 2, "learning_rate": 1e-2}
    metrics = learner_of(student_dir, opd_config(**MIXED), **settings).update(batch)
    first = gradient_norm_by_autograd(student_dir, batch.mini_batches[0].samples, 0.5)
    assert metrics["grad_norm_teacher"] == pytest.approx(first, rel=1e-4)


@pytest.mark.parametrize("student", [{}, {"lora": {"rank": 4, "alpha": 8.0}}], ids=["all", "lora"])
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_measuring_changes_no_bit_of_the_update(
    student_dir: Path, teacher_dir: Path, student: dict[str, Any], mini_batches: int
) -> None:
    batch = measured_batch(student_dir, teacher_dir, mini_batches=mini_batches)
    settings = {"optimizer_steps_per_batch": mini_batches, "reference_kl_weight": 0.3}
    measuring, other = (
        learner_of(student_dir, opd_config(**MIXED), student=student, **settings) for _ in range(2)
    )
    for _ in range(2):
        told = measuring.update(batch)
        del told["grad_norm_teacher"]
        assert told == other.update(replace(batch, measure_teacher=False))
    expected, found = other.weights(), measuring.weights()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


REFERRED = {"reference_kl_weight": 0.5}


@pytest.mark.parametrize(
    ("opd", "settings", "asked", "passes"),
    [
        (opd_config(**MIXED), {}, True, 2),
        (opd_config(), REFERRED, True, 2),
        (opd_config(**MIXED), {}, False, 1),
        (opd_config(), REFERRED, False, 1),
        (opd_config(task_adv_weight=1.0, opd_adv_weight=0.0), {}, True, 1),
        (None, {}, True, 1),
    ],
)
def test_beside_other_terms_it_costs_a_pass_and_only_where_it_is_asked_for(
    student_dir: Path,
    teacher_dir: Path,
    opd: OPDConfig | None,
    settings: dict[str, Any],
    asked: bool,
    passes: int,
) -> None:
    batch = measured_batch(student_dir, teacher_dir)
    batch = replace(batch, measure_teacher=asked, scored=opd is not None)
    metrics, forwards = counted(learner_of(student_dir, opd, **settings), batch)
    assert forwards == passes
    assert ("grad_norm_teacher" in metrics) == (passes == 2)


@pytest.mark.parametrize("asked", [True, False])
def test_of_a_teacher_alone_it_is_the_whole_gradient_and_costs_no_pass(
    student_dir: Path, teacher_dir: Path, asked: bool
) -> None:
    batch = replace(measured_batch(student_dir, teacher_dir), measure_teacher=asked)
    metrics, forwards = counted(learner_of(student_dir, opd_config()), batch)
    assert forwards == 1
    assert metrics["grad_norm_teacher"] == metrics["grad_norm"] > 0


def counted(learner: Learner, batch: TrainBatch) -> tuple[dict[str, float], int]:
    """The metrics of an update, and how often the student ran for it."""
    forwards: list[int] = []
    learner.model.base_model.register_forward_pre_hook(lambda *_: forwards.append(1))
    return learner.update(batch), len(forwards)


@pytest.mark.parametrize(("every", "steps"), [(2, [1, 2, 4]), (0, [])])
async def test_a_run_measures_in_its_first_train_step_and_in_each_nth(
    student_dir: Path,
    data: Path,
    teacher_url: str,
    tmp_path: Path,
    every: int,
    steps: list[int],
) -> None:
    config = config_of(
        student_dir,
        data,
        teacher_url,
        opd={"task_adv_weight": 1.0},
        task={"group_size": 3, "judge": "loop_filters:length"},
        training={"steps": 5, "teacher_gradient_every": every},
    )
    await train(config, tmp_path / "run")
    told = steps_of(tmp_path / "run")
    assert [n for n, step in enumerate(told, 1) if "grad_norm_teacher" in step] == steps
