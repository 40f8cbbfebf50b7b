"""One update is the same however its batch is cut, and it moves towards the teacher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean as mean_of
from statistics import stdev
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from opd_core.errors import TrainingError
from opd_core.sampling.protocol import SampleRequest
from opd_core.sampling.transformers_engine import TransformersEngine
from opd_core.training.batch import MiniBatch, TrainBatch, TrainSample
from opd_core.training.learner import Learner
from opd_core.training.models import load_model, load_tokenizer
from tests.opd_core.training.engine import CPU, learner_of, opd_config, scored_batch


def weights_after(learner: Learner, batch: TrainBatch) -> tuple[dict[str, Any], dict[str, float]]:
    metrics = learner.update(batch)
    return learner.weights(), metrics


def test_any_micro_batch_split_gives_the_same_update(student_dir: Path, teacher_dir: Path) -> None:
    batch = scored_batch(student_dir, teacher_dir)
    whole, metrics = weights_after(learner_of(student_dir, opd_config()), batch)
    split, split_metrics = weights_after(
        learner_of(student_dir, opd_config(), micro_batch_tokens=1, logprob_chunk_tokens=3), batch
    )
    # Adam divides by the gradient's size, so compare to the learning rate, not to zero.
    assert max(float((whole[n] - split[n]).abs().max()) for n in whole) < 0.02 * 1e-3
    assert split_metrics["opd_reverse_kl"] == pytest.approx(metrics["opd_reverse_kl"], rel=1e-5)
    assert split_metrics["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)


def test_metrics_are_those_of_an_independent_computation(
    student_dir: Path, teacher_dir: Path
) -> None:
    batch = scored_batch(student_dir, teacher_dir)
    metrics = learner_of(student_dir, opd_config()).update(batch)
    gaps = [
        (own - theirs, sample.source_index)
        for sample in batch.mini_batches[0].samples
        for own, theirs in zip(sample.rollout_logprobs, sample.teacher_logprobs, strict=True)
    ]
    assert metrics["response_tokens"] == len(gaps)
    mean = mean_of([g for g, _ in gaps])
    assert metrics["opd_reverse_kl"] == pytest.approx(mean, abs=1e-5)
    of_b = [g for g, source in gaps if source == 1]
    assert metrics["opd_reverse_kl/b"] == pytest.approx(sum(of_b) / len(of_b), abs=1e-5)
    assert metrics["engine_logprob_gap"] < 1e-5
    samples = batch.mini_batches[0].samples
    own = [logprob for sample in samples for logprob in sample.rollout_logprobs]
    assert metrics["entropy"] == pytest.approx(-mean_of(own), abs=1e-5)
    theirs = [logprob for sample in samples for logprob in sample.teacher_logprobs]
    assert metrics["teacher_logprob_std"] == pytest.approx(stdev(theirs), abs=1e-5)


def test_the_teachers_part_of_the_advantages_is_told_beside_the_whole(
    student_dir: Path, teacher_dir: Path
) -> None:
    batch = scored_batch(student_dir, teacher_dir)
    (mini,) = batch.mini_batches
    rewarded = (replace(sample, task_advantage=8.0) for sample in mini.samples[:1])
    mini = replace(mini, samples=(*rewarded, *mini.samples[1:]))
    batch = replace(batch, mini_batches=(mini,), baseline=0.4)
    opd = opd_config(task_adv_weight=1.0, opd_adv_weight=0.5, kl_clamp=1.0)
    metrics = learner_of(student_dir, opd).update(batch)
    parts = [
        (sample.task_advantage, 0.5 * (0.4 - max(-1.0, min(1.0, own - theirs))))
        for sample in mini.samples
        for own, theirs in zip(sample.rollout_logprobs, sample.teacher_logprobs, strict=True)
    ]
    assert metrics["advantage_opd_std"] == pytest.approx(stdev(opd for _, opd in parts), abs=1e-5)
    sizes = [abs(sum(part)) for part in parts]
    share = max(sizes) / sum(sizes)
    assert metrics["advantage_top1pct_share"] == pytest.approx(share, abs=1e-5)


def test_updates_bring_the_student_closer_to_the_teacher(
    student_dir: Path, teacher_dir: Path
) -> None:
    """On fixed tokens, raising those the teacher likes more lowers the advantage-weighted gap."""
    batch = scored_batch(student_dir, teacher_dir)
    learner = learner_of(student_dir, opd_config(), learning_rate=3e-4)
    gaps = [learner.update(batch)["opd_abs_logprob_diff"] for _ in range(16)]
    assert gaps[-1] < 0.9 * gaps[0]


def test_a_teacher_equal_to_the_student_moves_nothing(student_dir: Path) -> None:
    batch = scored_batch(student_dir, student_dir)
    learner = learner_of(student_dir, opd_config())
    metrics = learner.update(batch)
    assert abs(metrics["opd_reverse_kl"]) < 1e-6
    assert metrics["grad_norm"] < 1e-5


def test_several_optimizer_steps_use_the_logprobs_from_before_the_first(
    student_dir: Path, teacher_dir: Path
) -> None:
    batch = scored_batch(student_dir, teacher_dir, mini_batches=3)
    learner = learner_of(student_dir, opd_config(), optimizer_steps_per_batch=3, learning_rate=1e-2)
    metrics = learner.update(batch)
    assert metrics["optimizer_steps"] == 3
    # k is measured against the weights before the batch: the sampler's own numbers.
    assert metrics["engine_logprob_gap"] < 1e-5
    assert metrics["ratio_clipped_fraction"] > 0


def test_a_batch_without_valid_tokens_takes_no_step(student_dir: Path) -> None:
    sample = TrainSample((3, 4, 5), 3, (), (), 0.0, 0)
    batch = TrainBatch((MiniBatch((sample,), 0),), ("a",), scored=True)
    learner = learner_of(student_dir, opd_config())
    before = learner.weights()
    after, metrics = weights_after(learner, batch)
    assert metrics["optimizer_steps"] == 0
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(student_dir: Path) -> None:
    sample = TrainSample((3, 4, 5), 1, (-1.0, -1.0), (float("-inf"), -1.0), 0.0, 0)
    batch = TrainBatch((MiniBatch((sample,), 2),), ("a",), scored=True)
    learner = learner_of(student_dir, opd_config())
    before = learner.weights()
    with pytest.raises(TrainingError, match="gradient norm"):
        learner.update(batch)
    assert all(torch.equal(before[name], w) for name, w in learner.weights().items())


def test_a_run_without_teacher_trains_on_the_task_reward_alone(student_dir: Path) -> None:
    sample = TrainSample((3, 4, 5, 6), 1, (-1.0, -1.0, -1.0), (), 1.0, 0)
    other = replace(sample, token_ids=(3, 7, 8, 9), task_advantage=-1.0)
    batch = TrainBatch((MiniBatch((sample, other), 6),), ("a",), scored=False)
    metrics = learner_of(student_dir).update(batch)
    assert metrics["grad_norm"] > 0
    assert not any("opd_" in name or "teacher" in name for name in metrics)
    assert metrics["entropy"] > 0


def test_the_saved_student_loads_and_generates(student_dir: Path, tmp_path: Path) -> None:
    path = learner_of(student_dir, opd_config()).save(tmp_path / "student")
    model = AutoModelForCausalLM.from_pretrained(path)
    prompt = load_tokenizer(str(path))("12+", return_tensors="pt")["input_ids"]
    assert model.generate(prompt, max_new_tokens=3, do_sample=False).shape[1] > prompt.shape[1]
    assert not list(tmp_path.glob("*.partial"))


def test_a_small_update_is_not_lost_in_a_short_dtype(student_dir: Path, teacher_dir: Path) -> None:
    learner = learner_of(student_dir, opd_config(), "bfloat16", learning_rate=1e-6)
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    learner.update(scored_batch(student_dir, teacher_dir))
    for name, parameter in learner.model.named_parameters():
        assert parameter.dtype == torch.float32
        assert (parameter != before[name]).double().mean() > 0.99, name


def test_a_short_dtype_is_that_of_the_forward_and_costs_little(
    student_dir: Path, teacher_dir: Path
) -> None:
    """The batch holds the exact fp32 logprobs: the gap to them is what the short forward costs."""
    batch = scored_batch(student_dir, teacher_dir)
    metrics = learner_of(student_dir, opd_config(), "bfloat16").update(batch)
    exact = learner_of(student_dir, opd_config()).update(batch)
    assert 1e-4 < metrics["engine_logprob_gap"] < 0.1
    assert metrics["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.1)


def test_samplers_get_the_weights_in_their_dtype(student_dir: Path) -> None:
    weights = learner_of(student_dir, opd_config(), "bfloat16").weights()
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    model = load_model(str(student_dir), "bfloat16", CPU).requires_grad_(False)
    engine = TransformersEngine(model, end_ids=[1], pad_id=0, max_rows=2)
    engine.load_weights(weights, policy_version=3)
    (((_, completion),),) = engine.sample([SampleRequest((0, 0), (3, 4), 7, 1)])
    assert completion.policy_versions == (3,)


def test_weights_that_were_handed_out_do_not_change_with_the_learner(
    student_dir: Path, teacher_dir: Path
) -> None:
    learner = learner_of(student_dir, opd_config())
    handed = learner.weights()
    kept = {name: w.clone() for name, w in handed.items()}
    learner.update(scored_batch(student_dir, teacher_dir))
    assert all(torch.equal(handed[name], kept[name]) for name in kept)
    assert not all(torch.equal(w, kept[name]) for name, w in learner.weights().items())


def test_the_student_is_saved_in_full_precision(student_dir: Path, tmp_path: Path) -> None:
    path = learner_of(student_dir, opd_config(), "bfloat16").save(tmp_path / "student")
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_memory_that_runs_out_is_told_with_what_to_lower(
    student_dir: Path, teacher_dir: Path
) -> None:
    learner = learner_of(student_dir, opd_config(), micro_batch_tokens=4321)
    learner.model.base_model.register_forward_pre_hook(lambda *_: torch.empty(2**58))
    with pytest.raises(TrainingError, match=r"out of memory on cpu.*micro_batch_tokens \(now 4321"):
        learner.update(scored_batch(student_dir, teacher_dir))


LORA = {"lora": {"rank": 4, "alpha": 8.0}}


def test_a_lora_student_trains_adapters_and_hands_out_a_plain_model(
    student_dir: Path, teacher_dir: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    plain = learner_of(student_dir, opd_config()).weights()
    learner = learner_of(student_dir, opd_config(), student=LORA, learning_rate=1e-2)
    before = learner.weights()
    assert set(before) == set(plain)
    assert all(torch.allclose(before[name], plain[name]) for name in plain)
    batch = scored_batch(student_dir, teacher_dir)
    gaps = [learner.update(batch)["opd_abs_logprob_diff"] for _ in range(8)]
    assert gaps[-1] < gaps[0]
    after = learner.weights()
    moved = {name for name in plain if not torch.equal(after[name], plain[name])}
    assert moved
    assert all("_proj" in name for name in moved), "embeddings, norms and the head are frozen"
    merged = AutoModelForCausalLM.from_pretrained(learner.save(tmp_path / "student"))
    base = AutoModelForCausalLM.from_pretrained(student_dir)
    adapted = PeftModel.from_pretrained(base, tmp_path / "student" / "adapter")
    ids = torch.tensor([[3, 4, 5, 6]])
    assert torch.allclose(merged(ids).logits, adapted(ids).logits, atol=1e-5)


def test_a_lora_students_checkpoint_holds_its_adapters_only_and_goes_on(
    student_dir: Path, teacher_dir: Path, tmp_path: Path
) -> None:
    batch = scored_batch(student_dir, teacher_dir)
    first = learner_of(student_dir, opd_config(), student=LORA)
    first.update(batch)
    first.start_checkpoint(tmp_path / "state")
    first.finish_checkpoint()
    again = learner_of(student_dir, opd_config(), student=LORA)
    again.restore(tmp_path / "state")
    assert first.update(batch) == again.update(batch)
    expected, found = first.weights(), again.weights()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("student", [{}, LORA])
def test_a_reference_pulls_as_a_teacher_with_the_same_weights_would(
    student_dir: Path, teacher_dir: Path, student: dict[str, Any]
) -> None:
    """After a first step towards another teacher, with the first student as teacher: then the
    reference's term is the teacher's once more."""
    away = scored_batch(student_dir, teacher_dir)
    back = scored_batch(student_dir, student_dir)
    without, with_reference = (
        learner_of(
            student_dir,
            opd_config(),
            student=student,
            learning_rate=1e-2,
            reference_kl_weight=weight,
        )
        for weight in (0.0, 1.0)
    )
    first = with_reference.update(away)
    assert first["reference_kl"] == pytest.approx(0.0, abs=1e-6), "it begins as itself"
    assert first["grad_norm"] == pytest.approx(without.update(away)["grad_norm"], rel=1e-5)
    single, double = without.update(back), with_reference.update(back)
    assert double["reference_kl"] == pytest.approx(double["opd_reverse_kl"], abs=1e-6)
    assert double["grad_norm"] == pytest.approx(2 * single["grad_norm"], rel=1e-4)
    assert abs(double["reference_kl"]) > 1e-3
