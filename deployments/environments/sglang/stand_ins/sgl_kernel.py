"""A stand-in for SGLang's compiled CPU kernels, which no package index carries.

Without AMX SGLang computes in plain torch and calls one function of this module. Its other names
can be imported, as SGLang does, and raise when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_length: int,
) -> None:
    """Write the cache slots of a batch's new tokens into the request table, in place.

    Row ``req_pool_indices[b]`` of ``req_to_token`` [requests, pool_length] gets, from
    ``start_offset[b]`` to ``end_offset[b]``, the next so many slots of ``out_cache_loc``.
    """
    starts, ends = start_offset.tolist(), end_offset.tolist()
    counts = [end - start for start, end in zip(starts, ends, strict=True)]
    slots = torch.split(out_cache_loc[: sum(counts)].to(req_to_token.dtype), counts)
    for row, start, end, part in zip(req_pool_indices.tolist(), starts, ends, slots, strict=True):
        req_to_token[row, start:end] = part


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name}: this environment has no compiled kernels of SGLang, and scoring "
            "on a CPU does not need them; use a GPU environment for what you are doing"
        )

    return missing
