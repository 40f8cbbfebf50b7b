"""What servers are asked for when weights are pushed to them, and what becomes of one that fails.

The servers here only take notes; the real ones are in tests/servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import orjson
import pytest

from opd_core.config import Backend
from opd_core.errors import SamplingError
from opd_core.sampling.server_calls import StudentServer
from opd_core.sampling.server_wire import ServerLost
from opd_core.training.weight_buckets import ANYWHERE, Bucket, MeetingPoint
from opd_core.training.weight_push import UNFINISHED, DistributedPath, TensorPath

BUCKETS = (
    Bucket(("a", "b"), ("float32", "bfloat16"), ((2, 3), (4,))),
    Bucket(("c",), ("float32",), ((5,),)),
)
MEETING = MeetingPoint("10.0.0.1:777", "weights-1", "nccl")
TAKE_TENSOR, TAKE_BROADCAST = "/update_weights_from_tensor", "/update_weights_from_distributed"


class Notes:
    """Servers that do what they are asked, but for the paths in ``refusing``."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.refusing: set[tuple[str, str]] = set()
        self.versions: dict[str, str] = {}

    def answer(self, request: httpx.Request) -> httpx.Response:
        host, path = request.url.host, request.url.path
        if request.method == "GET":
            return httpx.Response(200, json={"weight_version": self.versions.get(host, "default")})
        body = orjson.loads(request.content)
        self.asked.append((host, path, body))
        if (host, path) in self.refusing:
            return httpx.Response(400, json={"success": False, "message": "it would not"})
        self.versions[host] = body.get("weight_version", self.versions.get(host, "default"))
        return httpx.Response(200, json={"success": True, "message": "done"})

    def paths(self, host: str) -> list[str]:
        return [path for asked, path, _ in self.asked if asked == host]

    def bodies(self, host: str, path: str) -> list[dict[str, Any]]:
        return [body for asked, at, body in self.asked if (asked, at) == (host, path)]


class Holder:
    """A learner that notes what it is asked for."""

    def __init__(self, devices: tuple[str, ...] = (ANYWHERE,)) -> None:
        self.devices = devices
        self.done: list[str] = []

    async def hold_weights(self) -> tuple[Bucket, ...]:
        return BUCKETS

    async def lend_bucket(self, number: int, backend: Backend) -> Mapping[str, str]:
        self.done.append(f"lend {number}")
        return {device: f"bucket {number} on {device}" for device in self.devices}

    async def give_back_bucket(self) -> None:
        self.done.append("give back")

    async def meeting_point(self) -> MeetingPoint:
        return MEETING

    async def join_group(self, meeting: MeetingPoint, world_size: int) -> None:
        self.done.append(f"join {world_size}")

    async def broadcast_bucket(self, number: int) -> None:
        self.done.append(f"broadcast {number}")

    async def leave_group(self) -> None:
        self.done.append("leave")


class Lonely(Holder):
    """Nobody comes to its group."""

    async def join_group(self, meeting: MeetingPoint, world_size: int) -> None:
        raise SamplingError("a server did not join")


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
async def http(notes: Notes) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.MockTransport(notes.answer)) as client:
        yield client


def servers(
    http: httpx.AsyncClient, *hosts: str, backend: Backend = "sglang"
) -> list[StudentServer]:
    return [StudentServer(backend, f"http://{host}", http) for host in hosts]


# ------------------------------------------------------------------ by handle


async def test_only_the_last_bucket_makes_a_server_tell_the_version(
    notes: Notes, http: httpx.AsyncClient
) -> None:
    path, holder = TensorPath(tp_size=2), Holder()
    await path.prepare(holder, 7)
    assert await path.load(servers(http, "one", "two"), 7) == {}
    for host in ("one", "two"):
        assert notes.paths(host) == [
            "/begin_weight_update",
            TAKE_TENSOR,
            TAKE_TENSOR,
            "/end_weight_update",
        ]
        first, last = notes.bodies(host, TAKE_TENSOR)
        assert first == {
            "serialized_named_tensors": ["bucket 0 on host"] * 2,  # one for each rank
            "weight_version": UNFINISHED,
            "flush_cache": False,
        }
        assert last == {
            "serialized_named_tensors": ["bucket 1 on host"] * 2,
            "weight_version": "7",
            "flush_cache": True,
        }
    assert holder.done == ["lend 0", "lend 1", "give back"]


