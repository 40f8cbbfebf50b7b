"""A run's numbers are read from its journal."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from opd_core.tracking.journal import JournalRecord
from opd_core.training.results import RunResult, Span, read_result, reverse_kl_span, summarise


def step(kl: float, tokens: float = 10.0, stderr: float = 0.1) -> dict[str, float]:
    return {"opd_reverse_kl": kl, "response_tokens": tokens, "opd_reverse_kl_stderr": stderr}


def test_before_and_after_are_token_weighted_means_of_five_steps() -> None:
    steps = [step(1.0, 10), step(2.0, 30), *[step(1.0, 20)] * 3, *[step(9.0)] * 5]
    steps += [*[step(0.5, 10)] * 4, step(0.0, 60)]
    span = reverse_kl_span(steps)
    assert span.before == pytest.approx((10 + 60 + 60) / 100)
    assert span.after == pytest.approx(20 / 100)
    assert span.after_stderr == pytest.approx(math.sqrt(4 * 1.0 + 36.0) / 100)


def test_the_two_means_never_share_a_step() -> None:
    span = reverse_kl_span([step(4.0), step(3.0), step(100.0), step(2.0), step(1.0)])
    assert (span.before, span.after) == (3.5, 1.5)


def test_one_step_has_no_after_and_none_has_nothing() -> None:
    assert reverse_kl_span([step(4.0)]) == Span(4.0, before_stderr=0.1)
    assert reverse_kl_span([]) == Span()


def test_a_run_without_teacher_has_no_reverse_kl() -> None:
    assert reverse_kl_span([{"response_tokens": 5.0}] * 3) == Span()


def test_lost_groups_of_a_step_that_never_trained_are_counted() -> None:
    records = [JournalRecord(1, 0.0, {"groups/failed": 3.0, "lost/timeout": 3.0})]
    numbers = summarise(records)
    assert numbers.train_steps == 0
    assert numbers.groups == {"failed": 3}
    assert numbers.lost == {"timeout": 3}


def test_seconds_of_earlier_attempts_are_left_out_and_everything_else_is_of_the_whole_run() -> None:
    took = {"time/step_s": 9.0, "time/sampling_s": 2.0, "time/scoring_s": 1.0}
    took |= {"time/training_s": 3.0, "time/weight_sync_s": 0.5, "groups/completed": 4.0}
    records = [JournalRecord(1, 10.0, took), JournalRecord(2, 20.0, took)]
    records.append(JournalRecord(2, 21.0, {"time/evaluation_s": 7.0}))
    numbers = summarise(records, since_s=20.0)
    assert numbers.train_steps == 2
    assert numbers.groups == {"completed": 8}
    assert numbers.seconds == {
        "sampling": 2.0,
        "scoring": 1.0,
        "training": 3.0,
        "weight_sync": 0.5,
        "evaluation": 7.0,
    }


def test_the_last_pass_at_k_counts_in_the_order_of_k() -> None:
    told = [{"eval/pass_at_16": 0.5, "eval/pass_at_2": 0.1}, {"opd_reverse_kl/x": 1.0}]
    told.append({"eval/pass_at_2": 0.2, "eval/pass_at_2_stderr": 0.01})
    numbers = summarise([JournalRecord(n, 0.0, metrics) for n, metrics in enumerate(told)])
    assert list(numbers.pass_at.items()) == [("2", 0.2), ("16", 0.5)]


def test_a_result_says_whether_another_job_can_go_on(tmp_path: Path) -> None:
    died = RunResult("failed", "ActorLost", "gone", restartable=True, stopped="")
    died.write(tmp_path)
    assert read_result(tmp_path) == died
