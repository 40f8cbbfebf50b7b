"""Importance weights for tokens that another policy sampled than the one that is trained.

Owns: the truncated weight of each token. Does not own: what it multiplies (`loss`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from opd_core.objective.loss import MAX_LOG_RATIO


class ImportanceWeights(NamedTuple):
    """What `importance_weights` returns; nothing in it carries a gradient.

    Example: with cap 2 and old / rollout probabilities [0.6 / 0.2, 0.1 / 0.2, (masked)] it holds
    weights = [2, 0.5, 0] and truncated = [True, False, False].
    """

    weights: Float[Tensor, "B T"]
    """w_t on the mask, 0 elsewhere."""
    truncated: Bool[Tensor, "B T"]
    """True on response tokens whose ratio is above the cap; False off the mask."""


def importance_weights(
    *,
    old_logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
    cap: float,
) -> ImportanceWeights:
    """w_t = min(exp(clamp(old_logprobs_t - rollout_logprobs_t, -20, 20)), cap), detached.

    Of a token that a policy mu sampled, stale or another engine's: with no cap the expectation of
    w_t * A_t * grad(logprob_t) under mu is the one of A_t * grad(logprob_t) under the old policy,
    given the tokens before it (those stay mu's). The cap bounds the variance at the price of a
    bias: the expectation is then under min(old policy, cap * mu), which sums to less than 1.

    Sources: truncated importance sampling (Ionides 2008), against the mismatch of sampling and
    training engine in RL (Yao et al. 2025), with the old policy between mu and the one in training
    (decoupled PPO: Hilton et al. 2022, in AReaL: Fu et al. 2025).

    Args:
        old_logprobs: of the weights before this batch's optimizer steps, by the training engine.
        rollout_logprobs: recorded by the engine that sampled.
        response_mask: True on tokens that the student sampled; elsewhere both may hold anything.
        cap: bound of w_t, above 0; infinity for none.

    Raises:
        ValueError: shapes that differ, a mask that is not bool, or cap <= 0.
    """
    shapes = [tuple(f.shape) for f in (response_mask, old_logprobs, rollout_logprobs)]
    if response_mask.dtype != torch.bool or len(set(shapes)) != 1:
        raise ValueError(
            "expected old_logprobs and rollout_logprobs of the shape of a bool response_mask, got "
            f"a mask of {response_mask.dtype} and shapes (mask first) {shapes}"
        )
    if not cap > 0:
        raise ValueError(f"expected cap > 0, got {cap}; infinity means no cap")
    log_ratio = (old_logprobs - rollout_logprobs).detach()
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return ImportanceWeights(
        weights=torch.where(response_mask, ratio.clamp(max=cap), 0.0),
        truncated=response_mask & (ratio > cap),
    )
