"""From logprobs and rewards to per-token advantages.

Owns: reverse KL per token, group-relative task advantages, and the weighted sum of the terms.
Does not own: where teacher scores come from, the baseline's value, the policy loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


class OPDAdvantages(NamedTuple):
    """What `opd_advantages` returns; nothing in it carries a gradient.

    Example: with w_task = 0, w_opd = 1, clamp 2 and k = [3, -1, (masked)] it holds
    advantages = opd_term = [-2, 1, 0] and clamped = [True, False, False].
    """

    advantages: Float[Tensor, "B T"]
    """A_t, the sum of all terms; 0 off the mask."""
    opd_term: Float[Tensor, "B T"]
    """What the teacher added to A_t: -w_opd * (clamp(k_t) - baseline); 0 off the mask."""
    clamped: Bool[Tensor, "B T"]
    """True on response tokens with |k_t| > kl_clamp, whatever the weight; False off the mask."""


def reverse_kl(
    old_logprobs: Float[Tensor, "B T"],
    teacher_logprobs: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """k_t = old_logprobs_t - teacher_logprobs_t on the mask, exactly 0 elsewhere, in nats.

    The k1 estimate of KL(student || teacher) (Schulman 2020, "Approximating KL divergence"):
    positive where the student likes its token more than the teacher does. Its mean over tokens
    that the student sampled is unbiased; a single value may have either sign.

    Both inputs are masked before the subtraction, so -inf or NaN off the mask reaches neither the
    value nor a gradient. On the mask nothing is repaired: a NaN there stays visible.

    k is meant as a constant: back-propagating k itself has no teacher in its gradient.

    Raises:
        ValueError: shapes that differ, or a mask that is not bool.
    """
    _check_mask(response_mask, old_logprobs=old_logprobs, teacher_logprobs=teacher_logprobs)
    return torch.where(response_mask, old_logprobs, 0.0) - torch.where(
        response_mask, teacher_logprobs, 0.0
    )


def group_relative_advantages(
    rewards: Float[Tensor, " N"],
    group_index: Int64[Tensor, " N"],
    num_groups: int,
    eps: float = 1e-8,
) -> Float[Tensor, " N"]:
    """(r - mean) / (std + eps) within each group, with the unbiased std (GRPO, Shao et al. 2024).

    Groups may have different sizes and their members may stand in any order. A group whose rewards
    are all equal gives exactly 0. A group of 1 has no std: it gives 0, not NaN, and the caller
    refuses it where the task weight is above 0, because it would train on nothing.

    Args:
        rewards: one reward per rollout.
        group_index: the group of each rollout, in [0, num_groups).
        num_groups: number of groups; a group may be empty.
        eps: added to the std, above 0.

    Raises:
        ValueError: shapes that differ, rewards that are not floating point, or eps <= 0.
    """
    if rewards.ndim != 1 or group_index.shape != rewards.shape:
        raise ValueError(
            "expected rewards [N] and group_index [N], got "
            f"{tuple(rewards.shape)} and {tuple(group_index.shape)}"
        )
    if not rewards.is_floating_point() or eps <= 0:
        raise ValueError(
            f"expected floating-point rewards and eps > 0, got {rewards.dtype} and {eps}"
        )
    per_group = rewards.new_zeros(num_groups)
    counts = per_group.index_add(0, group_index, torch.ones_like(rewards))
    # Measured from the group's lowest reward, equal rewards are exactly 0. Measured from a rounded
    # mean, their rounding error would be divided by a std of the same tiny size.
    lowest = per_group.scatter_reduce(0, group_index, rewards, "amin", include_self=False)
    above = rewards - lowest[group_index]
    mean = per_group.index_add(0, group_index, above) / counts.clamp(min=1)
    centred = above - mean[group_index]
    variance = per_group.index_add(0, group_index, centred.square()) / (counts - 1).clamp(min=1)
    return centred / (variance.sqrt()[group_index] + eps)


def opd_advantages(
    *,
    reverse_kl: Float[Tensor, "B T"] | None,
    response_mask: Bool[Tensor, "B T"],
    task_advantages: Float[Tensor, "B T"] | None,
    task_adv_weight: float,
    opd_adv_weight: float,
    kl_clamp: float | None = None,
    baseline: Float[Tensor, ""] | float = 0.0,
    reference_kl: Float[Tensor, "B T"] | None = None,
    reference_kl_weight: float = 0.0,
) -> OPDAdvantages:
    """The advantage of each token: weighted task reward, teacher and reference; detached.

    A_t = w_task * A_task_t - w_opd * (clamp(k_t) - baseline) - w_ref * reference_kl_t on the mask,
    0 elsewhere.

    The OPD term is the policy-gradient form of reverse-KL distillation: with ratio 1 and no clamp,
    the expected gradient of the surrogate equals the gradient of the exact reverse KL at each
    position. k is clamped to [-kl_clamp, kl_clamp] first, then the baseline is subtracted. The
    baseline is one constant for the whole batch, the mean of rollout_logprobs - teacher_logprobs,
    known before the forward pass; it lowers the variance and leaves the expected gradient as it is
    (where no importance weight is truncated).
    The sum is not normalised afterwards: that would erase the teacher.

    The reference term keeps the student near its start. It is a part of the advantage for the same
    reason: its expected gradient at ratio 1 is that of KL(student || reference), which the k2 loss
    (reference_kl^2 / 2) has too. The k3 loss (r - 1 - log r with r = p_reference / p_student)
    estimates the same value, but its gradient (1 - r) * grad(logprob) has the expectation of the
    forward KL(reference || student)'s (estimators: Schulman 2020, "Approximating KL divergence").

    A term of weight 0 contributes exactly 0, even if its inputs are None or hold NaN.

    Args:
        reverse_kl: k_t from `reverse_kl`; may be None where opd_adv_weight is 0.
        response_mask: True on tokens that the student sampled.
        task_advantages: A_task of the rollout that the token belongs to (a row may hold several
            rollouts); may be None where task_adv_weight is 0.
        task_adv_weight: w_task.
        opd_adv_weight: w_opd.
        kl_clamp: bound of |k_t| in nats, above 0; None for no clamp.
        baseline: constant subtracted from the clamped k, in nats.
        reference_kl: old_logprobs - reference_logprobs in nats, `reverse_kl` with the reference in
            the teacher's place; may be None where reference_kl_weight is 0.
        reference_kl_weight: w_ref.

    Raises:
        ValueError: shapes that do not fit, an input missing whose weight is not 0, kl_clamp <= 0.
    """
    _check_mask(
        response_mask,
        reverse_kl=reverse_kl,
        task_advantages=task_advantages,
        reference_kl=reference_kl,
    )
    if kl_clamp is not None and kl_clamp <= 0:
        raise ValueError(f"expected kl_clamp > 0 or None, got {kl_clamp}; None means no clamp")
    if isinstance(baseline, Tensor) and baseline.ndim != 0:
        raise ValueError(
            f"expected a scalar baseline for the whole batch, got {tuple(baseline.shape)}"
        )
    clamped = torch.zeros_like(response_mask)
    below_baseline = None
    if reverse_kl is not None:
        k = reverse_kl
        if kl_clamp is not None:
            clamped = response_mask & (k.abs() > kl_clamp)
            k = k.clamp(-kl_clamp, kl_clamp)
        below_baseline = baseline - k
    task_term = _term(
        response_mask, task_adv_weight, task_advantages, "task_adv_weight", "task_advantages"
    )
    opd_term = _term(response_mask, opd_adv_weight, below_baseline, "opd_adv_weight", "reverse_kl")
    reference_term = _term(
        response_mask, reference_kl_weight, reference_kl, "reference_kl_weight", "reference_kl"
    )
    return OPDAdvantages(
        advantages=task_term + opd_term - reference_term, opd_term=opd_term, clamped=clamped
    )


def _term(
    response_mask: Tensor, weight: float, value: Tensor | None, weight_name: str, value_name: str
) -> Float[Tensor, "B T"]:
    """weight * value on the mask, 0 elsewhere and where the weight is 0; detached."""
    if weight == 0:
        return torch.zeros_like(response_mask, dtype=torch.float32)
    if value is None:
        raise ValueError(
            f"{weight_name} is {weight} but {value_name} is None; compute {value_name} for every "
            f"response token, or set {weight_name} to 0"
        )
    return torch.where(response_mask, weight * value.detach(), 0.0)


def _check_mask(response_mask: Tensor, **fields: Tensor | None) -> None:
    """Refuse a mask that is not bool [B, T], and fields of another shape (no broadcasting)."""
    if response_mask.dtype != torch.bool or response_mask.ndim != 2:
        raise ValueError(
            "expected a bool response_mask [B, T], got "
            f"{response_mask.dtype} {tuple(response_mask.shape)}"
        )
    for name, field in fields.items():
        if field is not None and field.shape != response_mask.shape:
            raise ValueError(
                f"expected {name} of the mask's shape {tuple(response_mask.shape)}, got "
                f"{tuple(field.shape)}; every per-token field describes the same token_ids"
            )
