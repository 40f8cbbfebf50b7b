"""The objective of on-policy distillation, in pure torch.

`logprobs` turns hidden states into per-token logprobs (and is the only place that shifts labels),
`advantages` turns logprobs and rewards into advantages, `importance` weighs tokens that another
policy sampled, `loss` turns advantages into a scalar to minimise, and `metrics` describes one train
step over all ranks.

One alignment holds everywhere: index i of a per-token field `[B, T]` describes
`token_ids[:, i]`, where a row is prompt + response + right padding.
Symbols: B rows, T tokens of a row, H hidden size, V vocabulary size, N flat tokens or rollouts.

Nothing here reads a config, does I/O, logs, changes its inputs, or waits for the device
(only `gather_tokens` does, because ranks must agree on a shape).
"""

from __future__ import annotations

from opd_core.objective.advantages import (
    OPDAdvantages,
    group_relative_advantages,
    opd_advantages,
    reverse_kl,
)
from opd_core.objective.importance import ImportanceWeights, importance_weights
from opd_core.objective.logprobs import token_logprobs
from opd_core.objective.loss import PolicyLoss, policy_loss
from opd_core.objective.metrics import gather_tokens, reverse_kl_metrics

__all__ = [
    "ImportanceWeights",
    "OPDAdvantages",
    "PolicyLoss",
    "gather_tokens",
    "group_relative_advantages",
    "importance_weights",
    "opd_advantages",
    "policy_loss",
    "reverse_kl",
    "reverse_kl_metrics",
    "token_logprobs",
]
