"""The policy loss: from advantages to one scalar to minimise.

Owns: the clipped surrogate and its normalisation. Does not own: how advantages are made, the
optimizer step, the reduction over ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

MAX_LOG_RATIO = 20.0


class PolicyLoss(NamedTuple):
    """What `policy_loss` returns for one micro-batch; each field adds up over micro-batches.

    Example: one token with ratio 1.5 and A = 2 of valid_tokens = 4 gives
    loss = -1.28 * 2 / 4 = -0.64, clipped_tokens = 1 and ratio_sum = 1.5.
    """

    loss: Float[Tensor, ""]
    """This micro-batch's share of the mini-batch loss; the only field with a gradient."""
    clipped_tokens: Int64[Tensor, ""]
    """Number of valid tokens where the clip or the dual clip replaced ratio * A."""
    ratio_sum: Float[Tensor, ""]
    """Sum of the unclipped ratio over valid tokens; divided by valid_tokens it is near 1."""


def policy_loss(
    *,
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    valid_tokens: Int[Tensor, ""] | int,
    importance_weights: Float[Tensor, "B T"] | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float = 10.0,
) -> PolicyLoss:
    """PPO's clipped surrogate with dual clip, averaged over the whole optimizer mini-batch.

    ratio = exp(clamp(logprobs - old_logprobs, -20, 20))
    s     = min(ratio * A, clamp(ratio, 1 - clip_low, 1 + clip_high) * A)
    s     = max(s, dual_clip * A)   where A < 0
    loss  = -sum(w * s on the mask) / valid_tokens

    w is `importance_weights`, None for 1. It multiplies what the clips have left, so that they
    bound the step from the old policy, whoever sampled the token.

    Sources: PPO (Schulman et al. 2017), dual clip (Ye et al. 2020), asymmetric bounds
    (DAPO, Yu et al. 2025). Only `logprobs` gets a gradient; the other inputs are constants.

    `valid_tokens` (an int, or a scalar on the device of `logprobs`) counts response tokens of the
    mini-batch over all micro-batches and all ranks.
    Losses and gradients then **add up**: a data-parallel wrapper that averages gradients
    over ranks has to be undone (multiply by the number of ranks, or make it sum). With
    valid_tokens = 0 the loss is exactly 0 and so is its gradient.

    Positions off the mask contribute exactly 0 to value and gradient, even if they hold inf or NaN.

    Raises:
        ValueError: shapes that differ, a mask that is not bool, valid_tokens that is negative or
            no scalar, bounds outside 0 <= clip_low <= 1, clip_high >= 0, dual_clip > 1.
    """
    weights = () if importance_weights is None else (importance_weights,)
    _check_inputs(response_mask, logprobs, old_logprobs, advantages, *weights)
    if not (0 <= clip_low <= 1 and clip_high >= 0 and dual_clip > 1):
        raise ValueError(
            "expected 0 <= clip_low <= 1, clip_high >= 0 and dual_clip > 1, got "
            f"{clip_low}, {clip_high} and {dual_clip}"
        )
    current = torch.where(response_mask, logprobs, 0.0)
    old = torch.where(response_mask, old_logprobs.detach(), 0.0)
    adv = torch.where(response_mask, advantages.detach(), 0.0)

    ratio = (current - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = ratio * adv
    surrogate = torch.minimum(unclipped, ratio.clamp(1 - clip_low, 1 + clip_high) * adv)
    surrogate = torch.where(adv < 0, torch.maximum(surrogate, dual_clip * adv), surrogate)
    clipped_tokens = (surrogate != unclipped).sum()
    if importance_weights is not None:
        surrogate = surrogate * torch.where(response_mask, importance_weights.detach(), 0.0)
    return PolicyLoss(
        loss=_mean_over(-surrogate.sum(), valid_tokens),
        clipped_tokens=clipped_tokens,
        ratio_sum=torch.where(response_mask, ratio.detach(), 0.0).sum(),
    )


def _mean_over(total: Float[Tensor, ""], valid_tokens: Tensor | int) -> Float[Tensor, ""]:
    """total / valid_tokens, and exactly 0 (with a gradient of 0) where valid_tokens is 0."""
    if isinstance(valid_tokens, int):
        if valid_tokens < 0:
            raise ValueError(f"expected valid_tokens >= 0, got {valid_tokens}")
        return total / valid_tokens if valid_tokens > 0 else total * 0.0
    if valid_tokens.ndim != 0:
        raise ValueError(
            f"expected a scalar valid_tokens for the whole mini-batch, got "
            f"{tuple(valid_tokens.shape)}; sum it over micro-batches and ranks"
        )
    return torch.where(valid_tokens > 0, total / valid_tokens.clamp(min=1), 0.0)


def _check_inputs(response_mask: Tensor, *fields: Tensor) -> None:
    shapes = [tuple(field.shape) for field in (response_mask, *fields)]
    if response_mask.dtype != torch.bool or len(shapes[0]) != 2 or len(set(shapes)) != 1:
        raise ValueError(
            "expected logprobs, old_logprobs, advantages and any weights of the shape [B, T] of a "
            f"bool response_mask, got a mask of {response_mask.dtype} and shapes (mask first) "
            f"{shapes}"
        )
