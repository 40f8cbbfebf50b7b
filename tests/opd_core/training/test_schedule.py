"""Learning rates by hand: warm-up, then level or down to the final one at the last step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd_core.config import TrainingConfig
from opd_core.training.schedule import learning_rate_factor


def factors(count: int, **settings: Any) -> list[float]:
    """Those of the first ``count`` optimizer steps; the peak is 1e-3."""
    config = TrainingConfig(prompts_per_step=1, learning_rate=1e-3, **settings)
    return [learning_rate_factor(step, config) for step in range(count)]


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_without_a_schedule_it_is_the_warmup_of_old(warmup: int) -> None:
    of_old = [min(1.0, (step + 1) / max(warmup, 1)) for step in range(9)]
    assert factors(9, steps=8, warmup_steps=warmup) == of_old


def test_a_line_falls_to_nothing_at_the_last_step() -> None:
    assert factors(5, steps=5, schedule="linear") == pytest.approx([1, 0.75, 0.5, 0.25, 0])


def test_a_line_ends_at_the_final_learning_rate() -> None:
    found = factors(5, steps=5, schedule="linear", final_learning_rate=2e-4)
    assert found == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


def test_a_cosine_passes_its_middle_halfway() -> None:
    # (1 + cos 45°) / 2 = 0.853553…, (1 + cos 135°) / 2 = 0.146446…
    found = factors(5, steps=5, schedule="cosine")
    assert found == pytest.approx([1, 0.8535534, 0.5, 0.1464466, 0], abs=1e-7)
    found = factors(5, steps=5, schedule="cosine", final_learning_rate=5e-4)
    assert found == pytest.approx([1, 0.9267767, 0.75, 0.5732233, 0.5], abs=1e-7)


def test_the_fall_begins_after_the_warmups_peak() -> None:
    found = factors(6, steps=6, warmup_steps=3, schedule="linear")
    assert found == pytest.approx([1 / 3, 2 / 3, 1, 2 / 3, 1 / 3, 0])


def test_optimizer_steps_are_counted_not_train_steps() -> None:
    several = factors(6, steps=2, optimizer_steps_per_batch=3, schedule="cosine")
    assert several == factors(6, steps=6, schedule="cosine")


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [4, 10])
def test_a_warmup_that_takes_all_steps_leaves_nothing_to_fall(schedule: str, warmup: int) -> None:
    found = factors(4, steps=4, warmup_steps=warmup, schedule=schedule)
    assert found == [(step + 1) / warmup for step in range(4)]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_single_step_is_taken_at_the_peak(schedule: str) -> None:
    assert factors(1, steps=1, schedule=schedule) == [1.0]


@given(
    steps=st.integers(1, 40),
    warmup=st.integers(0, 50),
    final=st.floats(0, 1e-3),
    schedule=st.sampled_from(["linear", "cosine"]),
)
def test_it_rises_to_the_peak_and_falls_no_deeper_than_the_final_rate(
    steps: int, warmup: int, final: float, schedule: str
) -> None:
    found = factors(
        steps + 3, steps=steps, warmup_steps=warmup, final_learning_rate=final, schedule=schedule
    )
    peak = max(warmup, 1) - 1
    assert found[: peak + 1] == sorted(found[: peak + 1])
    assert found[peak:] == sorted(found[peak:], reverse=True)
    assert all(0 < factor <= 1 for factor in found[: peak + 1])
    assert all(factor >= final / 1e-3 - 1e-12 for factor in found[peak:])
    if steps - 1 > peak:
        assert found[steps - 1 :] == pytest.approx([final / 1e-3] * 4, abs=1e-12)
