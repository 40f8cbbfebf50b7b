"""Logprobs of given tokens from hidden states, and the only shift of labels in the project.

Owns: the step from "the hidden state at i - 1 predicts token i" to "index i describes token i",
and the memory bound of the vocabulary projection. Does not own: running the model, sampling,
temperature (it is 1 here).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


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

    The projection runs in the dtype of its inputs (under autocast in autocast's), the log-softmax
    in fp32, and so is the result (fp64 inputs stay fp64). Positions are taken `chunk_tokens` at a
    time and each chunk is computed again in the backward pass, so both passes hold one fp32
    [chunk_tokens, V] (in bf16 half of one more): a full fp32 [B, T, V] would be 10 GB for one row
    of 16 384 tokens at V = 152 000. The result can be differentiated once.

    The gradient of `head_weight` is summed over the chunks in fp32 and rounded to the weight's
    dtype once; an input that needs no gradient costs no work in backward. `head_weight` must still
    hold its values during backward.

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
    logprobs = cast(
        Tensor,
        _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden[:, :-1].reshape(batch * (length - 1), hidden.shape[-1]),
            head_weight,
            head_bias,
            token_ids[:, 1:].reshape(batch * (length - 1), 1).long(),
            chunk_tokens,
        ),
    )
    return functional.pad(logprobs.reshape(batch, length - 1), (1, 0))


class _ChunkedLogprobs(torch.autograd.Function):
    """Logprob of each target under the state of the same index (already shifted).

    With p = softmax(logits), the derivative of a target's logprob by the logits is onehot - p.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Float[Tensor, "N H"],
        weight: Float[Tensor, "V H"],
        bias: Float[Tensor, " V"] | None,
        targets: Int[Tensor, "N 1"],
        chunk_tokens: int,
    ) -> Float[Tensor, " N"]:
        # Autocast is not active in backward: the dtype of the projection is settled here.
        dtype = _projection_dtype(states)
        head = weight.to(_projection_dtype(weight))
        log_sums = states.new_empty(len(states), 1, dtype=_softmax_dtype(dtype))
        logprobs = torch.empty_like(log_sums)
        for rows in _chunks(states, chunk_tokens):
            logits = _logits(states[rows].to(dtype), head, bias)
            logprobs[rows] = logits.gather(1, targets[rows])
            log_sums[rows] = _consume_log_sum_exp(logits)
            del logits  # before the next chunk's are made
        ctx.save_for_backward(states, weight, bias, targets, log_sums)
        ctx.dtype, ctx.chunk_tokens = dtype, chunk_tokens
        return logprobs.sub_(log_sums).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, " N"]) -> tuple[Tensor | None, ...]:
        states, weight, bias, targets, log_sums = ctx.saved_tensors
        for_states, for_weight, for_bias = ctx.needs_input_grad[:3]
        head, slopes = weight.to(ctx.dtype), -grad.unsqueeze(1)
        grad_states = torch.empty_like(states) if for_states else None
        grad_weight = torch.zeros_like(weight, dtype=log_sums.dtype) if for_weight else None
        grad_bias = torch.zeros_like(bias, dtype=log_sums.dtype) if for_bias else None
        for rows in _chunks(states, ctx.chunk_tokens):
            chunk, slope = states[rows], slopes[rows]
            # p - onehot, in place of the logits. A row's slope is a factor of the narrow operands,
            # not of this one.
            error = _logits(chunk.to(ctx.dtype), head, bias).sub_(log_sums[rows]).exp_()
            error.scatter_add_(1, targets[rows], -torch.ones_like(slope))
            if grad_bias is not None:
                grad_bias.addmv_(error.T, slope.squeeze(1))
            error = error.to(ctx.dtype)
            if grad_states is not None:
                grad_states[rows] = (error @ head) * slope
            if grad_weight is not None:
                _add_product(grad_weight, error.T, (chunk * slope).to(ctx.dtype))
            del error  # before the next chunk's is made
        # Autograd rounds each sum to the dtype of its input.
        return grad_states, grad_weight, grad_bias, None, None


def _logits(
    states: Float[Tensor, "C H"], head: Float[Tensor, "V H"], bias: Float[Tensor, " V"] | None
) -> Float[Tensor, "C V"]:
    """Logits to normalise, in a new tensor that the caller may overwrite."""
    logits = functional.linear(states, head, None if bias is None else bias.to(head.dtype))
    # Rounded to bf16, a logprob near -10 is off by up to 1/32 nat: as much as a small reverse KL.
    return logits.to(_softmax_dtype(logits.dtype))


def _consume_log_sum_exp(logits: Float[Tensor, "C V"]) -> Float[Tensor, "C 1"]:
    """logsumexp over the vocabulary; overwrites `logits`, where torch's own takes a copy."""
    highest = logits.amax(1, keepdim=True)
    return logits.sub_(highest).exp_().sum(1, keepdim=True).log_().add_(highest)


def _add_product(
    total: Float[Tensor, "V H"], left: Float[Tensor, "V C"], right: Float[Tensor, "C H"]
) -> None:
    """total += left @ right, in place; a product of a shorter dtype is rounded once before."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _chunks(states: Float[Tensor, "N H"], chunk_tokens: int) -> Iterator[slice]:
    """Rows of each chunk; none where there is no position."""
    for start in range(0, len(states), chunk_tokens):
        yield slice(start, start + chunk_tokens)


def _projection_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which a matrix product takes this tensor; autocast leaves fp64 alone."""
    device = tensor.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if autocast and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return tensor.dtype


def _softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 where the projection is fp64."""
    return torch.promote_types(dtype, torch.float32)


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
