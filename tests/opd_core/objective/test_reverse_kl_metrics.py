"""Token metrics of one process, by hand and against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opd_core.objective.metrics import group_stderr, reverse_kl_metrics, teacher_metrics

SOURCES = ("math", "code")
finite = st.floats(-50, 50, allow_nan=False, width=32)


def metrics_of(
    k: list[float],
    advantages: list[float] | None = None,
    clamped: list[bool] | None = None,
    source: list[int] | None = None,
    sources: tuple[str, ...] = SOURCES,
) -> dict[str, Tensor]:
    """Metrics of plain lists; what is not given is zero."""
    n = len(k)
    return reverse_kl_metrics(
        reverse_kl=torch.tensor(k, dtype=torch.float32),
        advantages=torch.tensor(advantages or [0.0] * n, dtype=torch.float32),
        clamped=torch.tensor(clamped or [False] * n, dtype=torch.bool),
        source_index=torch.tensor(source or [0] * n, dtype=torch.int64),
        sources=sources,
    )


def test_numbers_by_hand() -> None:
    result = metrics_of(
        [1.0, -2.0, 4.0, 0.0], [-1.0, 2.0, -3.0, 6.0], [False, False, True, False], [0, 1, 0, 1]
    )

    assert {name: value.item() for name, value in result.items()} == pytest.approx(
        {
            "opd_reverse_kl": 0.75,
            "opd_abs_logprob_diff": 1.75,
            # Ascending -2, 0, 1, 4: positions 1.5, 2.85, 2.97.
            "opd_reverse_kl_p50": 0.5,
            "opd_reverse_kl_p95": 3.55,
            "opd_reverse_kl_p99": 3.91,
            "opd_clamped_fraction": 0.25,
            "advantage_mean": 1.0,
            # Deviations -2, 1, -4, 5: variance 46 / 3.
            "advantage_std": 3.9157800414902435,
            "advantage_min": -3.0,
            "advantage_max": 6.0,
            # The largest of 4, as 1 % of them is no whole token: 6 of 1 + 2 + 3 + 6.
            "advantage_top1pct_share": 0.5,
            "response_tokens": 4.0,
            "opd_reverse_kl/math": 2.5,
            "opd_reverse_kl/code": -1.0,
            "response_tokens/math": 2.0,
            "response_tokens/code": 2.0,
        }
    )


def test_every_metric_is_an_fp64_scalar_so_that_one_stack_moves_them_to_the_host() -> None:
    result = metrics_of([1.0, 2.0])
    assert {(value.dtype, value.shape) for value in result.values()} == {
        (torch.float64, torch.Size([]))
    }


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(finite, finite, st.integers(0, 1)), min_size=2, max_size=40))
def test_equals_numpy(rows: list[tuple[float, float, int]]) -> None:
    k, advantages, source = (list(column) for column in zip(*rows, strict=True))
    numpy_k, numpy_a = np.array(k), np.array(advantages)

    result = {name: v.item() for name, v in metrics_of(k, advantages, source=source).items()}

    assert result["opd_reverse_kl"] == pytest.approx(numpy_k.mean(), abs=1e-9)
    for percent in (50, 95, 99):
        assert result[f"opd_reverse_kl_p{percent}"] == pytest.approx(
            np.percentile(numpy_k, percent), abs=1e-9
        )
    assert result["advantage_std"] == pytest.approx(numpy_a.std(ddof=1), abs=1e-9)
    for index, name in enumerate(SOURCES):
        members = numpy_k[np.array(source) == index]
        expected = members.mean() if len(members) else 0.0
        assert result[f"opd_reverse_kl/{name}"] == pytest.approx(expected, abs=1e-9)
        assert result[f"response_tokens/{name}"] == len(members)


def test_the_sum_keeps_small_values_beside_large_ones() -> None:
    result = metrics_of([2.0**24, 1.0, 1.0, 1.0, 1.0, -(2.0**24)])
    assert result["opd_reverse_kl"].item() == 4 / 6


def test_no_token_gives_zeros() -> None:
    assert {value.item() for value in metrics_of([]).values()} == {0.0}


def test_one_token_has_no_spread() -> None:
    result = metrics_of([3.0], [-3.0])
    assert result["advantage_std"].item() == 0.0
    assert [result[f"opd_reverse_kl_{q}"].item() for q in ("p50", "p95", "p99")] == [3.0] * 3


def test_a_source_without_tokens_is_zero_and_its_token_count_says_so() -> None:
    result = metrics_of([3.0, 5.0], source=[0, 0])
    assert result["opd_reverse_kl/math"].item() == 4.0
    assert result["opd_reverse_kl/code"].item() == 0.0
    assert result["response_tokens/code"].item() == 0.0


def test_columns_of_a_gathered_fp64_table_are_accepted_as_they_are() -> None:
    table = torch.tensor([[1.0, -1.0, 0.0, 0.0], [3.0, -2.0, 1.0, 1.0]], dtype=torch.float64)
    k, advantages, clamped, source_index = table.unbind(dim=1)

    from_table = reverse_kl_metrics(
        reverse_kl=k,
        advantages=advantages,
        clamped=clamped,
        source_index=source_index,
        sources=SOURCES,
    )

    assert from_table == metrics_of([1.0, 3.0], [-1.0, -2.0], [False, True], [0, 1])


def test_more_tokens_than_torch_quantile_takes() -> None:
    n = 2**24 + 1
    k = torch.arange(n, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(k, 0.5)
    nothing = torch.zeros((), dtype=torch.float64).expand(n)

    result = reverse_kl_metrics(
        reverse_kl=k, advantages=nothing, clamped=nothing, source_index=nothing, sources=()
    )

    assert result["opd_reverse_kl_p50"].item() == pytest.approx(0.50 * 2**24)
    assert result["opd_reverse_kl_p99"].item() == pytest.approx(0.99 * 2**24)
    assert result["opd_reverse_kl"].item() == 2**23


def test_fields_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one shape \[N\]"):
        metrics_of([1.0, 2.0], [1.0])


def test_a_source_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="distinct data sources"):
        metrics_of([1.0], sources=("math", "math"))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_top_share_is_that_of_the_largest_hundredth_whatever_its_sign(sign: float) -> None:
    of_399 = metrics_of([0.0] * 399, [1.0] * 393 + [sign * 100.0] * 6)
    # 1 % of 399 tokens is 3 whole ones.
    assert of_399["advantage_top1pct_share"].item() == pytest.approx(300 / 993)
    alike = metrics_of([0.0] * 500, [sign * 2.0] * 500)
    assert alike["advantage_top1pct_share"].item() == pytest.approx(0.01)


def test_advantages_of_zero_have_no_top_share() -> None:
    assert metrics_of([1.0, 2.0])["advantage_top1pct_share"].item() == 0.0


def teacher_of(old: list[float], k: list[float], opd_term: list[float]) -> dict[str, float]:
    fields = (torch.tensor(values, dtype=torch.float32) for values in (old, k, opd_term))
    names = ("old_logprobs", "reverse_kl", "opd_term")
    told = teacher_metrics(**dict(zip(names, fields, strict=True)))
    assert {(v.dtype, v.shape) for v in told.values()} == {(torch.float64, torch.Size([]))}
    return {name: value.item() for name, value in told.items()}


def test_what_the_teacher_says_by_hand() -> None:
    # Teacher logprobs -1, -3, -5; of the term the deviations are 2, 0, -2.
    told = teacher_of([-2.0, -2.5, -3.0], [-1.0, 0.5, 2.0], [3.0, 1.0, -1.0])
    assert told == pytest.approx({"teacher_logprob_std": 2.0, "advantage_opd_std": 2.0})
    told = teacher_of([-1.0, -1.0], [-1.0, 1.0], [0.0, 0.0])
    assert told == pytest.approx({"teacher_logprob_std": 2**0.5, "advantage_opd_std": 0.0})


@pytest.mark.parametrize("tokens", [0, 1])
def test_what_the_teacher_says_of_fewer_than_two_tokens_has_no_spread(tokens: int) -> None:
    told = teacher_of([-2.0] * tokens, [1.0] * tokens, [3.0] * tokens)
    assert told == {"teacher_logprob_std": 0.0, "advantage_opd_std": 0.0}


def stderr_of(sums: Tensor, counts: Tensor, groups: Tensor | None = None) -> float:
    alone = torch.arange(len(sums))
    return group_stderr(sums, counts, alone if groups is None else groups).item()


def test_stderr_equals_that_of_the_mean_where_each_group_is_one_token() -> None:
    k = torch.tensor([1.0, -2.0, 4.0, 0.0])
    # Squared deviations from 0.75 sum to 18.75: variance 6.25, std 2.5, over sqrt(4).
    assert stderr_of(k, torch.ones(4)) == pytest.approx(1.25)


def test_stderr_covers_the_spread_of_the_mean_where_tokens_move_together() -> None:
    """Rollouts of 1..5 tokens that share one value: the spread of the mean over many draws."""
    draw = np.random.default_rng(4)
    means, errors = [], []
    for _ in range(400):
        lengths = draw.integers(1, 6, size=60)
        sums = lengths * draw.normal(0.3, 1.0, size=60)
        means.append(sums.sum() / lengths.sum())
        errors.append(stderr_of(torch.tensor(sums), torch.tensor(lengths)))
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.12)


def test_stderr_covers_the_spread_of_the_mean_where_rollouts_of_a_prompt_move_together() -> None:
    """Groups of four rollouts around a mean of their own, in an order that mixes them."""
    draw = np.random.default_rng(5)
    means, errors = [], []
    groups = torch.arange(30).repeat(4)
    for _ in range(400):
        lengths = draw.integers(1, 6, size=120)
        sums = lengths * (np.tile(draw.normal(0.3, 1.0, size=30), 4) + draw.normal(size=120))
        means.append(sums.sum() / lengths.sum())
        errors.append(stderr_of(torch.tensor(sums), torch.tensor(lengths), groups))
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.12)


def test_stderr_adds_up_the_rollouts_of_a_group_before_anything_else() -> None:
    sums, counts = torch.tensor([1.0, 2.0, 4.0, 8.0, 3.0]), torch.tensor([1, 3, 2, 2, 5])
    groups = torch.tensor([7, 9, 7, 8, 9])
    added = torch.tensor([5.0, 5.0, 8.0]), torch.tensor([3, 8, 2])
    assert stderr_of(sums, counts, groups) == stderr_of(*added)


def test_stderr_of_fewer_than_two_groups_is_zero() -> None:
    assert stderr_of(torch.tensor([2.0]), torch.tensor([1.0])) == 0.0
    assert stderr_of(torch.zeros(0), torch.zeros(0)) == 0.0
    two = torch.tensor([2.0, 3.0])
    assert stderr_of(two, torch.ones(2), torch.zeros(2)) == 0.0
