"""Attention over sequences that lie end to end in one row and never see each other.

Registered with transformers as an attention function; a model that uses it gets no [T, T] mask (the
library builds none for a function without a mask function). Where the sequences end travels with
the forward, as the keyword argument ``boundaries``.

What this function cannot honour, it refuses: a result that is nearly right would train on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from opd_core.errors import TrainingError

NAME = "opd_packed"

# Those that the tests compare with padding. A model of another type may mix neighbouring tokens
# outside its attention, or leave its sliding window to a mask that nobody builds here.
PACKABLE_MODELS = frozenset(
    {
        "gemma3_text",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
    }
)
PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})

# What decoder layers hand on to every attention function and what changes no result of it.
_WITHOUT_EFFECT = frozenset({"position_ids", "use_cache", "cache_position", "output_router_logits"})


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Where sequences begin and end. Example: lengths 3, 3, 2 are runs ((2, 3), (1, 2))."""

    runs: tuple[tuple[int, int], ...]
    """(count, length) of neighbours of one length, on the host."""
    cumulative: Int[Tensor, " S+1"]
    """0 and the end of every sequence, int32, on the device."""

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(count * length for count, length in self.runs)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(length for _, length in self.runs)


def boundaries_of(lengths: Sequence[int], device: torch.device) -> Boundaries:
    """The boundaries of sequences of these lengths, each at least 1, end to end."""
    runs = tuple((len(list(same)), length) for length, same in groupby(lengths))
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return Boundaries(runs, ends.to(device, non_blocking=True))


def why_not_packed(config: Any) -> str | None:
    """Why a model of this config must be padded; None where it can be packed."""
    if config.model_type not in PACKABLE_MODELS:
        return f"model type {config.model_type!r} is none of those tested with packed sequences"
    strange = set(getattr(config, "layer_types", None) or ()) - PACKABLE_LAYERS
    if strange:
        return f"layers of type {', '.join(sorted(strange))} may see across a sequence's end"
    return None


def use_packed_attention(model: Any) -> None:
    """Switch a model over; each of its forwards then needs ``boundaries``.

    Raises :class:`TrainingError` for a model that cannot be packed.
    """
    reason = why_not_packed(model.config)
    if reason:
        raise _refusal(reason)
    model.set_attn_implementation(NAME)


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 Hq T D"],
    key: Float[Tensor, "1 Hkv T D"],
    value: Float[Tensor, "1 Hkv T D"],
    attention_mask: Tensor | None,
    *,
    boundaries: Boundaries | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Float[Tensor, "1 T Hq D"], None]:
    """Causal attention within each sequence, in the form that transformers calls.

    With a sliding window of w a token sees itself and the w - 1 tokens before it.

    Raises :class:`TrainingError` for anything else that was asked for: a mask, dropout, capped
    scores, attention sinks, returned attention weights, a cache, a batch of several rows.
    """
    if boundaries is None:
        raise _refusal("a forward came without boundaries of its sequences")
    if attention_mask is not None:
        raise _refusal("a forward came with an attention mask")
    if dropout > 0:
        raise _refusal(f"{type(module).__name__} asks for dropout in its attention")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise _refusal(f"{type(module).__name__} asks for attention in both directions")
    _refuse_unknown(module, others)
    if query.shape[0] != 1 or {query.shape[2], key.shape[2]} != {boundaries.tokens}:
        raise _refusal(
            f"expected one row of {boundaries.tokens} tokens, as the boundaries say, got queries "
            f"{tuple(query.shape)} and keys {tuple(key.shape)}"
        )
    # A window that no sequence outgrows hides nothing.
    hides = sliding_window is not None and sliding_window < boundaries.longest
    window = sliding_window if hides else None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    half = _half_dtype(query)
    if half is not None:
        # Unlike torch's own attention, this one is not cast by autocast.
        query, key, value = (x.to(half) for x in (query, key, value))
        return _by_kernel(query, key, value, boundaries, scale, window), None
    return _by_runs(query, key, value, boundaries, scale, window), None


AttentionInterface.register(NAME, packed_attention)


def _by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Boundaries,
    scale: float,
    window: int | None,
) -> Tensor:
    """One call for all sequences: FlashAttention's form for variable lengths, half precision."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = varlen_attn(
        q,
        k,
        v,
        boundaries.cumulative,
        boundaries.cumulative,
        boundaries.longest,
        boundaries.longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return cast(Tensor, out)[None]


def _by_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Boundaries,
    scale: float,
    window: int | None,
) -> Tensor:
    """One call for each run of equal lengths, as a batch [count, Hq, length, D]."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    sizes = [count * length for count, length in boundaries.runs]
    # split, not slices: the gradient of each slice would be a tensor of the whole size.
    pieces = zip(*(torch.split(x[0], sizes, 1) for x in (query, key, value)), strict=True)
    outs = []
    for run, piece in zip(boundaries.runs, pieces, strict=True):
        q, k, v = (x.unflatten(1, run).transpose(0, 1) for x in piece)
        mask = _window_mask(run[1], window, query.device) if window and window < run[1] else None
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)[None]


def _window_mask(length: int, window: int, device: torch.device) -> Bool[Tensor, "L L"]:
    """True where a query (row) sees a key (column)."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device)
    return seen.tril().triu(1 - window)


def _half_dtype(query: Tensor) -> torch.dtype | None:
    """The dtype of a computation that the GPU's kernel for variable lengths takes, else None."""
    if not query.is_cuda:
        return None
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


def _refuse_unknown(module: nn.Module, others: dict[str, Any]) -> None:
    unknown = [
        name
        for name, value in others.items()
        if name not in _WITHOUT_EFFECT and value is not None and value is not False
    ]
    if unknown:
        raise _refusal(f"{type(module).__name__} asks for {', '.join(sorted(unknown))}")


def _refusal(reason: str) -> TrainingError:
    return TrainingError(f"packed attention: {reason}; set training.packing: false")
