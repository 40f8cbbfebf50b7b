"""A run's numbers are read from its journal."""

from __future__ import annotations

import math

import pytest

from opd_core.tracking.journal import JournalRecord
from opd_core.training.results import Span, reverse_kl_span, summarise


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