async def test_a_server_that_refuses_a_bucket_gets_no_more_and_the_others_get_all(
    notes: Notes, http: httpx.AsyncClient
) -> None:
    notes.refusing.add(("one", TAKE_TENSOR))
    path = TensorPath()
    await path.prepare(Holder(), 7)
    failed = await path.load(servers(http, "one", "two"), 7)
    assert list(failed) == ["http://one"]
    assert "it would not" in str(failed["http://one"])
    # It must leave the update that it began, or it would begin no other.
    assert notes.paths("one") == ["/begin_weight_update", TAKE_TENSOR, "/end_weight_update"]
    assert notes.versions["two"] == "7"


async def test_a_server_that_says_success_and_tells_another_version_has_failed() -> None:
    class Forgetful(Notes):
        def answer(self, request: httpx.Request) -> httpx.Response:
            answer = super().answer(request)
            self.versions.clear()
            return answer

    path = TensorPath()
    await path.prepare(Holder(), 7)
    transport = httpx.MockTransport(Forgetful().answer)
    async with httpx.AsyncClient(transport=transport) as http:
        failed = await path.load(servers(http, "one"), 7)
    assert "given the weights 7, it tells default" in str(failed["http://one"])


async def test_a_server_that_comes_back_gets_the_same_weights_without_the_others(
    notes: Notes, http: httpx.AsyncClient
) -> None:
    path = TensorPath()
    await path.prepare(Holder(), 7)
    await path.load(servers(http, "one", "two"), 7)
    notes.asked.clear()
    assert await path.load(servers(http, "three"), 7) == {}
    assert {host for host, _, _ in notes.asked} == {"three"}
    assert notes.versions["three"] == "7"


async def test_an_update_that_a_dead_driver_left_open_is_ended_first() -> None:
    class LeftOpen(Notes):
        left_open = True

        def answer(self, request: httpx.Request) -> httpx.Response:
            path = request.url.path
            self.refusing = {("one", "/begin_weight_update")} if self.left_open else set()
            self.left_open = self.left_open and path != "/end_weight_update"
            return super().answer(request)

    path, notes = TensorPath(), LeftOpen()
    await path.prepare(Holder(), 7)
    async with httpx.AsyncClient(transport=httpx.MockTransport(notes.answer)) as http:
        assert await path.load(servers(http, "one"), 7) == {}
    assert notes.versions["one"] == "7"


async def test_lmdeploy_is_told_of_the_last_bucket_and_gets_handles_of_its_own_devices(
    notes: Notes, http: httpx.AsyncClient
) -> None:
    path = TensorPath(tp_size=2, devices_of=lambda endpoint: ("3", "1"))
    await path.prepare(Holder(devices=("0", "1", "2", "3")), 7)
    assert await path.load(servers(http, "one", backend="lmdeploy"), 7) == {}
    assert notes.asked == [
        (
            "one",
            "/update_weights",
            {
                "serialized_named_tensors": [f"bucket {n} on 3", f"bucket {n} on 1"],
                "finished": n == 1,
            },
        )
        for n in range(2)
    ]


@pytest.mark.parametrize(
    ("devices", "told"), [(("3",), "runs on 3,"), (None, "unknown devices,"), (("0", "1"), "0, 1,")]
)
async def test_lmdeploy_on_a_device_without_training_is_told_what_to_write(
    notes: Notes, http: httpx.AsyncClient, devices: tuple[str, ...] | None, told: str
) -> None:
    path = TensorPath(devices_of=lambda endpoint: devices)
    await path.prepare(Holder(devices=("0", "1")), 7)
    failed = await path.load(servers(http, "one", backend="lmdeploy"), 7)
    assert f"{told} training on 0, 1" in str(failed["http://one"])
    assert "weight_sync: distributed" in str(failed["http://one"])
    assert notes.asked == []


# ------------------------------------------------------------------ in a group


async def test_each_server_is_met_in_a_group_of_its_own(
    notes: Notes, http: httpx.AsyncClient
) -> None:
    path, holder = DistributedPath(tp_size=2), Holder()
    await path.prepare(holder, 7)
    assert await path.load(servers(http, "one", "two"), 7) == {}
    assert holder.done == ["join 3", "broadcast 0", "broadcast 1", "leave"] * 2
    for host in ("one", "two"):
        assert notes.paths(host) == [
            "/begin_weight_update",
            "/init_weights_update_group",
            TAKE_BROADCAST,
            TAKE_BROADCAST,
            "/destroy_weights_update_group",
            "/end_weight_update",
        ]
        (invitation,) = notes.bodies(host, "/init_weights_update_group")
        assert invitation == {
            "master_address": "10.0.0.1",
            "master_port": 777,
            "rank_offset": 1,
            "world_size": 3,
            "group_name": "weights-1",
            "backend": "nccl",
        }
        first, last = notes.bodies(host, TAKE_BROADCAST)
        assert first == {
            "names": ["a", "b"],
            "dtypes": ["float32", "bfloat16"],
            "shapes": [[2, 3], [4]],
            "group_name": "weights-1",
            "weight_version": UNFINISHED,
            "flush_cache": False,
        }
        assert (last["weight_version"], last["flush_cache"]) == ("7", True)


