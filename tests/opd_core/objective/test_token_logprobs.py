"""token_logprobs against the naive full-vocabulary computation, in value, gradient and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opd_core.objective import token_logprobs


def naive(hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition, one position after the other, with the whole vocabulary in memory."""
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    table = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    columns = [torch.zeros_like(table[:, 0, 0])]
    for i in range(1, ids.shape[1]):
        columns.append(table[torch.arange(len(ids)), i - 1, ids[:, i]])
    return torch.stack(columns, dim=1)


def make_inputs(
    B: int, T: int, V: int, H: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, head_weight, token_ids, head_bias."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(B, T, H, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(V, generator=generator, dtype=torch.float64).to(dtype)
    ids = torch.randint(V, (B, T), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), ids, bias.requires_grad_()


class VocabularyMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records floating elements: of the largest tensor made, and of all storages alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0
        self.peak_alive = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def alive(self) -> int:
        for key, (ref, _) in list(self._storages.items()):
            if ref.expired():  # type: ignore[no-untyped-call]
                del self._storages[key]
        return sum(numel for _, numel in self._storages.values())

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                storage = leaf.untyped_storage()
                self.largest = max(self.largest, leaf.numel())
                self._storages[storage._cdata] = (
                    StorageWeakRef(storage),  # type: ignore[no-untyped-call]
                    storage.nbytes() // leaf.element_size(),
                )
        self.peak_alive = max(self.peak_alive, self.alive())
        return result


def test_a_number_by_hand() -> None:
    # Hidden state 1 with weights (0, ln 2, ln 5) gives probabilities 1/8, 2/8, 5/8.
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)]])
    ids = torch.tensor([[2, 0, 1, 2]])

    result = token_logprobs(torch.ones(1, 4, 1), weight, ids)

    expected = torch.tensor([[0.0, math.log(1 / 8), math.log(2 / 8), math.log(5 / 8)]])
    torch.testing.assert_close(result, expected)


def test_index_i_depends_on_token_i_and_on_the_hidden_state_before_it_only() -> None:
    hidden, weight, ids, _ = make_inputs(1, 5, 7, 3, torch.float64)

    (grad,) = torch.autograd.grad(token_logprobs(hidden, weight, ids)[0, 3], hidden)
    other_ids = ids.clone()
    other_ids[0, 3] = (ids[0, 3] + 1) % 7
    changed = token_logprobs(hidden, weight, ids) != token_logprobs(hidden, weight, other_ids)

    assert (grad[0].abs().sum(-1) > 0).tolist() == [False, False, True, False, False]
    assert changed[0].tolist() == [False, False, False, True, False]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 27, 1000])
