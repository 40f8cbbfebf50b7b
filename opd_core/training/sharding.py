"""Ranks: how they meet, and how they share one copy of the student (FSDP2).

Each layer and the rest of the model are gathered for their own forward and backward only. Gradients
are added over ranks, never averaged: the loss is already divided by the valid tokens of all ranks.
They are reduced in fp32, whatever the dtype of the forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from opd_core.config import TrainingConfig

RANK_TIMEOUT = timedelta(minutes=30)
"""A collective waits so long for the other ranks; a rank that died is told by Ray long before."""


def join(address: str, rank: int, ranks: int, backend: str) -> None:
    """Meet the other ranks at ``host:port``."""
    dist.init_process_group(
        backend,
        init_method=f"tcp://{address}",
        rank=rank,
        world_size=ranks,
        timeout=RANK_TIMEOUT,
    )


def backend_of(training: TrainingConfig, device: torch.device) -> str:
    """What ranks speak through; ``auto`` is NCCL on GPUs, gloo on CPUs."""
    if training.backend != "auto":
        return training.backend
    return "nccl" if device.type == "cuda" else "gloo"


def rank_and_ranks() -> tuple[int, int]:
    """This rank and how many there are; (0, 1) where nobody joined."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def shard(
    root: nn.Module, layers: Iterable[nn.Module], training: TrainingConfig, device: torch.device
) -> None:
    """Shard ``root`` in place over the ranks that have joined; its parameters become DTensors on
    ``device``. ``root.dtype`` is that of its forward."""
    mesh = _mesh(training, device)
    dtype = root.dtype
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if dtype != torch.float32 else None,  # type: ignore[arg-type]
        reduce_dtype=torch.float32,
    )
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(root, mesh=mesh, mp_policy=policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Else FSDP scales inside the reduction, by an operation that only NCCL has.
            module.set_force_sum_reduction_for_comms(True)


def _mesh(training: TrainingConfig, device: torch.device) -> DeviceMesh:
    """One dimension that shards; with ``shard_ranks`` below the number of ranks, one more over
    which copies are kept (HSDP)."""
    _, ranks = rank_and_ranks()
    shards = training.shard_ranks or ranks
    if shards == ranks:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    shape = (ranks // shards, shards)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself; of a sharded one its whole value, gathered. A collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_state(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Name and whole value of everything in the model's state dict, one after the other; tied ones
    are gathered once. A collective: every rank goes through all of it."""
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    tied = tied_names(state)
    gathered: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name in tied:
            value = gathered[tied[name]]
        else:
            value = whole(tensor.detach())
            if name in tied.values():
                gathered[name] = value
        yield name, value


def tied_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of tensors that stand under an earlier name too, and that name."""
    first: dict[int, str] = {}
    found = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
    return {name: earlier for name, earlier in found.items() if name != earlier}
