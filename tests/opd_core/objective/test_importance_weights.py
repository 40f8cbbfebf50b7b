"""Importance weights by hand, and the weighed objective against exact sums over all responses.

Three tokens of vocabulary, responses of two tokens, all nine enumerated: a policy mu samples them,
another one trains. Second tokens come after first ones that mu has sampled.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opd_core.objective import importance_weights, opd_advantages, policy_loss, reverse_kl

VOCABULARY = 3
RESPONSES = [(a, b) for a in range(VOCABULARY) for b in range(VOCABULARY)]
MASK = torch.tensor([[False, True, True]])
seeds = st.integers(0, 2**16)
caps = st.floats(0.1, 5.0)


class Policy(NamedTuple):
    """Logits of the first token, and of the second one after each first."""

    first: Tensor
    second: Tensor

    def logprobs(self) -> tuple[Tensor, Tensor]:
        return self.first.log_softmax(-1), self.second.log_softmax(-1)

    def row(self, response: tuple[int, int]) -> Tensor:
        """Logprobs [1, 3] of a prompt token (nothing usable) and the response."""
        a, b = response
        first, second = self.logprobs()
        return torch.stack([first.new_tensor(-math.inf), first[a], second[a, b]]).unsqueeze(0)


def policies(seed: int) -> tuple[Policy, Policy, Policy, Policy]:
    """mu, the old policy, the current one (near the old one, with gradient), and the teacher."""
    draw = torch.Generator().manual_seed(seed)

    def table(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    mu, old, step, teacher = (
        Policy(table(VOCABULARY), table(VOCABULARY, VOCABULARY)) for _ in range(4)
    )
    current = (o + 0.5 * s for o, s in zip(old, step, strict=True))
    return mu, old, Policy(*(c.requires_grad_() for c in current)), teacher


def expected_gradient(
    mu: Policy, old: Policy, current: Policy, teacher: Policy, cap: float
) -> tuple[Tensor, ...]:
    """Of the loss of each response, weighed by its probability under mu."""
    losses = []
    for response in RESPONSES:
        before, sampled = old.row(response).detach(), mu.row(response)
        advantages = opd_advantages(
            reverse_kl=reverse_kl(before, teacher.row(response), MASK),
            response_mask=MASK,
            task_advantages=None,
            task_adv_weight=0.0,
            opd_adv_weight=1.0,
        ).advantages
        weights = importance_weights(
            old_logprobs=before, rollout_logprobs=sampled, response_mask=MASK, cap=cap
        ).weights
        loss = policy_loss(
            logprobs=current.row(response),
            old_logprobs=before,
            advantages=advantages,
            response_mask=MASK,
            valid_tokens=1,
            importance_weights=weights,
        ).loss
        losses.append(loss * sampled[0, 1:].sum().exp())
    return torch.autograd.grad(torch.stack(losses).sum(), current)


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_with_no_cap_the_expectation_is_the_exact_kl_gradient_at_each_position(seed: int) -> None:
    mu, _, policy, teacher = policies(seed)
    (p_1, p_2), (q_1, q_2) = policy.logprobs(), teacher.logprobs()
    reached = mu.logprobs()[0].exp()

    exact = (p_1.exp() * (p_1 - q_1)).sum() + (reached * (p_2.exp() * (p_2 - q_2)).sum(-1)).sum()

    found = expected_gradient(mu, policy, policy, teacher, cap=math.inf)
    for got, want in zip(found, torch.autograd.grad(exact, policy), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, cap=caps, moved=st.booleans())
def test_with_a_cap_the_expectation_is_under_the_smaller_of_old_policy_and_cap_times_mu(
    seed: int, cap: float, moved: bool
) -> None:
    """At ratio 1, and where an optimizer step has moved the policy away from the old one."""
    mu, old, current, teacher = policies(seed)
    if not moved:
        old = current
    reached = mu.logprobs()[0].exp().tolist()
    total: Tensor = torch.zeros((), dtype=torch.float64)

    def token(reach: float, *logprobs: Tensor) -> Tensor:
        """-E[s] of one token; its gradient is 0 where the clip took it."""
        m, o, q = (x.item() for x in (logprobs[0], logprobs[1], logprobs[3]))
        advantage, ratio = q - o, math.exp(logprobs[2].item() - o)
        clipped = ratio > 1.28 if advantage > 0 else ratio < 0.8 or ratio > 10
        under = min(math.exp(o), cap * math.exp(m))
        return -reach * under * advantage * (0.0 if clipped else ratio) * logprobs[2]

    tables = [policy.logprobs() for policy in (mu, old, current, teacher)]
    for a in range(VOCABULARY):
        total = total + token(1.0, *(first[a] for first, _ in tables))
        for b in range(VOCABULARY):
            total = total + token(reached[a], *(second[a, b] for _, second in tables))

    found = expected_gradient(mu, old, current, teacher, cap)
    for got, want in zip(found, torch.autograd.grad(total, current), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_weights_by_hand() -> None:
    old = torch.tensor([[0.6, 0.1, 0.4, 0.5, math.nan]]).log().requires_grad_()
    rollout = torch.tensor([[0.2, 0.2, 0.2, 0.01, 0.5]]).log()
    found = importance_weights(
        old_logprobs=old,
        rollout_logprobs=rollout,
        response_mask=torch.tensor([[True, True, True, False, False]]),
        cap=2.5,
    )
    torch.testing.assert_close(found.weights, torch.tensor([[2.5, 0.5, 2.0, 0.0, 0.0]]))
    assert found.truncated.tolist() == [[True, False, False, False, False]]
    assert not found.weights.requires_grad


def test_the_exponent_is_bounded_and_what_is_no_number_stays_visible() -> None:
    found = importance_weights(
        old_logprobs=torch.tensor([[1e4, -1e4, math.nan]], dtype=torch.float64),
        rollout_logprobs=torch.zeros(1, 3, dtype=torch.float64),
        response_mask=torch.ones(1, 3, dtype=torch.bool),
        cap=math.inf,
    )
    assert found.weights[0, :2].tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    assert found.weights[0, 2].isnan()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cap": 0.0}, "cap > 0"),
        ({"cap": math.nan}, "cap > 0"),
        ({"rollout_logprobs": torch.zeros(2, 1)}, "mask first"),
        ({"response_mask": torch.ones(2, 3)}, "bool"),
    ],
)
def test_unusable_inputs_are_refused(changes: dict[str, object], message: str) -> None:
    inputs: dict[str, object] = {
        "old_logprobs": torch.zeros(2, 3),
        "rollout_logprobs": torch.zeros(2, 3),
        "response_mask": torch.ones(2, 3, dtype=torch.bool),
        "cap": 2.0,
    }
    with pytest.raises(ValueError, match=message):
        importance_weights(**(inputs | changes))  # type: ignore[arg-type]
