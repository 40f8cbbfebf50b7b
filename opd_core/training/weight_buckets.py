"""Rank 0's side of weights on their way to servers: kept on the host, handed over in buckets.

Two ways. A bucket is *lent*: copies that the server opens by handle, in shared memory of the host
or on the device, which must live until it has. Or it is *broadcast* in a process group that rank 0
and the servers' ranks join: the same rendezvous, name and backend as in the servers' own
``init_custom_process_group``.
"""

from __future__ import annotations

import base64
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing.reductions import reduce_tensor

from opd_core.config import Backend
from opd_core.errors import SamplingError
from opd_core.training.sharding import rank_and_ranks

BUCKET_BYTES = 1 << 30
"""Bytes of weights that are on their way at once, beside the copy that rank 0 keeps."""
GROUP_TIMEOUT = timedelta(minutes=2)
"""A server that has not joined, or taken a bucket, by then is lost."""

ANYWHERE = "host"
"""Where a bucket in shared memory is."""

Named = list[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """A process group that rank 0 opens: ``host:port``, a name that no other has, what its members
    speak through (``nccl`` or ``gloo``)."""

    address: str
    name: str
    backend: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """What a server must know of a bucket to receive it; dtypes as torch names them."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def empty(self, device: torch.device) -> Named:
        """Room for it."""
        kinds = zip(self.names, self.dtypes, self.shapes, strict=True)
        return [
            (name, torch.empty(shape, dtype=getattr(torch, dtype), device=device))
            for name, dtype, shape in kinds
        ]


class HeldWeights:
    """One rank's part in handing out the weights as they were when they were asked for; training
    goes on. Rank 0 has ``weights``, on its host; on the other ranks they are empty."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        device: torch.device,
        bucket_bytes: int = BUCKET_BYTES,
        timeout: timedelta = GROUP_TIMEOUT,
    ) -> None:
        self._device = device
        self._timeout = timeout
        self._parts = list(_cut(weights, bucket_bytes))
        self._lent: Any = None
        self._group: Any = None

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What there is to hand out."""
        return tuple(_described(part) for part in self._parts)

    def lend(self, number: int, backend: Backend) -> dict[str, str]:
        """Handles of a bucket's copies, pickled, in base64, by the device that they are on. They
        live until the next bucket is lent or this one is given back.

        SGLang gets rank 0's host memory. LMDeploy gets memory of every rank's device, in a
        collective of the training ranks.
        """
        part = self._parts[number] if self._parts else None
        if backend == "lmdeploy":
            self._lent = _spread(part, self._device)
            return {_physical(self._device): _pickled(self._lent, backend)}
        if part is None:
            return {}
        self._lent = [(name, tensor.clone()) for name, tensor in part]
        return {ANYWHERE: _pickled(self._lent, backend)}

    def give_back(self) -> None:
        """Free what was lent last: every server has read it."""
        self._lent = None

    def meeting_point(self, address: str) -> MeetingPoint:
        """A group that could be opened at ``host:port``."""
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        return MeetingPoint(address, f"opd-weights-{uuid.uuid4().hex}", backend)

    def join(self, meeting: MeetingPoint, world_size: int) -> None:
        """Open the group as its rank 0; returns when all others have joined."""
        with _told_as_sampling_error("a server did not join the group for weights"):
            self._group = main_group(meeting, 0, world_size, self._timeout)

    def broadcast(self, number: int) -> None:
        """Send a bucket to all that have joined, tensor by tensor in its order."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with _told_as_sampling_error("a server did not take its weights"):
            sent = [tensor.to(self._device) for _, tensor in self._parts[number]]
            works = [self._group.broadcast([tensor], options) for tensor in sent]
            for work in works:
                work.wait(self._timeout)

    def leave(self) -> None:
        """Close the group, if one is open."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def main_group(meeting: MeetingPoint, rank: int, world_size: int, timeout: timedelta) -> Any:
    """A process group beside the training ranks' own, made as the servers make theirs."""
    url = f"tcp://{meeting.address}"
    meet = rendezvous(url, rank, world_size, timeout=timeout)
    store, _, _ = next(meet)
    store.set_timeout(timeout)
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        dist.Backend(meeting.backend),
        distributed_c10d.PrefixStore(meeting.name, store),
        group_name=distributed_c10d.GroupName(meeting.name),
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def _spread(part: Named | None, device: torch.device) -> Named:
    """Rank 0's bucket on every rank's device."""
    if rank_and_ranks()[1] == 1:
        assert part is not None
        return [(name, tensor.to(device, copy=True)) for name, tensor in part]
    described = [None if part is None else _described(part)]
    dist.broadcast_object_list(described, src=0)
    assert described[0] is not None
    copies = described[0].empty(device)
    for number, (_, copy) in enumerate(copies):
        if part is not None:
            copy.copy_(part[number][1])
        dist.broadcast(copy, src=0)
    return copies


def _physical(device: torch.device) -> str:
    """The device's name outside this process, as recipes have it: Ray shows an actor its own."""
    if device.type == "cpu":
        return ANYWHERE
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[device.index or 0]


def _cut(weights: Mapping[str, Tensor], bucket_bytes: int) -> Iterator[Named]:
    """Parts of at most so many bytes, or of one tensor that is larger."""
    part: Named = []
    size = 0
    for name, tensor in weights.items():
        if part and size + tensor.nbytes > bucket_bytes:
            yield part
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    if part:
        yield part


def _described(part: Named) -> Bucket:
    return Bucket(
        names=tuple(name for name, _ in part),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in part),
        shapes=tuple(tuple(tensor.shape) for _, tensor in part),
    )


def _pickled(copies: Named, backend: Backend) -> str:
    """SGLang's ``MultiprocessingSerializer`` reads tensors; LMDeploy's ``update_params`` reads the
    function and the arguments that make each, so as to name its own device in them."""
    entries: list[Any] = list(copies)
    with _shared_by_file():
        if backend == "lmdeploy":
            entries = [(name, reduce_tensor(tensor)) for name, tensor in copies]  # type: ignore[no-untyped-call]
        return base64.b64encode(ForkingPickler.dumps(entries)).decode()


@contextmanager
def _told_as_sampling_error(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # all that torch.distributed raises
        raise SamplingError(f"{what}: {str(error).splitlines()[0][:300]}") from None


@contextmanager
def _shared_by_file() -> Iterator[None]:
    """Shared memory under a name: a descriptor could only be passed on to a child."""
    before = multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]