async def test_a_server_that_breaks_off_harms_no_other_and_its_group_is_left(
    notes: Notes, http: httpx.AsyncClient
) -> None:
    notes.refusing.add(("one", TAKE_BROADCAST))
    path, holder = DistributedPath(), Holder()
    await path.prepare(holder, 7)
    failed = await path.load(servers(http, "one", "two"), 7)
    assert list(failed) == ["http://one"]
    assert notes.paths("one")[-1] == "/end_weight_update"
    assert holder.done[:3] == ["join 2", "broadcast 0", "leave"]
    assert notes.versions["two"] == "7"


async def test_a_server_that_is_away_is_not_waited_for_in_a_group(http: httpx.AsyncClient) -> None:
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    path, holder = DistributedPath(), Holder()
    await path.prepare(holder, 7)
    async with httpx.AsyncClient(transport=httpx.MockTransport(away)) as client:
        failed = await path.load(servers(client, "one"), 7)
    assert "cannot connect" in str(failed["http://one"])
    assert holder.done == []


async def test_the_servers_own_words_come_before_those_of_the_group(
    notes: Notes, http: httpx.AsyncClient
) -> None:
    path = DistributedPath()
    await path.prepare(Lonely(), 7)
    assert "did not join" in str((await path.load(servers(http, "one"), 7))["http://one"])
    notes.refusing.add(("one", "/init_weights_update_group"))
    assert "it would not" in str((await path.load(servers(http, "one"), 7))["http://one"])


@pytest.mark.parametrize("path", [TensorPath(), DistributedPath()], ids=["tensor", "distributed"])
async def test_what_is_wrong_with_the_learner_is_no_servers_fault(
    path: TensorPath | DistributedPath, http: httpx.AsyncClient
) -> None:
    class Dead(Holder):
        async def lend_bucket(self, number: int, backend: Backend) -> Mapping[str, str]:
            raise RuntimeError("the actor died")

        async def broadcast_bucket(self, number: int) -> None:
            raise RuntimeError("the actor died")

    await path.prepare(Dead(), 7)
    with pytest.raises(RuntimeError, match="the actor died"):
        await path.load(servers(http, "one"), 7)


async def test_a_server_that_refuses_after_the_group_has_failed_is_still_heard(
    notes: Notes,
) -> None:
    async def slowly(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.05)
        return notes.answer(request)

    notes.refusing.add(("one", "/init_weights_update_group"))
    path = DistributedPath()
    await path.prepare(Lonely(), 7)
    async with httpx.AsyncClient(transport=httpx.MockTransport(slowly)) as http:
        failed = await path.load(servers(http, "one"), 7)
    assert "it would not" in str(failed["http://one"])


async def test_what_would_be_refused_again_is_told_from_what_may_pass(
    notes: Notes, http: httpx.AsyncClient
) -> None:
    path = DistributedPath()
    await path.prepare(Lonely(), 7)
    assert isinstance((await path.load(servers(http, "one"), 7))["http://one"], ServerLost)
    notes.refusing.add(("one", "/init_weights_update_group"))
    assert not isinstance((await path.load(servers(http, "one"), 7))["http://one"], ServerLost)


async def test_the_learner_does_not_wait_for_a_server_that_refused(
    notes: Notes, http: httpx.AsyncClient
) -> None:
    class Waiting(Holder):
        async def join_group(self, meeting: MeetingPoint, world_size: int) -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.done.append("waits no more")

    notes.refusing.add(("one", "/init_weights_update_group"))
    path, holder = DistributedPath(), Waiting()
    await path.prepare(holder, 7)
    async with asyncio.timeout(5):
        failed = await path.load(servers(http, "one"), 7)
    assert "it would not" in str(failed["http://one"])
    assert holder.done == ["waits no more", "leave"]


async def test_a_load_that_is_cancelled_gives_the_bucket_back() -> None:
    begun = asyncio.Event()

    async def hang(request: httpx.Request) -> httpx.Response:
        if request.url.path == TAKE_TENSOR:
            begun.set()
            await asyncio.get_running_loop().create_future()
        return httpx.Response(200, json={"success": True})

    path, holder = TensorPath(), Holder()
    await path.prepare(holder, 7)
    async with httpx.AsyncClient(transport=httpx.MockTransport(hang)) as http:
        loading = asyncio.create_task(path.load(servers(http, "one"), 7))
        await begun.wait()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
    assert holder.done == ["lend 0", "give back"]
