"""Weights to servers without a disk: by handle on one host, or in a process group.

The driver asks the servers, rank 0 holds the weights (:mod:`opd_core.training.weight_buckets`).
Until a server has its last bucket its version is ``UNFINISHED``, so that one which is left with
half of them passes for no policy version. Request forms: SGLang 0.5.23 ``managers/io_struct.py``,
to be sent between ``/begin_weight_update`` and ``/end_weight_update``; LMDeploy 0.18.0
``serve/openai/protocol.py``, whose servers tell no version. There ``/update_weights`` and the
process group need LMDeploy's Ray executor (``LMDEPLOY_EXECUTOR_BACKEND=ray``): ``uni`` and ``mp``
do not have them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from opd_core.config import Backend
from opd_core.errors import SamplingError
from opd_core.sampling.server_calls import StudentServer
from opd_core.sampling.server_wire import ServerLost
from opd_core.sampling.weight_paths import each
from opd_core.training.weight_buckets import ANYWHERE, Bucket, MeetingPoint

UNFINISHED = "unfinished"
"""The weight version of a server that has not got its last bucket."""
LAST_WORDS_S = 5.0
"""So long a server may take to say why it did not come to the group."""


class WeightHolder(Protocol):
    """What these paths use of the learner."""

    async def hold_weights(self) -> tuple[Bucket, ...]:
        """Keep the weights as they are now, in place of those kept before."""

    async def lend_bucket(self, number: int, backend: Backend) -> Mapping[str, str]:
        """What opens a bucket, by the device that it is on."""

    async def give_back_bucket(self) -> None:
        """Free what was lent last."""

    async def meeting_point(self) -> MeetingPoint:
        """Where rank 0 would open a process group."""

    async def join_group(self, meeting: MeetingPoint, world_size: int) -> None:
        """Open it, and wait for the others. Raises :class:`SamplingError` if they do not come."""

    async def broadcast_bucket(self, number: int) -> None:
        """Send a bucket to all that have joined. Raises :class:`SamplingError`."""

    async def leave_group(self) -> None:
        """Close it."""


class _HeldPath:
    """Of weights that rank 0 holds, for servers of ``tp_size`` ranks each."""

    def __init__(self, *, tp_size: int = 1) -> None:
        self._tp_size = tp_size
        self._learner: WeightHolder
        self._buckets: tuple[Bucket, ...] = ()

    async def prepare(self, learner: WeightHolder, policy_version: int) -> None:
        """Let rank 0 keep a copy of the weights on its host."""
        self._learner, self._buckets = learner, await learner.hold_weights()

    async def aclose(self) -> None:
        """The copy lies with rank 0, and ends with it."""


class TensorPath(_HeldPath):
    """By handle, for servers on rank 0's host.

    SGLang gets shared memory of the host, whatever devices both sides are on: run against its CPU
    server; on GPUs each of its ranks copies from there, which is unproven.

    LMDeploy opens CUDA IPC handles, each on its own device, so each of its GPUs must be that of a
    training actor too: run against a CPU stand-in of its engine only, unproven on GPUs.
    ``devices_of`` names the devices of an endpoint, one for each of its ranks, if it knows them.
    """

    def __init__(
        self,
        *,
        tp_size: int = 1,
        devices_of: Callable[[str], Sequence[str] | None] = lambda endpoint: None,
    ) -> None:
        super().__init__(tp_size=tp_size)
        self._devices_of = devices_of

    async def load(
        self, servers: Sequence[StudentServer], policy_version: int
    ) -> dict[str, SamplingError]:
        """Bucket by bucket, to all servers at once."""
        giving = _Giving(servers)
        await giving.each(_begin)
        try:
            for number in range(len(self._buckets)):
                if not giving.left:
                    break
                last = number == len(self._buckets) - 1
                lent = await self._learner.lend_bucket(number, giving.left[0].backend)
                await giving.each(partial(self._give, lent, str(policy_version) if last else None))
        finally:
            await self._learner.give_back_bucket()
        await giving.each(partial(_end, policy_version))
        return giving.failed

    async def _give(
        self, lent: Mapping[str, str], version: str | None, server: StudentServer
    ) -> None:
        lmdeploy = server.backend == "lmdeploy"
        path = "/update_weights" if lmdeploy else "/update_weights_from_tensor"
        handles = self._handles(lent, server.endpoint)
        await _ask(server, path, {"serialized_named_tensors": handles} | _state(server, version))

    def _handles(self, lent: Mapping[str, str], endpoint: str) -> list[str]:
        """One for each rank of a server."""
        if ANYWHERE in lent:
            return [lent[ANYWHERE]] * self._tp_size
        devices = self._devices_of(endpoint) or ()
        if len(devices) != self._tp_size or not set(devices) <= lent.keys():
            raise SamplingError(
                f"{endpoint} runs on {', '.join(devices) or 'unknown devices'}, training on "
                f"{', '.join(lent)}: LMDeploy takes weights by handle only from the same devices: "
                "write weight_sync: distributed, or let it share its devices with training"
            )
        return [lent[device] for device in devices]


class DistributedPath(_HeldPath):
    """In a process group of rank 0 and one server's ranks, made anew for each server and sync:
    nobody keeps count of who is still in, and with gloo one that dies harms no other.

    Run against SGLang's CPU server with gloo. NCCL is unproven; it needs servers on other GPUs than
    training's, and the same release of NCCL on both sides. Its watchdog may end rank 0's process
    when a server dies in a broadcast: that costs the training actors, not only the server.
    """

    async def load(
        self, servers: Sequence[StudentServer], policy_version: int
    ) -> dict[str, SamplingError]:
        """One server after the other."""
        failed = {}
        for server in servers:
            try:
                await self._load_one(server, policy_version)
            except SamplingError as error:
                failed[server.endpoint] = error
        return failed

    async def _load_one(self, server: StudentServer, policy_version: int) -> None:
        await _begin(server)  # answered by its scheduler: it lives, and will come to the group
        meeting = await self._learner.meeting_point()
        world_size = 1 + self._tp_size
        try:
            join = _ask(server, "/init_weights_update_group", _invitation(meeting, world_size))
            await _both(join, self._learner.join_group(meeting, world_size))
            for number, bucket in enumerate(self._buckets):
                last = number == len(self._buckets) - 1
                body = _told(bucket, meeting) | _state(
                    server, str(policy_version) if last else None
                )
                take = _ask(server, "/update_weights_from_distributed", body)
                await _both(take, self._learner.broadcast_bucket(number))
            await _ask(server, "/destroy_weights_update_group", {"group_name": meeting.name})
        finally:
            await self._learner.leave_group()
        await _end(policy_version, server)


class _Giving:
    """Servers that are being given weights; one that fails is left out from then on."""

    def __init__(self, servers: Sequence[StudentServer]) -> None:
        self.left = list(servers)
        self.failed: dict[str, SamplingError] = {}

    async def each(self, action: Callable[[StudentServer], Awaitable[None]]) -> None:
        self.failed |= await each(self.left, action)
        self.left = [server for server in self.left if server.endpoint not in self.failed]


async def _begin(server: StudentServer) -> None:
    if server.backend == "lmdeploy":
        await server.check_health()
        return
    try:
        await _ask(server, "/begin_weight_update", {})
    except ServerLost:
        raise
    except SamplingError:  # a driver that died left an update open, which has just been ended
        await _ask(server, "/begin_weight_update", {})


async def _end(policy_version: int, server: StudentServer) -> None:
    """Raises :class:`ServerLost` if the server does not tell the version that it was given."""
    if server.backend != "sglang":
        return
    await _ask(server, "/end_weight_update", {})
    told = await server.weight_version()
    if told != str(policy_version):
        raise ServerLost(f"{server.endpoint}: given the weights {policy_version}, it tells {told}")


async def _ask(server: StudentServer, path: str, body: Mapping[str, Any]) -> None:
    """Raises :class:`SamplingError` unless the server says that it did it."""
    try:
        said = await server.call(path, body)
        if isinstance(said, dict) and said.get("success") is not True:
            raise ServerLost(f"{server.endpoint}{path}: {str(said)[:300]}")
    except SamplingError:
        if server.backend == "sglang":  # else it would begin no other update
            with suppress(SamplingError):
                await server.call("/end_weight_update", {})
        raise


async def _both(server: Awaitable[None], learner: Awaitable[None]) -> None:
    """Wait for both sides. One that fails ends the other, which would wait for it in vain; but the
    server's own words come first, if it says them within ``LAST_WORDS_S``. A learner that met
    nobody is :class:`ServerLost`: the server was to blame, and may come back."""
    serving, learning = asyncio.ensure_future(server), asyncio.ensure_future(learner)
    try:
        await asyncio.wait({serving, learning}, return_when=asyncio.FIRST_EXCEPTION)
        await asyncio.wait({serving}, timeout=LAST_WORDS_S if learning.done() else 0)
    finally:
        serving.cancel()
        learning.cancel()
        done = await asyncio.gather(serving, learning, return_exceptions=True)
    errors = [e for e in done if e is not None and not isinstance(e, asyncio.CancelledError)]
    if not errors:
        return
    if errors[0] is done[1] and isinstance(errors[0], SamplingError):
        raise ServerLost(str(errors[0])) from None
    raise errors[0]


def _state(server: StudentServer, version: str | None) -> dict[str, Any]:
    """What the request for a bucket says of the whole; ``version`` is None before the last."""
    if server.backend == "lmdeploy":
        return {"finished": version is not None}
    # A flush is refused while anything runs, and old and new entries must not mix.
    return {"weight_version": version or UNFINISHED, "flush_cache": version is not None}


def _invitation(meeting: MeetingPoint, world_size: int) -> dict[str, Any]:
    host, _, port = meeting.address.rpartition(":")
    return {
        "master_address": host,
        "master_port": int(port),
        "rank_offset": 1,
        "world_size": world_size,
        "group_name": meeting.name,
        "backend": meeting.backend,
    }


def _told(bucket: Bucket, meeting: MeetingPoint) -> dict[str, Any]:
    return {
        "names": bucket.names,
        "dtypes": bucket.dtypes,
        "shapes": bucket.shapes,
        "group_name": meeting.name,
    }
