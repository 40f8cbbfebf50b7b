"""Settings of the training engine: shards, schedule, stop, adapters, pass@k, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from opd_core.config import EvaluationConfig, LoRAConfig, StopConfig, StudentConfig, TrainingConfig


def training(**changes: Any) -> TrainingConfig:
    needed = {"steps": 1, "prompts_per_step": 1, "learning_rate": 1e-6}
    return TrainingConfig.model_validate(needed | changes)


def test_without_new_settings_nothing_is_new() -> None:
    config = training()
    assert (config.schedule, config.final_learning_rate) == ("constant", 0.0)
    assert (config.reference_kl_weight, config.stop_when, config.shard_ranks) == (0.0, None, None)
    assert EvaluationConfig().pass_at == ()
    assert StudentConfig(model="/m").lora is None


# ------------------------------------------------------------------ shards


@pytest.mark.parametrize("ranks", [1, 2, 4, None])
def test_shards_divide_the_training_actors(ranks: int | None) -> None:
    assert training(actors=4, shard_ranks=ranks).shard_ranks == ranks


@pytest.mark.parametrize("ranks", [3, 8])
def test_shards_that_leave_actors_over_are_refused(ranks: int) -> None:
    told = f"shard_ranks: {ranks} does not divide the 4 training actors: name a divisor, or null"
    with pytest.raises(ValidationError, match=told):
        training(actors=4, shard_ranks=ranks)


def test_a_shard_has_at_least_one_rank() -> None:
    with pytest.raises(ValidationError, match="shard_ranks"):
        training(shard_ranks=0)


# ------------------------------------------------------------------ schedule


def test_a_schedule_may_end_where_it_began_and_not_above() -> None:
    assert training(schedule="cosine", final_learning_rate=1e-6).final_learning_rate == 1e-6
    with pytest.raises(ValidationError, match="the schedules only fall: lower it"):
        training(schedule="cosine", final_learning_rate=2e-6)


@pytest.mark.parametrize(("name", "value"), [("schedule", "step"), ("final_learning_rate", -1e-7)])
def test_a_schedule_that_is_none_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=name):
        training(**{name: value})


# ------------------------------------------------------------------ stop


def test_a_target_is_accuracy_unless_it_is_named() -> None:
    stop = training(stop_when={"at_least": 0.8}).stop_when
    assert stop == StopConfig(metric="eval/accuracy", at_least=0.8, at_most=None)


@pytest.mark.parametrize("bounds", [{}, {"at_least": 0.1, "at_most": 0.9}])
def test_a_target_has_one_bound(bounds: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="name either 'at_least' or 'at_most'"):
        StopConfig.model_validate(bounds)


def test_a_bound_of_zero_is_one() -> None:
    assert StopConfig(metric="opd_reverse_kl", at_most=0.0).at_most == 0.0


# ------------------------------------------------------------------ pass@k


def test_pass_at_k_needs_as_many_samples() -> None:
    assert EvaluationConfig(samples=8, pass_at=(1, 8)).pass_at == (1, 8)
    with pytest.raises(ValidationError, match=r"pass@9 needs at least so many evaluation\.samples"):
        EvaluationConfig(samples=8, pass_at=(1, 9))


@pytest.mark.parametrize("pass_at", [(0,), (-1, 2), (2, 2)])
def test_pass_at_names_distinct_numbers_from_one(pass_at: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match="expected distinct numbers from 1"):
        EvaluationConfig(samples=8, pass_at=pass_at)


# ------------------------------------------------------------------ adapters


def test_adapters_are_read_from_a_recipes_lists_and_words() -> None:
    lora = StudentConfig.model_validate(
        {"model": "/m", "lora": {"rank": 8, "target_modules": ["q_proj", "v_proj"]}}
    ).lora
    assert lora == LoRAConfig(rank=8, alpha=32.0, target_modules=("q_proj", "v_proj"))
    assert LoRAConfig().target_modules == "all-linear"


@pytest.mark.parametrize(("name", "value"), [("rank", 0), ("alpha", 0.0), ("dropout", 0.1)])
def test_adapters_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        LoRAConfig.model_validate({name: value})
