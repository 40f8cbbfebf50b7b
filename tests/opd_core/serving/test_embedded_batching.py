"""The queue alone, before a model on a gate: which batches form, and what happens to the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd_core.serving.embedded.batching import (
    LENGTH_RATIO,
    SHORT_LENGTH,
    BatchingScorer,
    ScorerUnavailable,
    ScoringFailed,
    choose_batch,
)
from opd_core.serving.embedded.requests import Model, RequestRefused, ScoreRequest

Start = Callable[..., BatchingScorer]
WAIT_S = 10


def _request(length: int, first: int = 1) -> ScoreRequest:
    return ScoreRequest(np.array([first] + [1] * (length - 1)), start=0)


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    max_tokens=st.integers(1, 8000),
)
def test_a_batch_holds_the_oldest_and_keeps_to_its_budget(
    lengths: list[int], max_tokens: int
) -> None:
    chosen = choose_batch(lengths, max_tokens=max_tokens)

    picked = [lengths[index] for index in chosen]
    assert 0 in chosen
    assert len(set(chosen)) == len(chosen)
    assert picked == sorted(picked)
    assert len(picked) == 1 or max(picked) * len(picked) <= max_tokens
    assert max(picked) <= max(SHORT_LENGTH, LENGTH_RATIO * min(picked)) or len(picked) == 1


def test_equal_lengths_fill_the_budget_exactly() -> None:
    assert len(choose_batch([100] * 50, max_tokens=1600)) == 16


def test_what_waits_while_a_batch_runs_goes_together_into_the_next(
    start_scorer: Start, gated_model: Any
) -> None:
    scorer = start_scorer(max_running_tokens=400)
    first = scorer.submit([_request(5)])
    gated_model.running()
    rest = [scorer.submit([_request(length)]) for length in (100, 90, 100, 80, 100)]
    gated_model.gate.set()

    for (future,) in [first, *rest]:
        future.result(WAIT_S)

    assert gated_model.batches == [[5], [90, 100, 100, 100], [80]]


def test_a_long_request_is_not_starved_by_a_flood_of_short_ones(
    start_scorer: Start, gated_model: Any
) -> None:
    scorer = start_scorer(max_running_tokens=1000)
    scorer.submit([_request(5)])
    gated_model.running()
    (long_one,) = scorer.submit([_request(5000)])
    flood = scorer.submit([_request(10) for _ in range(500)])
    gated_model.gate.set()

    long_one.result(WAIT_S)

    assert gated_model.batches[1] == [5000]
    assert all(future.result(WAIT_S) for future in flood)


def test_a_cancelled_request_leaves_its_neighbours_alone(
    start_scorer: Start, gated_model: Any
) -> None:
    scorer = start_scorer()
    scorer.submit([_request(5)])
    gated_model.running()
    left, cancelled, right = scorer.submit([_request(20), _request(21), _request(22)])
    assert cancelled.cancel()
    gated_model.gate.set()

    assert left.result(WAIT_S).logprobs.shape == (19,)
    assert right.result(WAIT_S).logprobs.shape == (21,)
    assert gated_model.batches == [[5], [20, 22]]


def test_a_failing_forward_fails_its_batch_and_not_the_next(
    start_scorer: Start, gated_model: Any
) -> None:
    scorer = start_scorer()
    scorer.submit([_request(5)])
    gated_model.running()
    poisoned = scorer.submit([_request(20, gated_model.POISON), _request(20)])
    (spared,) = scorer.submit([_request(900)])
    gated_model.gate.set()

    for future in poisoned:
        with pytest.raises(ScoringFailed, match="MemoryError: out of memory on this device"):
            future.result(WAIT_S)
    assert spared.result(WAIT_S).logprobs.shape == (899,)
    assert scorer.stats().failed_batches == 1


def test_more_sequences_than_the_queue_holds_are_refused_for_good(start_scorer: Start) -> None:
    with pytest.raises(RequestRefused, match="more than the queue holds"):
        start_scorer(max_queued_requests=3).submit([_request(5)] * 4)


def test_cancelled_requests_give_their_places_in_the_queue_back(
    start_scorer: Start, gated_model: Any
) -> None:
    scorer = start_scorer(max_queued_requests=2)
    scorer.submit([_request(5)])
    gated_model.running()
    for future in scorer.submit([_request(6), _request(7)]):
        assert future.cancel()

    assert len(scorer.submit([_request(8), _request(9)])) == 2


def test_closing_fails_what_waits_and_lets_the_running_batch_finish(
    start_scorer: Start, gated_model: Any
) -> None:
    scorer = start_scorer()
    (running,) = scorer.submit([_request(5)])
    gated_model.running()
    (waiting,) = scorer.submit([_request(6)])
    scorer.close()

    with pytest.raises(ScorerUnavailable, match="stopping"):
        waiting.result(WAIT_S)
    with pytest.raises(ScorerUnavailable, match="stopping"):
        scorer.submit([_request(5)])
    assert not running.done()
    gated_model.gate.set()
    assert running.result(WAIT_S).logprobs.shape == (4,)


def test_abandoning_answers_for_a_forward_that_does_not_end(
    start_scorer: Start, gated_model: Any
) -> None:
    scorer = start_scorer()
    (running,) = scorer.submit([_request(5)])
    gated_model.running()
    scorer.close()
    scorer.abandon()

    with pytest.raises(ScorerUnavailable, match="stopping"):
        running.result(0)


def test_a_load_that_fails_is_kept_and_reported() -> None:
    scorer = BatchingScorer()
    told = threading.Event()

    def load() -> Model:
        raise OSError("no such weights")

    scorer.start(load, on_failure=told.set)

    assert told.wait(WAIT_S)
    assert str(scorer.failure) == "no such weights"
    assert scorer.join(WAIT_S)
