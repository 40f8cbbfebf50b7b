"""The whole objective against the exact reverse KL on a vocabulary of three tokens.

With every response enumerated and weighted by its probability, the gradient of the policy-gradient
surrogate has to equal the gradient of sum_y p(y) log(p(y) / q(y)), which autograd gives without any
of this package.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opd_core.objective import opd_advantages, policy_loss, reverse_kl, token_logprobs

VOCABULARY = 3
logits_strategy = st.lists(
    st.floats(-4, 4, allow_nan=False), min_size=VOCABULARY, max_size=VOCABULARY
)


def prefix_batch(position: int, length: int = 4) -> tuple[Tensor, Tensor]:
    """token_ids and response_mask of the three rows that differ in one response token only."""
    token_ids = torch.tensor([[2, 0, 1, 1][:length]] * VOCABULARY)
    token_ids[:, position] = torch.arange(VOCABULARY)
    mask = torch.zeros(VOCABULARY, length, dtype=torch.bool)
    mask[:, position] = True
    return token_ids, mask


def expected_surrogate(
    hidden: Tensor,
    weight: Tensor,
    teacher_logits: Tensor,
    position: int,
    baseline: float = 0.0,
    reference_logits: Tensor | None = None,
    reference_kl_weight: float = 0.0,
) -> Tensor:
    """Loss of each one-token response, weighted by its detached probability, summed."""
    token_ids, mask = prefix_batch(position)
    logprobs = token_logprobs(hidden.expand(VOCABULARY, -1, -1), weight, token_ids, chunk_tokens=2)
    old = logprobs.detach()

    def gap(logits: Tensor) -> Tensor:
        """old - other on the response token, nothing usable elsewhere."""
        other = torch.full_like(old, -torch.inf)
        other[:, position] = logits.log_softmax(-1)
        return reverse_kl(old, other, mask)

    advantages = opd_advantages(
        reverse_kl=gap(teacher_logits),
        response_mask=mask,
        task_advantages=None,
        task_adv_weight=0.0,
        opd_adv_weight=1.0,
        baseline=baseline,
        reference_kl=None if reference_logits is None else gap(reference_logits),
        reference_kl_weight=reference_kl_weight,
    ).advantages
    losses = [
        policy_loss(
            logprobs=logprobs[row : row + 1],
            old_logprobs=old[row : row + 1],
            advantages=advantages[row : row + 1],
            response_mask=mask[row : row + 1],
            valid_tokens=1,
        ).loss
        for row in range(VOCABULARY)
    ]
    return (torch.stack(losses) * old[:, position].exp()).sum()


def exact_reverse_kl(
    hidden: Tensor, weight: Tensor, teacher_logits: Tensor, position: int
) -> Tensor:
    """sum_y p log(p / q) of the distribution of the token at `position`."""
    log_p = (hidden[0, position - 1] @ weight.T).log_softmax(-1)
    return (log_p.exp() * (log_p - teacher_logits.log_softmax(-1))).sum()


def student(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Hidden states of one prefix [1, 4, 5] and a head [3, 5], both with gradient."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, 4, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, 5, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize("position", [1, 2, 3])
@settings(max_examples=25, deadline=None)
@given(teacher=logits_strategy, seed=st.integers(0, 2**16))
def test_the_expected_surrogate_gradient_is_the_exact_kl_gradient_at_each_position(
    position: int, teacher: list[float], seed: int
) -> None:
    hidden, weight = student(seed)
    teacher_logits = torch.tensor(teacher, dtype=torch.float64)

    surrogate = torch.autograd.grad(
        expected_surrogate(hidden, weight, teacher_logits, position), (hidden, weight)
    )
    exact = torch.autograd.grad(
        exact_reverse_kl(hidden, weight, teacher_logits, position), (hidden, weight)
    )

    for got, want in zip(surrogate, exact, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(
    teacher=logits_strategy,
    reference=logits_strategy,
    weight_of_reference=st.floats(0.01, 2.0),
    seed=st.integers(0, 2**16),
)
def test_with_a_reference_it_is_the_gradient_of_the_weighted_sum_of_both_reverse_kls(
    teacher: list[float], reference: list[float], weight_of_reference: float, seed: int
) -> None:
    hidden, weight = student(seed)
    teacher_logits, reference_logits = (
        torch.tensor(logits, dtype=torch.float64) for logits in (teacher, reference)
    )

    surrogate = torch.autograd.grad(
        expected_surrogate(
            hidden, weight, teacher_logits, 2, 0.0, reference_logits, weight_of_reference
        ),
        (hidden, weight),
    )
    exact = torch.autograd.grad(
        exact_reverse_kl(hidden, weight, teacher_logits, 2)
        + weight_of_reference * exact_reverse_kl(hidden, weight, reference_logits, 2),
        (hidden, weight),
    )

    for got, want in zip(surrogate, exact, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_the_reference_term_has_the_gradient_of_the_k2_loss_and_not_of_k3() -> None:
    hidden = torch.ones(1, 4, 1, dtype=torch.float64)
    logits = torch.tensor([0.5, -1.0, 0.3], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64)
    log_p, log_q = logits.log_softmax(-1), reference.log_softmax(-1)
    p, log_ratio = log_p.detach().exp(), log_q - log_p

    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    # The teacher is the student itself, so that only the reference is left.
    term = gradient(
        expected_surrogate(
            hidden, logits.unsqueeze(1), logits.detach(), 2, 0.0, reference, reference_kl_weight=1.0
        )
    )
    k2 = gradient((p * log_ratio.square() / 2).sum())
    k3 = gradient((p * (log_ratio.exp() - 1 - log_ratio)).sum())

    torch.testing.assert_close(term, k2)
    torch.testing.assert_close(k3, gradient(-(log_q.exp() * log_p).sum()))  # of the forward KL
    assert not torch.allclose(term, k3, atol=0.1)


def test_a_number_by_hand() -> None:
    # p = (1/2, 1/4, 1/4), q uniform: k = ln(3p), KL = (ln 1.5 + ln 0.75) / 2, and
    # dKL/dlogit_j = p_j * (k_j - KL).
    p = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    hidden = torch.ones(1, 4, 1, dtype=torch.float64)
    weight = p.log().unsqueeze(-1).requires_grad_()

    (grad,) = torch.autograd.grad(
        expected_surrogate(hidden, weight, torch.zeros(3, dtype=torch.float64), 2), weight
    )

    # ln 1.5 = 0.405465, ln 0.75 = -0.287682, KL = 0.058892.
    expected = torch.tensor([[0.173287], [-0.086643], [-0.086643]], dtype=torch.float64)
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-6)


def test_a_baseline_leaves_the_expected_gradient_as_it_is() -> None:
    hidden, weight = student()
    teacher = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)

    plain, shifted = (
        torch.autograd.grad(expected_surrogate(hidden, weight, teacher, 2, baseline), weight)[0]
        for baseline in (0.0, 0.7)
    )

    torch.testing.assert_close(shifted, plain, rtol=1e-10, atol=1e-10)


def test_a_teacher_equal_to_the_student_gives_exactly_zero_gradient() -> None:
    hidden, weight = student()
    token_ids, mask = prefix_batch(position=2)
    logprobs = token_logprobs(hidden.expand(3, -1, -1), weight, token_ids)
    old = logprobs.detach()

    advantages = opd_advantages(
        reverse_kl=reverse_kl(old, old.clone(), mask),
        response_mask=mask,
        task_advantages=None,
        task_adv_weight=0.0,
        opd_adv_weight=1.0,
    ).advantages
    loss = policy_loss(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=advantages,
        response_mask=mask,
        valid_tokens=3,
    ).loss
    grads = torch.autograd.grad(loss, (hidden, weight))

    assert not advantages.any()
    assert loss.item() == 0.0
    assert all(not grad.any() for grad in grads)


def test_another_teacher_gives_another_gradient_and_the_opposite_one_turns_it_round() -> None:
    hidden = torch.ones(1, 4, 1, dtype=torch.float64)
    weight = torch.zeros(VOCABULARY, 1, dtype=torch.float64, requires_grad=True)
    likes_first = torch.tensor([2.0, 0.0, 0.0], dtype=torch.float64)
    likes_last = torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64)

    first, last = (
        torch.autograd.grad(expected_surrogate(hidden, weight, teacher, 1), weight)[0].flatten()
        for teacher in (likes_first, likes_last)
    )

    # A step against the gradient raises the logit of the token that the teacher likes.
    assert first.sign().tolist() == [-1.0, 1.0, 1.0]
    torch.testing.assert_close(last, first.flip(0))


def test_the_k1_estimate_back_propagated_directly_would_know_no_teacher() -> None:
    hidden, weight = student()
    token_ids, mask = prefix_batch(position=2)

    def gradient_of_k1(teacher: Tensor) -> Tensor:
        logprobs = token_logprobs(hidden.expand(3, -1, -1), weight, token_ids)
        return torch.autograd.grad(reverse_kl(logprobs, teacher, mask).sum(), weight)[0]

    one, other = gradient_of_k1(torch.zeros(3, 4)), gradient_of_k1(torch.full((3, 4), -9.0))

    assert one.any()
    assert torch.equal(one, other)
