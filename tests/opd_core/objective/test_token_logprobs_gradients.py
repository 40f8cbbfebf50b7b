"""The backward pass of token_logprobs: which gradients, in which dtype, at which cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opd_core.objective import token_logprobs

B, T, V, H = 2, 7, 11, 5


def plain(hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None = None) -> Tensor:
    """The whole table, without the first column; autograd does the rest."""
    logits = torch.nn.functional.linear(hidden[:, :-1], weight, bias)
    return logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, all with gradient, and token ids."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((B, T, H), (V, H), (V,))
    )
    return hidden, weight, bias, torch.randint(V, (B, T), generator=generator)


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products and records the shapes of all tensors made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = 0
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func in (
            torch.ops.aten.mm.default,
            torch.ops.aten.addmm.default,
            torch.ops.aten.addmm_.default,
        )
        self.shapes |= {
            tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)
        }
        return result


@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
def test_the_gradients_pass_a_numerical_check(chunk_tokens: int) -> None:
    hidden, weight, bias, ids = inputs(torch.float64)

    assert torch.autograd.gradcheck(
        lambda hidden, weight, bias: token_logprobs(
            hidden, weight, ids, head_bias=bias, chunk_tokens=chunk_tokens
        ),
        (hidden, weight, bias),
    )


@pytest.mark.parametrize("trained", [{0}, {1}, {2}, {0, 2}, {0, 1, 2}])
def test_frozen_inputs_get_no_gradient_and_cost_no_product(trained: set[int]) -> None:
    *leaves, ids = inputs()
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index in trained)
    hidden, weight, bias = leaves
    wanted = [leaves[index] for index in sorted(trained)]
    expected = torch.autograd.grad(plain(hidden, weight, ids, bias).sum(), wanted)

    result = token_logprobs(hidden, weight, ids, head_bias=bias)
    with Products() as backward:
        result.sum().backward()  # type: ignore[no-untyped-call]

    assert backward.products == 1 + len(trained & {0, 1})  # one computes the logits again
    assert ((V, H) in backward.shapes) == (1 in trained)
    assert [leaf.grad is not None for leaf in leaves] == [i in trained for i in range(3)]
    for leaf, want in zip(wanted, expected, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, want)


def test_gradients_of_tied_embeddings_add_up() -> None:
    _, weight, _, ids = inputs()

    def body(tied: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, tied).tanh()

    got = torch.autograd.grad(token_logprobs(body(weight), weight, ids).sum(), weight)
    want = torch.autograd.grad(plain(body(weight), weight, ids).sum(), weight)
    untied = torch.autograd.grad(token_logprobs(body(weight).detach(), weight, ids).sum(), weight)

    torch.testing.assert_close(got, want)
    assert not torch.allclose(got[0], untied[0])


def test_autocast_projects_in_its_dtype_and_leaves_gradients_in_the_leaves_dtype() -> None:
    hidden, weight, bias, ids = inputs()
    leaves = (hidden, weight, bias)

    with torch.autocast("cpu", torch.bfloat16):
        result = token_logprobs(hidden, weight, ids, head_bias=bias, chunk_tokens=4)
        expected = plain(hidden, weight, ids, bias)
    got, want = (torch.autograd.grad(value.sum(), leaves) for value in (result, expected))

    assert result.dtype == torch.float32
    torch.testing.assert_close(result[:, 1:], expected, rtol=1e-5, atol=1e-5)
    # The same as of bf16 leaves, and not what fp32 gives.
    rounded = [leaf.detach().bfloat16() for leaf in leaves]
    torch.testing.assert_close(
        result, token_logprobs(rounded[0], rounded[1], ids, head_bias=rounded[2], chunk_tokens=4)
    )
    assert not torch.allclose(result[:, 1:], plain(hidden, weight, ids, bias), atol=1e-4)
    assert [grad.dtype for grad in got] == [torch.float32] * 3
    assert torch.equal(got[0], got[0].bfloat16().float())  # a bf16 product, in backward too
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


def test_autocast_accepts_a_body_in_its_own_dtype_beside_a_head_in_fp32() -> None:
    hidden, weight, _, ids = inputs()
    short = hidden.detach().bfloat16().requires_grad_()

    with torch.autocast("cpu", torch.bfloat16):
        result = token_logprobs(short, weight, ids)
    grads = torch.autograd.grad(result.sum(), (short, weight))

    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32]


def test_autocast_leaves_fp64_alone() -> None:
    hidden, weight, bias, ids = inputs(torch.float64)

    with torch.autocast("cpu", torch.bfloat16):
        result = token_logprobs(hidden, weight, ids, head_bias=bias)

    assert torch.equal(result, token_logprobs(hidden, weight, ids, head_bias=bias))


def test_a_bf16_head_sums_its_gradient_over_many_chunks_in_fp32() -> None:
    # 400 like terms: a bf16 sum stops growing where a term is below half of its spacing.
    hidden = torch.ones(1, 401, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.zeros(1, 401, dtype=torch.int64)

    result = token_logprobs(hidden, weight, ids, chunk_tokens=1)
    (grad,) = torch.autograd.grad(result.sum(), weight)

    assert grad.dtype == torch.bfloat16
    assert grad.flatten().tolist() == [200.0, -200.0]  # 400 * (1 - 1/2)


def test_two_runs_give_the_same_bits() -> None:
    hidden, weight, bias, ids = inputs()

    def run() -> tuple[Tensor, ...]:
        result = token_logprobs(hidden, weight, ids, head_bias=bias, chunk_tokens=4)
        return result, *torch.autograd.grad(result.sum(), (hidden, weight, bias))

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, _, ids = inputs()

    result = token_logprobs(hidden, weight, ids)
    (grad,) = torch.autograd.grad(result.square().sum(), hidden, create_graph=True)

    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()  # type: ignore[no-untyped-call]


def test_a_head_that_changed_before_backward_is_refused() -> None:
    hidden, weight, _, ids = inputs()

    result = token_logprobs(hidden, weight, ids)
    with torch.no_grad():
        weight.add_(1.0)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(result.sum(), hidden)


@pytest.mark.parametrize("shape", [(0, 4), (3, 1), (0, 1)])
def test_a_rank_without_positions_still_takes_part_in_backward(shape: tuple[int, int]) -> None:
    _, weight, bias, _ = inputs()
    hidden = torch.zeros(*shape, H, requires_grad=True)

    result = token_logprobs(hidden, weight, torch.zeros(*shape, dtype=torch.int64), head_bias=bias)
    grads = torch.autograd.grad(result.sum(), (hidden, weight, bias))

    assert [grad.shape for grad in grads] == [hidden.shape, weight.shape, bias.shape]
    assert not any(grad.any() for grad in grads)
