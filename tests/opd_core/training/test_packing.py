"""Any plan trains every sample once, within the budget; a micro-batch's fields stay aligned."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opd_core.training.batch import TrainSample
from opd_core.training.packing import MicroBatch, Plan, collate, plan, work

HIDDEN = 8
CPU = torch.device("cpu")

lengths = st.lists(st.integers(2, 60), max_size=40)
budgets = st.integers(1, 200)
some_ranks = st.integers(1, 5)


def sample_of(number: int, length: int, prompt_tokens: int = 1) -> TrainSample:
    responses = length - prompt_tokens
    return TrainSample(
        tuple(range(2, 2 + length)),
        prompt_tokens,
        tuple(-float(i + 1) for i in range(responses)),
        tuple(-float(i + 1) / 2 for i in range(responses)),
        number + 0.5,
        number,
    )


def planned(
    lengths: list[int], ranks: int, max_tokens: int, packed: bool, hidden: int = HIDDEN
) -> Plan:
    samples = [sample_of(i, length) for i, length in enumerate(lengths)]
    return plan(samples, ranks=ranks, max_tokens=max_tokens, packed=packed, hidden_size=hidden)


def lengths_of(found: Plan) -> list[list[list[int]]]:
    return [[[len(s.token_ids) for s in part] for part in rank] for rank in found]


def tokens_of(part: list[int], packed: bool) -> int:
    return sum(part) if packed else len(part) * max(part, default=0)


def work_of(part: list[int], packed: bool) -> float:
    counted = part if packed else [max(part, default=0)] * len(part)
    return sum(n + n * n / (12 * HIDDEN) for n in counted)


@given(lengths, some_ranks, budgets, st.booleans())
def test_every_sample_is_planned_once_on_ranks_with_equally_many_micro_batches(
    lengths: list[int], ranks: int, max_tokens: int, packed: bool
) -> None:
    found = planned(lengths, ranks, max_tokens, packed)
    assert len(found) == ranks
    assert len({len(rank) for rank in found}) == 1
    numbers = [s.source_index for rank in found for part in rank for s in part]
    assert sorted(numbers) == list(range(len(lengths)))


@given(lengths, some_ranks, budgets, st.booleans())
def test_only_a_sample_of_its_own_exceeds_the_budget(
    lengths: list[int], ranks: int, max_tokens: int, packed: bool
) -> None:
    for rank in lengths_of(planned(lengths, ranks, max_tokens, packed)):
        for part in rank:
            assert len(part) <= 1 or tokens_of(part, packed) <= max_tokens
            assert part == sorted(part, reverse=True)


@given(lengths, some_ranks, budgets)
def test_packed_micro_batches_are_few(lengths: list[int], ranks: int, max_tokens: int) -> None:
    """First-fit leaves at most one micro-batch half empty: any two hold more than the budget."""
    rounds = len(planned(lengths, ranks, max_tokens, packed=True)[0])
    enough = 2 * sum(min(length, max_tokens) for length in lengths) / max_tokens + 1
    assert rounds * ranks < enough + ranks


def test_company_is_chosen_where_neighbours_would_need_more_micro_batches() -> None:
    found = planned([40, 40, 40, 60, 60, 60], 1, 100, packed=True)
    assert lengths_of(found) == [[[60, 40], [60, 40], [60, 40]]]


@given(st.lists(st.integers(2, 60), min_size=1, max_size=40), st.integers(1, 6), st.booleans())
def test_work_is_shared_out(lengths: list[int], ranks: int, packed: bool) -> None:
    """Cut anywhere, a part need exceed an even share by one sample at most (padded: what that
    share's padding adds is bounded by the longest of it, so equal lengths are tried)."""
    if not packed:
        lengths = [lengths[0]] * len(lengths)
    found = lengths_of(planned(lengths, ranks, 10_000, packed))
    loads = [work_of(part, packed) for rank in found for part in rank]
    assert len(loads) == ranks
    assert max(loads) <= (sum(loads) / ranks + work_of([max(lengths)], packed)) * (1 + 1e-4)


@given(st.sets(st.integers(2, 200), max_size=30), some_ranks, budgets, st.booleans(), st.integers())
def test_the_order_of_samples_of_different_lengths_changes_nothing(
    lengths: set[int], ranks: int, max_tokens: int, packed: bool, seed: int
) -> None:
    samples = [sample_of(length, length) for length in sorted(lengths)]
    shuffled = random.Random(seed).sample(samples, len(samples))
    first, second = (
        plan(given, ranks=ranks, max_tokens=max_tokens, packed=packed, hidden_size=HIDDEN)
        for given in (samples, shuffled)
    )
    assert first == second


def test_samples_of_one_length_keep_their_order() -> None:
    (rank,) = planned([5, 5, 5, 5], 1, 10, packed=True)
    assert [[s.source_index for s in part] for part in rank] == [[0, 1], [2, 3]]


def test_micro_batches_that_run_together_are_alike_and_the_largest_alternates() -> None:
    found = lengths_of(planned([40, 30, 20, 10], 2, 40, packed=True))
    assert found == [[[40], [10]], [[30], [20]]]


@given(lengths, some_ranks, budgets, st.booleans())
def test_no_micro_batch_has_more_work_than_one_that_runs_before_it(
    lengths: list[int], ranks: int, max_tokens: int, packed: bool
) -> None:
    found = lengths_of(planned(lengths, ranks, max_tokens, packed))
    rounds = [[work_of(part, packed) for part in parts] for parts in zip(*found, strict=True)]
    for earlier, later in pairwise(rounds):
        assert min(earlier) >= max(later)


def test_few_samples_leave_ranks_with_empty_micro_batches() -> None:
    assert lengths_of(planned([9], 3, 100, packed=True)) == [[[9]], [[]], [[]]]
    assert planned([], 2, 100, packed=True) == [[], []]


def test_work_counts_attention_against_linear_layers() -> None:
    # At n = 12 H attention does as much as the linear layers: 2 H n^2 = 24 H^2 n.
    assert work(12 * 64, 64) == 2 * 12 * 64
    assert work(1, 4096) == pytest.approx(1, rel=1e-4)


def batch_of(packed: bool) -> MicroBatch:
    samples = [sample_of(0, 3), sample_of(1, 2), sample_of(2, 2)]
    return collate(samples, packed=packed, pad_id=0, device=CPU)


def test_every_field_of_a_packed_micro_batch_describes_its_token() -> None:
    batch = batch_of(packed=True)
    assert batch.token_ids.tolist() == [[2, 3, 4, 2, 3, 2, 3]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert batch.response_mask.tolist() == [[False, True, True, False, True, False, True]]
    assert batch.rollout_logprobs.tolist() == [[0, -1, -2, 0, -1, 0, -1]]
    assert batch.teacher_logprobs.tolist() == [[0, -0.5, -1, 0, -0.5, 0, -0.5]]
    assert batch.task_advantages.tolist() == [[0.5, 0.5, 0.5, 1.5, 1.5, 2.5, 2.5]]
    assert batch.source_index.tolist() == batch.rollout_index.tolist() == [[0, 0, 0, 1, 1, 2, 2]]
    assert batch.flat.tolist() == [1, 2, 4, 6]
    assert batch.model_inputs["boundaries"].runs == ((1, 3), (2, 2))
    assert batch.model_inputs["boundaries"].cumulative.tolist() == [0, 3, 5, 7]


def test_every_field_of_a_padded_micro_batch_describes_its_token() -> None:
    batch = batch_of(packed=False)
    assert batch.token_ids.tolist() == [[2, 3, 4], [2, 3, 0], [2, 3, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2]] * 3
    assert batch.response_mask.tolist() == [[False, True, True], *[[False, True, False]] * 2]
    assert batch.task_advantages.tolist() == [[0.5] * 3, [1.5, 1.5, 0], [2.5, 2.5, 0]]
    assert batch.rollout_index.tolist() == [[0, 0, 0], [1, 1, 0], [2, 2, 0]]
    assert batch.flat.tolist() == [1, 2, 4, 7]
    assert batch.model_inputs == {}


@pytest.mark.parametrize("packed", [True, False])
def test_a_tools_tokens_are_context_and_each_token_has_its_staleness(packed: bool) -> None:
    plain = sample_of(0, 5)
    changed = replace(plain, response_mask=(True, False, False, True), staleness=(2, 2, 1, 1))
    assert (plain.response_tokens, changed.response_tokens) == (4, 2)
    batch = collate([changed, plain], packed=packed, pad_id=0, device=CPU)
    assert batch.token_ids.flatten().tolist() == [2, 3, 4, 5, 6] * 2
    masks = [[False, True, False, False, True], [False, True, True, True, True]]
    assert batch.response_mask.view(2, 5).tolist() == masks
    assert batch.staleness.view(2, 5).tolist() == [[0, 2, 2, 1, 1], [0] * 5]
    assert batch.flat.tolist() == [1, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("packed", [True, False])
def test_unscored_samples_have_no_teacher_logprobs(packed: bool) -> None:
    sample = TrainSample((2, 3), 1, (-1.0,), (), 0.0, 0)
    batch = collate([sample], packed=packed, pad_id=0, device=CPU)
    assert batch.teacher_logprobs.tolist() == [[0, 0]]


@pytest.mark.parametrize("packed", [True, False])
def test_an_empty_micro_batch_is_one_pad_token_that_does_not_train(packed: bool) -> None:
    batch = collate([], packed=packed, pad_id=7, device=CPU)
    assert batch.token_ids.tolist() == [[7]]
    assert batch.response_mask.tolist() == [[False]]
    assert batch.flat.tolist() == []
    assert batch.samples == ()
