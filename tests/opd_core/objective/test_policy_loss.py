"""The policy loss by hand numbers, at its limits, and split into micro-batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opd_core.objective import PolicyLoss, policy_loss


def one_token(log_ratio: float, advantage: float) -> tuple[PolicyLoss, float]:
    """Loss of one token with valid_tokens = 1, and its gradient with respect to the logprob."""
    logprobs = torch.tensor([[log_ratio - 1.0]], dtype=torch.float64, requires_grad=True)
    result = policy_loss(
        logprobs=logprobs,
        old_logprobs=torch.tensor([[-1.0]], dtype=torch.float64),
        advantages=torch.tensor([[advantage]], dtype=torch.float64),
        response_mask=torch.tensor([[True]]),
        valid_tokens=1,
    )
    (grad,) = torch.autograd.grad(result.loss, logprobs)
    return result, grad.item()


def random_batch(B: int, T: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprobs (with gradient), old_logprobs, advantages, response_mask."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(B, T, generator=generator, dtype=torch.float64) * 3
    logprobs = old + torch.randn(B, T, generator=generator, dtype=torch.float64)
    advantages = torch.randn(B, T, generator=generator, dtype=torch.float64)
    mask = torch.rand(B, T, generator=generator) < 0.6
    return logprobs.requires_grad_(), old, advantages, mask


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        pytest.param(1.0, 2.0, -2.0, -2.0, 0, id="on-policy, A > 0"),
        pytest.param(1.0, -2.0, 2.0, 2.0, 0, id="on-policy, A < 0"),
        pytest.param(1.2, 2.0, -2.4, -2.4, 0, id="inside the bounds"),
        pytest.param(1.5, 2.0, -2.56, 0.0, 1, id="A > 0 above 1.28"),
        pytest.param(0.5, 2.0, -1.0, -1.0, 0, id="A > 0 below 0.8 is not clipped"),
        pytest.param(0.5, -2.0, 1.6, 0.0, 1, id="A < 0 below 0.8"),
        pytest.param(1.5, -2.0, 3.0, 3.0, 0, id="A < 0 above 1.28 is not clipped"),
        pytest.param(9.0, -2.0, 18.0, 18.0, 0, id="A < 0 just below the dual clip"),
        pytest.param(12.0, -2.0, 20.0, 0.0, 1, id="A < 0 above the dual clip"),
        pytest.param(12.0, 2.0, -2.56, 0.0, 1, id="the dual clip leaves A > 0 alone"),
        pytest.param(1.5, 0.0, 0.0, 0.0, 0, id="A = 0"),
    ],
)
def test_one_token_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: int
) -> None:
    result, grad = one_token(math.log(ratio), advantage)

    assert result.loss.item() == pytest.approx(loss)
    assert grad == pytest.approx(gradient)
    assert result.clipped_tokens.item() == clipped
    assert result.ratio_sum.item() == pytest.approx(ratio)


def test_the_log_ratio_is_bounded_by_20() -> None:
    far_above, grad_above = one_token(1000.0, -1.0)
    far_below, grad_below = one_token(-1000.0, 1.0)

    assert far_above.ratio_sum.item() == pytest.approx(math.exp(20))
    assert far_below.ratio_sum.item() == pytest.approx(math.exp(-20))
    assert far_above.loss.item() == 10.0
    assert far_below.loss.item() == pytest.approx(-math.exp(-20))
    assert (grad_above, grad_below) == (0.0, 0.0)


def test_the_bounds_can_be_chosen() -> None:
    result = policy_loss(
        logprobs=torch.tensor([[2.0, 0.25, 9.0]]).log(),
        old_logprobs=torch.zeros(1, 3),
        advantages=torch.tensor([[1.0, -1.0, -1.0]]),
        response_mask=torch.ones(1, 3, dtype=torch.bool),
        valid_tokens=1,
        clip_low=0.5,
        clip_high=0.1,
        dual_clip=3.0,
    )
    assert result.loss.item() == pytest.approx(-1.1 + 0.5 + 3.0)


@pytest.mark.parametrize("valid_tokens", [8, torch.tensor(8)])
def test_the_sum_is_divided_by_the_tokens_of_the_mini_batch(valid_tokens: int | Tensor) -> None:
    logprobs = torch.zeros(1, 3, requires_grad=True)
    result = policy_loss(
        logprobs=logprobs,
        old_logprobs=torch.zeros(1, 3),
        advantages=torch.tensor([[7.0, 1.0, 3.0]]),
        response_mask=torch.tensor([[False, True, True]]),
        valid_tokens=valid_tokens,
    )
    (grad,) = torch.autograd.grad(result.loss, logprobs)

    assert result.loss.item() == -0.5
    assert grad.tolist() == [[0.0, -0.125, -0.375]]


@settings(max_examples=40, deadline=None)
@given(B=st.integers(1, 6), T=st.integers(1, 7), seed=st.integers(0, 2**16), cut=st.integers(0, 6))
def test_micro_batches_add_up_to_the_whole_batch(B: int, T: int, seed: int, cut: int) -> None:
    logprobs, old, advantages, mask = random_batch(B, T, seed)

    def part(rows: slice) -> PolicyLoss:
        return policy_loss(
            logprobs=logprobs[rows],
            old_logprobs=old[rows],
            advantages=advantages[rows],
            response_mask=mask[rows],
            valid_tokens=mask.sum(),
        )

    whole, parts = part(slice(None)), [part(slice(0, cut)), part(slice(cut, None))]
    (whole_grad,) = torch.autograd.grad(whole.loss, logprobs)
    (parts_grad,) = torch.autograd.grad(parts[0].loss + parts[1].loss, logprobs)

    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
    torch.testing.assert_close(parts_grad, whole_grad)
    assert parts[0].clipped_tokens + parts[1].clipped_tokens == whole.clipped_tokens
    torch.testing.assert_close(parts[0].ratio_sum + parts[1].ratio_sum, whole.ratio_sum)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_a_batch_equals_a_loop_over_its_valid_tokens(seed: int) -> None:
    logprobs, old, advantages, mask = random_batch(3, 5, seed)

    result = policy_loss(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=advantages,
        response_mask=mask,
        valid_tokens=int(mask.sum()),
    )

    total = 0.0
    for row, column in mask.nonzero().tolist():
        ratio = math.exp(logprobs[row, column].item() - old[row, column].item())
        a = advantages[row, column].item()
        s = min(ratio * a, min(max(ratio, 0.8), 1.28) * a)
        total += max(s, 10 * a) if a < 0 else s
    assert result.loss.item() == pytest.approx(-total / max(int(mask.sum()), 1))


def test_importance_weights_multiply_what_the_clips_left() -> None:
    """Ratios 1.5 (clipped at 1.28), 1.1 and 12 (dual clip at 10); the last token is off the
    mask."""
    logprobs = torch.tensor([[1.5, 1.1, 12.0, 1.0]]).log().requires_grad_()
    result = policy_loss(
        logprobs=logprobs,
        old_logprobs=torch.zeros(1, 4),
        advantages=torch.tensor([[2.0, -1.0, -1.0, 5.0]]),
        response_mask=torch.tensor([[True, True, True, False]]),
        valid_tokens=1,
        importance_weights=torch.tensor([[0.5, 2.0, 0.1, math.nan]]),
    )
    (grad,) = torch.autograd.grad(result.loss, logprobs)

    assert result.loss.item() == pytest.approx(-0.5 * 2.56 + 2.0 * 1.1 + 0.1 * 10.0)
    assert grad[0].tolist() == pytest.approx([0.0, 2.2, 0.0, 0.0])
    assert result.clipped_tokens.item() == 2


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_importance_weights_of_1_change_no_bit(seed: int) -> None:
    logprobs, old, advantages, mask = random_batch(3, 5, seed)
    plain, weighed = (
        policy_loss(
            logprobs=logprobs,
            old_logprobs=old,
            advantages=advantages,
            response_mask=mask,
            valid_tokens=mask.sum(),
            importance_weights=weights,
        )
        for weights in (None, torch.ones_like(old))
    )
    grads = [torch.autograd.grad(result.loss, logprobs)[0] for result in (plain, weighed)]
    assert torch.equal(plain.loss, weighed.loss)
    assert torch.equal(*grads)


@pytest.mark.parametrize("padding", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("field", ["logprobs", "old_logprobs", "advantages", "all"])
def test_padding_reaches_neither_value_nor_gradient(field: str, padding: float) -> None:
    clean, old, advantages, _ = random_batch(2, 4, seed=3)
    mask = torch.tensor([[False, True, True, False], [False] * 4])

    def run(value: float | None) -> tuple[PolicyLoss, Tensor]:
        inputs = {"logprobs": clean.detach(), "old_logprobs": old, "advantages": advantages}
        if value is not None:
            inputs = {
                name: tensor.masked_fill(~mask, value) if field in (name, "all") else tensor
                for name, tensor in inputs.items()
            }
        leaf = inputs["logprobs"].clone().requires_grad_()
        result = policy_loss(
            logprobs=leaf,
            old_logprobs=inputs["old_logprobs"],
            advantages=inputs["advantages"],
            response_mask=mask,
            valid_tokens=2,
        )
        return result, torch.autograd.grad(result.loss, leaf)[0]

    (padded, padded_grad), (reference, reference_grad) = run(padding), run(None)

    assert all(torch.equal(a, b) for a, b in zip(padded, reference, strict=True))
    assert torch.equal(padded_grad, reference_grad)
    assert not padded_grad[~mask].any()


@pytest.mark.parametrize("valid_tokens", [0, torch.tensor(0)])
@pytest.mark.parametrize("shape", [(2, 3), (1, 0), (0, 4)])
def test_no_valid_token_gives_a_loss_and_a_gradient_of_exactly_zero(
    shape: tuple[int, int], valid_tokens: int | Tensor
) -> None:
    logprobs = torch.full(shape, -math.inf, requires_grad=True)
    result = policy_loss(
        logprobs=logprobs,
        old_logprobs=torch.full(shape, math.nan),
        advantages=torch.full(shape, math.nan),
        response_mask=torch.zeros(shape, dtype=torch.bool),
        valid_tokens=valid_tokens,
    )
    (grad,) = torch.autograd.grad(result.loss, logprobs)

    assert [value.item() for value in result] == [0.0, 0, 0.0]
    assert torch.equal(grad, torch.zeros(shape))


@pytest.mark.parametrize("valid_tokens", [0, torch.tensor(0)])
def test_a_count_of_zero_wins_over_a_mask_that_contradicts_it(valid_tokens: int | Tensor) -> None:
    logprobs = torch.zeros(1, 2, requires_grad=True)
    result = policy_loss(
        logprobs=logprobs,
        old_logprobs=torch.zeros(1, 2),
        advantages=torch.ones(1, 2),
        response_mask=torch.ones(1, 2, dtype=torch.bool),
        valid_tokens=valid_tokens,
    )
    (grad,) = torch.autograd.grad(result.loss, logprobs)

    assert result.loss.item() == 0.0
    assert grad.tolist() == [[0.0, 0.0]]


def test_only_the_current_logprobs_get_a_gradient() -> None:
    logprobs, old, advantages, mask = random_batch(2, 4, seed=5)
    old.requires_grad_()
    advantages.requires_grad_()
    weights = torch.rand_like(old).requires_grad_()

    result = policy_loss(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=advantages,
        response_mask=mask,
        valid_tokens=4,
        importance_weights=weights,
    )
    grads = torch.autograd.grad(
        result.loss, (logprobs, old, advantages, weights), allow_unused=True
    )

    assert grads[0].any()
    assert [grad is None for grad in grads] == [False, True, True, True]
    assert not result.ratio_sum.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"valid_tokens": -1}, "valid_tokens >= 0"),
        ({"valid_tokens": torch.tensor([3, 4])}, "scalar valid_tokens"),
        ({"old_logprobs": torch.zeros(2, 1)}, "mask first"),
        ({"importance_weights": torch.ones(2, 1)}, "mask first"),
        ({"response_mask": torch.ones(2, 3)}, "bool"),
        ({"dual_clip": 1.0}, "dual_clip > 1"),
        ({"clip_low": 1.5}, "clip_low <= 1"),
    ],
)
def test_unusable_inputs_are_refused(options: dict[str, object], message: str) -> None:
    inputs: dict[str, object] = {
        "logprobs": torch.zeros(2, 3),
        "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2, 3),
        "response_mask": torch.ones(2, 3, dtype=torch.bool),
        "valid_tokens": 6,
    }
    with pytest.raises(ValueError, match=message):
        policy_loss(**(inputs | options))  # type: ignore[arg-type]
