"""Logprobs of given tokens from hidden states, and the only shift of labels in the project.

Owns: the step from "the hidden state at i - 1 predicts token i" to "index i describes token i",
and the memory bound of the vocabulary projection. Does not own: running the model, sampling,
temperature (it is 1 here).
"""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def token_logprobs(
    hidden: Float[Tensor, "B T H"],
    head_weight: Float[Tensor, "V H"],
    token_ids: Int[Tensor, "B T"],
    *,
    head_bias: Float[Tensor, " V"] | None = None,
    chunk_tokens: int = 512,
) -> Float[Tensor, "B T"]:
    """Log-softmax of every token under the hidden state before it, in nats.

    result[:, i] = log_softmax(hidden[:, i - 1] @ head_weight.T + head_bias)[token_ids[:, i]]
    result[:, 0] = 0, since nothing predicts the first token (the response mask is False there).

    The projection runs in the dtype of its inputs, the log-softmax in fp32, and so is the result
    (fp64 inputs stay fp64). Positions are taken `chunk_tokens` at a time and each chunk is
    recomputed in the backward pass, so neither pass holds more than a few [chunk_tokens, V]
    tensors: a full fp32 [B, T, V] would be 10 GB for one row of 16 384 tokens at V = 152 000.

    The gradient of `head_weight` is a sum of one term per chunk in the weight's own dtype; in bf16
    larger chunks round less. `head_weight` must still hold its values during backward.

    Args:
        hidden: last hidden states, after the final norm.
        head_weight: rows of the output projection.
        token_ids: prompt + response + right padding; every id in [0, V), padding included.
        head_bias: bias of the output projection, if the model has one.
        chunk_tokens: positions per chunk, at least 1.

    Raises:
        ValueError: shapes that do not fit together, T = 0, or chunk_tokens < 1.
    """
    _check_shapes(hidden, head_weight, token_ids, head_bias, chunk_tokens)
    batch, length = token_ids.shape
    states = hidden[:, :-1].reshape(batch * (length - 1), hidden.shape[-1])
    targets = token_ids[:, 1:].reshape(batch * (length - 1))
    # split gives one empty chunk where there is no position, which keeps the result
    # connected to the graph: a rank without tokens still takes part in backward.
    chunks = [
        cast(
            Tensor,
            checkpoint(
                _chunk_logprobs,
                chunk_states,
                head_weight,
                head_bias,
                chunk_targets,
                use_reentrant=False,
                # Nothing is random here, and reading the RNG state waits for the device.
                preserve_rng_state=False,
            ),
        )
        for chunk_states, chunk_targets in zip(
            torch.split(states, chunk_tokens), torch.split(targets, chunk_tokens), strict=True
        )
    ]
    return functional.pad(torch.cat(chunks).reshape(batch, length - 1), (1, 0))


def _chunk_logprobs(
    states: Float[Tensor, "C H"],
    head_weight: Float[Tensor, "V H"],
    head_bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " C"],
) -> Float[Tensor, " C"]:
    """Logprob of each target under the state of the same index (already shifted)."""
    logits = functional.linear(states, head_weight, head_bias)
    # Rounded to bf16, a logprob near -10 is off by up to 1/32 nat: as much as a small reverse KL.
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logprobs = functional.log_softmax(logits, dim=-1, dtype=dtype)
    return logprobs.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)


def _check_shapes(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    head_bias: Tensor | None,
    chunk_tokens: int,
) -> None:
    if hidden.ndim != 3 or token_ids.shape != hidden.shape[:2] or token_ids.shape[1] == 0:
        raise ValueError(
            "expected hidden [B, T, H] and token_ids [B, T] with T >= 1, got "
            f"{tuple(hidden.shape)} and {tuple(token_ids.shape)}; pass hidden states of exactly "
            "these tokens, unshifted"
        )
    if head_weight.ndim != 2 or head_weight.shape[1] != hidden.shape[2]:
        raise ValueError(
            f"expected head_weight [V, H] with H = {hidden.shape[2]}, got "
            f"{tuple(head_weight.shape)}; pass the output projection of the same model, not sharded"
        )
    if head_bias is not None and head_bias.shape != head_weight.shape[:1]:
        raise ValueError(
            f"expected head_bias [V] with V = {head_weight.shape[0]}, got {tuple(head_bias.shape)}"
        )
    if chunk_tokens < 1:
        raise ValueError(f"expected chunk_tokens >= 1, got {chunk_tokens}; 512 suits most cards")