def test_value_and_gradients_equal_the_naive_computation(
    chunk_tokens: int, with_bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    hidden, weight, ids, bias = make_inputs(3, 10, 11, 5, dtype)
    leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
    upstream = torch.randn(3, 10, generator=torch.Generator().manual_seed(1)).to(dtype)
    head_bias = bias if with_bias else None

    result = token_logprobs(hidden, weight, ids, head_bias=head_bias, chunk_tokens=chunk_tokens)
    expected = naive(hidden, weight, ids, head_bias)

    assert result.dtype == dtype
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    for got, want in zip(
        torch.autograd.grad(result, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@settings(max_examples=30, deadline=None)
@given(
    B=st.integers(1, 4),
    T=st.integers(1, 9),
    V=st.integers(1, 6),
    chunk_tokens=st.integers(1, 12),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_chunk_size_equals_the_naive_computation(
    B: int, T: int, V: int, chunk_tokens: int, seed: int
) -> None:
    hidden, weight, ids, _ = make_inputs(B, T, V, 4, torch.float64, seed)

    result = token_logprobs(hidden, weight, ids, chunk_tokens=chunk_tokens)

    torch.testing.assert_close(result, naive(hidden, weight, ids))


def test_bf16_logits_are_normalised_in_fp32() -> None:
    hidden, weight, ids, _ = make_inputs(2, 9, 200, 8, torch.bfloat16)

    result = token_logprobs(hidden, weight, ids, chunk_tokens=5)
    exact = naive(hidden, weight, ids)
    (grad,) = torch.autograd.grad(result.sum(), hidden)
    (exact_grad,) = torch.autograd.grad(exact.sum(), hidden)

    assert result.dtype == torch.float32
    torch.testing.assert_close(result, exact, rtol=1e-5, atol=1e-5)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad, exact_grad, rtol=0.02, atol=0.05)


def test_the_probabilities_of_all_possible_tokens_sum_to_one() -> None:
    hidden, weight, _, bias = make_inputs(1, 1, 13, 4, torch.float64)
    every_token = torch.stack([torch.zeros(13, dtype=torch.int64), torch.arange(13)], dim=1)

    logprobs = token_logprobs(hidden.expand(13, 2, 4), weight, every_token, head_bias=bias)

    torch.testing.assert_close(logprobs[:, 1].exp().sum().item(), 1.0)


def test_huge_logits_stay_finite_in_value_and_gradient() -> None:
    hidden = torch.full((1, 3, 1), 1e4, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)

    result = token_logprobs(hidden, weight, torch.tensor([[0, 0, 1]]))
    grads = torch.autograd.grad(result.sum(), (hidden, weight))

    assert result.tolist() == [[0.0, 0.0, -2e4]]
    assert all(grad.isfinite().all() for grad in grads)


def test_both_passes_hold_about_one_chunk_of_the_vocabulary_table() -> None:
    # H is so small that only tensors over positions x vocabulary come near a chunk's size.
    B, T, V, H, chunk_tokens = 4, 64, 1000, 4, 16
    chunk = chunk_tokens * V
    hidden, weight, ids, _ = make_inputs(B, T, V, H, torch.float32)

    with VocabularyMemory() as full:
        logits = hidden[:, :-1] @ weight.T
        total = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum()
        torch.autograd.grad(total, (hidden, weight))
        del logits, total
    with VocabularyMemory() as forward:
        result = token_logprobs(hidden, weight, ids, chunk_tokens=chunk_tokens)
        alive_between = forward.alive()
    with VocabularyMemory() as backward:
        torch.autograd.grad(result.sum(), (hidden, weight))

    # The recorder does see a table where there is one, and the recomputation in backward.
    assert full.peak_alive >= 2 * B * (T - 1) * V
    assert forward.largest == backward.largest == chunk
    assert max(forward.peak_alive, backward.peak_alive) < 2 * chunk
    assert alive_between < chunk


def test_a_row_of_one_token_gives_zero_and_stays_connected_to_the_graph() -> None:
    hidden, weight, ids, _ = make_inputs(2, 1, 5, 3, torch.float32)

    result = token_logprobs(hidden, weight, ids)
    grads = torch.autograd.grad(result.sum(), (hidden, weight))

    assert result.tolist() == [[0.0], [0.0]]
    assert all(not grad.any() for grad in grads)


def test_without_gradients_the_values_are_the_same() -> None:
    hidden, weight, ids, _ = make_inputs(2, 6, 5, 3, torch.float32)

    with torch.no_grad():
        result = token_logprobs(hidden, weight, ids, chunk_tokens=3)

    assert not result.requires_grad
    assert torch.equal(result, token_logprobs(hidden, weight, ids, chunk_tokens=3))


def test_inputs_are_not_changed() -> None:
    hidden, weight, ids, bias = make_inputs(2, 6, 5, 3, torch.float32)
    before = [tensor.detach().clone() for tensor in (hidden, weight, ids, bias)]

    result = token_logprobs(hidden, weight, ids, head_bias=bias, chunk_tokens=2)
    torch.autograd.grad(result.sum(), (hidden, weight, bias))

    assert all(torch.equal(a, b) for a, b in zip(before, (hidden, weight, ids, bias), strict=True))


def test_ids_shorter_than_hidden_states_are_refused() -> None:
    hidden, weight, ids, _ = make_inputs(2, 6, 5, 3, torch.float32)
    with pytest.raises(ValueError, match="unshifted"):
        token_logprobs(hidden, weight, ids[:, 1:])


def test_a_row_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="T >= 1"):
        token_logprobs(torch.zeros(2, 0, 3), torch.zeros(5, 3), torch.zeros(2, 0, dtype=torch.long))


def test_a_sharded_head_is_refused() -> None:
    hidden, weight, ids, _ = make_inputs(2, 6, 5, 3, torch.float32)
    with pytest.raises(ValueError, match="not sharded"):
        token_logprobs(hidden, weight.flatten(), ids)


def test_a_bias_of_another_vocabulary_is_refused() -> None:
    hidden, weight, ids, _ = make_inputs(2, 6, 5, 3, torch.float32)
    with pytest.raises(ValueError, match="V = 5"):
        token_logprobs(hidden, weight, ids, head_bias=torch.zeros(6))


def test_a_chunk_of_no_tokens_is_refused() -> None:
    hidden, weight, ids, _ = make_inputs(2, 6, 5, 3, torch.float32)
    with pytest.raises(ValueError, match="chunk_tokens >= 1"):
        token_logprobs(hidden, weight, ids, chunk_tokens=0)
