"""Servers as one sampler: syncs, interruptions, and what becomes of a server that is lost."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from opd_core.config import Backend
from opd_core.errors import SamplingError
from opd_core.sampling.protocol import Completion, SampleRequest
from opd_core.sampling.server_sampler import ServerSampler
from opd_core.sampling.weight_paths import DiskPath, WeightPath

VOCAB_SIZE = 32
END = 1


class FakeServer:
    """A server that samples the token ``5`` and then the end token, once ``work`` lets it."""

    def __init__(self, backend: Backend = "sglang") -> None:
        self.backend = backend
        self.version = "default"
        self.calls: list[str] = []
        self.prompts: list[list[int]] = []
        self.dead = False
        self.well = True
        self.lets_abort = True
        self.takes_weights = True
        self.refuses_weights = False
        self.never_rests = False
        self.hangs_at_weights = False
        self.broken: Callable[[dict[str, Any]], httpx.Response | Exception | None] = lambda body: (
            None
        )
        self.at_once = True
        self.in_flight = 0
        self.most_in_flight = 0
        self._waiting: list[asyncio.Future[str]] = []

    async def answer(self, path: str, body: dict[str, Any]) -> httpx.Response:
        if self.dead:
            raise httpx.ConnectError("connection refused")
        if path == "/generate":
            return await self._generate(body)
        self.calls.append(path)
        if path == "/health_generate":
            return httpx.Response(200 if self.well else 503)
        if path == "/release_memory_occupation" and not self.well:
            return httpx.Response(500)
        if path == "/abort_request":
            self.end_all("abort" if self.lets_abort else "")
        if path == "/flush_cache" and self.never_rests:
            return httpx.Response(400, text="Timed out waiting for idle state.")
        if path == "/update_weights_from_disk":
            assert not self.in_flight
            if self.hangs_at_weights:
                await asyncio.get_running_loop().create_future()
            assert Path(body["model_path"], "weights").exists()
            if self.refuses_weights:
                return httpx.Response(400, json={"success": False, "message": "out of memory"})
            if self.takes_weights:
                self.version = body["weight_version"]
            return httpx.Response(200, json={"success": True, "message": "done"})
        if path == "/model_info":
            return httpx.Response(200, json={"weight_version": self.version})
        return httpx.Response(200)

    def end_all(self, reason: str) -> None:
        for waiting in self._waiting if reason else []:
            if not waiting.done():
                waiting.set_result(reason)

    def die(self) -> None:
        """As after SIGKILL: what is open breaks, nobody answers, and the weights are gone."""
        self.dead, self.version = True, "default"
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(httpx.RemoteProtocolError("cut"))

    async def _generate(self, body: dict[str, Any]) -> httpx.Response:
        self.prompts.append(body["input_ids"])
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            broken = self.broken(body)
            if isinstance(broken, Exception):
                if not isinstance(broken, httpx.ConnectError):
                    self.die()
                raise broken
            if broken is not None:
                return broken
            reason = "stop"
            if not self.at_once:
                waiting = asyncio.get_running_loop().create_future()
                self._waiting.append(waiting)
                reason = await waiting
            ids = {"abort": [5], "abort empty": []}.get(reason, [5, END])
            return self.sampled(ids, reason.removesuffix(" empty"))
        finally:
            self.in_flight -= 1

    def sampled(self, ids: list[int], reason: str) -> httpx.Response:
        meta: dict[str, Any] = {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-0.5, token] for token in ids],
        }
        if self.backend == "sglang":
            meta["weight_versions"] = [{"version": self.version, "start": 0, "end": len(ids)}]
        return httpx.Response(200, json={"output_ids": ids, "meta_info": meta})


class Servers(httpx.AsyncBaseTransport):
    """Fake servers by their host."""

    def __init__(self, **servers: FakeServer) -> None:
        self.by_host = servers

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        return await self.by_host[request.url.host].answer(request.url.path, body)


class Learner:
    """Writes a folder; ``done`` holds it up."""

    def __init__(self) -> None:
        self.done = asyncio.Event()
        self.done.set()

    async def save_weights(self, path: Path) -> Path:
        await self.done.wait()
        path.mkdir()
        (path / "weights").touch()
        return path


class NothingPath:
    """For servers that take weights without being asked over HTTP."""

    async def prepare(self, learner: Any, policy_version: int) -> None:
        return None

    async def load(self, servers: Any, policy_version: int) -> dict[str, SamplingError]:
        return {}

    async def aclose(self) -> None:
        return None


def request(number: int = 0, ids: tuple[int, ...] = (2, 5)) -> SampleRequest:
    return SampleRequest((number, 0), ids, 7, max_new_tokens=8)


Connect = Callable[..., ServerSampler]


@pytest.fixture
async def connect(tmp_path: Path) -> AsyncIterator[Connect]:
    """``connect(Servers(a=…, b=…), **settings)``: a sampler before them, its naps short."""
    samplers = []

    def make(servers: Servers, *, path: WeightPath | None = None, **more: Any) -> ServerSampler:
        settings: dict[str, Any] = {"max_rows": 4, "away_limit_s": 5.0} | more
        first = next(iter(servers.by_host.values()))
        sampler = ServerSampler(
            first.backend,
            [f"http://{host}" for host in servers.by_host],
            path or DiskPath(tmp_path / "sync"),
            vocab_size=VOCAB_SIZE,
            end_ids=(END,),
            transport=servers,
            sleep=lambda seconds: asyncio.sleep(0.001),
            **settings,
        )
        samplers.append(sampler)
        return sampler

    yield make
    for sampler in samplers:
        await sampler.aclose()


async def synced(connect: Connect) -> tuple[FakeServer, ServerSampler]:
    """One server that has been given its weights, and a sampler before it."""
    server = FakeServer()
    sampler = connect(Servers(a=server))
    await sampler.sync(Learner(), 0)
    return server, sampler


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def test_nothing_is_sampled_before_the_first_sync(connect: Connect) -> None:
    server = FakeServer()
    sampler = connect(Servers(a=server))
    asked = asyncio.create_task(sampler.sample(request()))
    ready = asyncio.create_task(sampler.ready())
    await asyncio.sleep(0.01)
    assert not server.prompts
    await sampler.sync(Learner(), 0)
    assert await asked == Completion((5, END), (-0.5, -0.5), (0, 0), "stop")
    assert await ready == 0


async def test_a_sync_saves_then_aborts_then_loads_and_checks_the_version(
    connect: Connect, tmp_path: Path
) -> None:
    server, learner = FakeServer(), Learner()
    sampler = connect(Servers(a=server))
    await sampler.sync(learner, 6)
    server.at_once = False
    server.calls.clear()
    asked = [asyncio.create_task(sampler.sample(request(n))) for n in range(3)]
    await until(lambda: server.in_flight == 3)
    learner.done.clear()
    syncing = asyncio.create_task(sampler.sync(learner, 7))
    late = asyncio.create_task(sampler.sample(request(9)))
    await until(lambda: server.in_flight == 4)  # sampling goes on while weights are saved
    assert server.calls == []
    learner.done.set()
    done = await asyncio.gather(*asked, late)
    assert {(c.finish_reason, c.response_ids, c.policy_versions) for c in done} == {
        ("abort", (5,), (6,))
    }
    await syncing
    names = list(dict.fromkeys(server.calls))
    assert names == ["/abort_request", "/flush_cache", "/update_weights_from_disk", "/model_info"]
    assert await sampler.ready() == 7
    assert (tmp_path / "sync/version-000007/weights").exists()


async def test_only_the_last_two_versions_stay_on_disk(connect: Connect, tmp_path: Path) -> None:
    sampler = connect(Servers(a=FakeServer()))
    for version in range(4):
        await sampler.sync(Learner(), version)
    folders = sorted(folder.name for folder in (tmp_path / "sync").iterdir())
    assert folders == ["version-000002", "version-000003"]


async def test_a_request_that_reached_the_server_after_the_abort_is_aborted_again(
    connect: Connect,
) -> None:
    server, sampler = await synced(connect)
    server.at_once = server.lets_abort = False
    asked = asyncio.create_task(sampler.sample(request()))
    await until(lambda: server.in_flight)
    server.calls.clear()
    syncing = asyncio.create_task(sampler.sync(Learner(), 1))
    await until(lambda: "/abort_request" in server.calls)
    server.lets_abort = True
    assert (await asked).finish_reason == "abort"
    await syncing
    assert server.calls.count("/abort_request") >= 2


async def test_what_waits_for_a_place_is_sampled_with_the_next_weights(connect: Connect) -> None:
    server = FakeServer()
    sampler = connect(Servers(a=server), max_rows=2)
    await sampler.sync(Learner(), 0)
    server.at_once = False
    asked = [asyncio.create_task(sampler.sample(request(n))) for n in range(5)]
    await until(lambda: server.in_flight == 2)
    await sampler.sync(Learner(), 1)
    server.at_once = True
    done = await asyncio.gather(*asked)
    assert [c.finish_reason for c in done] == ["abort"] * 2 + ["stop"] * 3
    assert [c.policy_versions[0] for c in done] == [0, 0, 1, 1, 1]
    assert server.most_in_flight == 2


async def test_a_group_keeps_to_one_server(connect: Connect) -> None:
    servers = Servers(a=FakeServer(), b=FakeServer())
    sampler = connect(servers)
    await sampler.sync(Learner(), 0)
    await asyncio.gather(*(sampler.sample(request(n % 4, (2, n % 4))) for n in range(16)))
    assert {ids[1] for ids in servers.by_host["a"].prompts} == {0, 2}
    assert {ids[1] for ids in servers.by_host["b"].prompts} == {1, 3}


async def test_a_dead_servers_requests_go_elsewhere_and_it_comes_back_with_the_weights(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    servers = Servers(a=FakeServer(), b=FakeServer())
    first, second = servers.by_host["a"], servers.by_host["b"]
    sampler = connect(servers)
    await sampler.sync(Learner(), 3)
    first.at_once = False
    with caplog.at_level(logging.WARNING):
        asked = [asyncio.create_task(sampler.sample(request(0))) for _ in range(4)]
        await until(lambda: first.in_flight == 4)
        first.die()
        done = await asyncio.gather(*asked)
        assert {c.finish_reason for c in done} == {"stop"}
        assert len(second.prompts) == 4
        assert sampler.replaced == 0
        first.dead, first.at_once = False, True
        await until(lambda: sampler.replaced)
    assert first.version == "3"
    await sampler.sample(request(0))
    assert len(first.prompts) == 5
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "sampling server 0 is lost",
        "sampling server 0 is back at http",
    ]


async def test_a_server_that_was_started_elsewhere_is_found(connect: Connect) -> None:
    servers = Servers(a=FakeServer(), b=FakeServer())
    where = ["http://a"]
    del servers.by_host["b"]
    sampler = connect(servers, current_endpoints=lambda: where)
    await sampler.sync(Learner(), 0)
    servers.by_host["a"].die()
    servers.by_host["moved"] = FakeServer()
    asked = asyncio.create_task(sampler.sample(request()))
    await until(lambda: sampler.replicas.all[0].lost)
    where[0] = "http://moved"
    assert (await asked).policy_versions == (0, 0)


async def test_a_server_with_other_weights_is_lost_and_its_answer_never_taken(
    connect: Connect,
) -> None:
    server = FakeServer()
    sampler = connect(Servers(a=server))
    await sampler.sync(Learner(), 2)
    server.version = "default"
    server.calls.clear()
    completion = await sampler.sample(request())
    assert completion.policy_versions == (2, 2)
    assert len(server.prompts) == 2
    assert sampler.replaced == 1
    names = ["/health_generate", "/abort_request", "/flush_cache", "/update_weights_from_disk"]
    assert server.calls[:4] == names


async def test_what_waits_for_a_place_on_a_lost_server_goes_elsewhere(connect: Connect) -> None:
    servers = Servers(a=FakeServer(), b=FakeServer())
    first, second = servers.by_host["a"], servers.by_host["b"]
    sampler = connect(servers, max_rows=1)
    await sampler.sync(Learner(), 0)
    first.version, first.well = "default", False
    await asyncio.gather(*(sampler.sample(request()) for _ in range(3)))
    assert (len(first.prompts), len(second.prompts)) == (1, 3)


async def test_a_server_that_is_not_there_yet_is_no_requests_fault(connect: Connect) -> None:
    server, sampler = await synced(connect)
    script = [httpx.ConnectError("refused") for _ in range(4)]
    server.broken = lambda body: script.pop() if script else None
    assert (await sampler.sample(request())).finish_reason == "stop"
    assert sampler.replaced == 4


@pytest.mark.parametrize("how", ["refuses", "is away", "tells another version"])
async def test_a_server_that_does_not_take_the_weights_is_lost_until_it_does(
    connect: Connect, how: str
) -> None:
    servers = Servers(a=FakeServer(), b=FakeServer())
    first, second = servers.by_host["a"], servers.by_host["b"]
    first.takes_weights = how != "tells another version"
    first.refuses_weights = how == "refuses"
    first.dead = how == "is away"
    sampler = connect(servers)
    await sampler.sync(Learner(), 0)
    reasons = {
        "refuses": "out of memory",
        "is away": "refused",
        "tells another version": "given the weights 0, it tells 'default'",
    }
    assert reasons[how] in sampler.replicas.all[0].lost
    assert not sampler.replicas.all[1].lost
    assert (await sampler.sample(request())).policy_versions == (0, 0)
    assert not first.prompts
    assert second.prompts
    first.takes_weights, first.refuses_weights, first.dead = True, False, False
    await until(lambda: sampler.replaced)


async def test_with_all_servers_lost_too_long_sampling_fails_with_the_reasons(
    connect: Connect,
) -> None:
    servers = Servers(a=FakeServer(), b=FakeServer())
    sampler = connect(servers, away_limit_s=0.05)
    await sampler.sync(Learner(), 0)
    for server in servers.by_host.values():
        server.die()
    with pytest.raises(SamplingError, match=r"server 0: .*refused; server 1: .*refused"):
        await sampler.sample(request())
    with pytest.raises(SamplingError, match="no sampling server"):
        await sampler.sync(Learner(), 1)


async def test_a_refusal_is_told_in_the_servers_words_and_loses_nobody(connect: Connect) -> None:
    server, sampler = await synced(connect)
    server.broken = lambda body: httpx.Response(400, json={"error": {"message": "too long"}})
    with pytest.raises(SamplingError, match=r"rollout \(0, 0\).*400.*too long"):
        await sampler.sample(request())
    assert not sampler.replicas.all[0].lost


async def test_a_request_that_ends_servers_is_named_and_the_others_are_answered(
    connect: Connect,
) -> None:
    server = FakeServer()
    sampler = connect(Servers(a=server), max_rows=8)
    await sampler.sync(Learner(), 0)
    poison = (2, 13)

    def break_at(body: dict[str, Any]) -> Exception | None:
        return httpx.ReadError("cut") if tuple(body["input_ids"]) == poison else None

    server.broken = break_at
    asked = [asyncio.create_task(sampler.sample(request(n))) for n in range(4)]
    bad = asyncio.create_task(sampler.sample(request(13, poison)))
    while not bad.done():
        await until(lambda: server.dead or bad.done())
        server.dead = False
    with pytest.raises(SamplingError, match=r"rollout \(13, 0\).*3 times.*alone"):
        await bad
    server.dead = False
    assert {c.finish_reason for c in await asyncio.gather(*asked)} == {"stop"}


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_failing_server_is_lost_and_asked_again_when_it_is_well(
    connect: Connect, status: int
) -> None:
    server, sampler = await synced(connect)
    script = [httpx.Response(status, json={"message": "busy"}) for _ in range(2)]
    server.broken = lambda body: script.pop() if script else None
    assert (await sampler.sample(request())).finish_reason == "stop"
    assert sampler.replaced == 1


async def test_a_server_that_hangs_is_lost_and_one_that_is_slow_is_not(connect: Connect) -> None:
    servers = Servers(slow=FakeServer(), hangs=FakeServer())
    slow, hangs = servers.by_host["slow"], servers.by_host["hangs"]
    sampler = connect(servers, hang_limit_s=0.05)
    await sampler.sync(Learner(), 0)
    slow.at_once = hangs.at_once = hangs.well = False
    async with sampler:
        asked = [asyncio.create_task(sampler.sample(request(n))) for n in range(2)]
        await until(lambda: sampler.replicas.all[1].lost and "/health_generate" in slow.calls)
        assert "no answer" in sampler.replicas.all[1].lost
        assert not sampler.replicas.all[0].lost
        await until(lambda: slow.in_flight == 2)
        slow.end_all("stop")
        assert {(await task).finish_reason for task in asked} == {"stop"}


async def test_a_server_that_may_be_working_is_not_asked_for_its_health(connect: Connect) -> None:
    server = FakeServer()
    sampler = connect(Servers(a=server), hang_limit_s=60.0)
    await sampler.sync(Learner(), 0)
    server.at_once = False
    async with sampler:
        asked = asyncio.create_task(sampler.sample(request()))
        await until(lambda: server.in_flight)
        await asyncio.sleep(0.02)  # many rounds of the watch
        assert "/health_generate" not in server.calls
        server.end_all("stop")
        await asked


async def test_a_server_lost_while_it_sleeps_is_let_sleep(connect: Connect) -> None:
    servers = Servers(a=FakeServer(), b=FakeServer())
    first = servers.by_host["a"]
    sampler = connect(servers)
    await sampler.sync(Learner(), 0)
    first.well = False
    await sampler.sleep()
    assert sampler.replicas.all[0].lost
    first.well = True
    first.calls.clear()
    await asyncio.sleep(0.02)  # many knocks
    assert first.calls == []
    await sampler.wake()
    await sampler.sync(Learner(), 1)
    await until(lambda: sampler.replaced)
    assert first.version == "1"


async def test_sleeping_servers_release_their_memory_and_wait_for_weights(
    connect: Connect,
) -> None:
    server, sampler = await synced(connect)
    server.calls.clear()
    await sampler.sleep()
    await sampler.wake()
    asked = asyncio.create_task(sampler.sample(request()))
    await asyncio.sleep(0.01)
    assert not server.prompts
    await sampler.sync(Learner(), 1)
    assert (await asked).policy_versions == (1, 1)
    assert server.calls[:4] == [
        "/abort_request",
        "/flush_cache",
        "/release_memory_occupation",
        "/resume_memory_occupation",
    ]


async def test_lmdeploy_has_its_own_calls_and_the_version_is_that_of_the_sync(
    connect: Connect,
) -> None:
    server = FakeServer("lmdeploy")
    sampler = connect(Servers(a=server), path=NothingPath())
    await sampler.sync(Learner(), 4)
    assert (await sampler.sample(request())).policy_versions == (4, 4)
    await sampler.sleep()
    await sampler.wake()
    assert server.calls[-2:] == ["/sleep", "/wakeup"]
    assert "/flush_cache" not in server.calls


async def test_a_cancelled_request_gives_its_place_back(connect: Connect) -> None:
    server = FakeServer()
    sampler = connect(Servers(a=server), max_rows=1)
    await sampler.sync(Learner(), 0)
    server.at_once = False
    first = asyncio.create_task(sampler.sample(request()))
    await until(lambda: server.in_flight)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    server.at_once = True
    assert (await sampler.sample(request())).finish_reason == "stop"
    assert not sampler.replicas.all[0].lost


async def test_what_no_server_may_get_is_not_sent(connect: Connect) -> None:
    server, sampler = await synced(connect)
    with pytest.raises(SamplingError, match="vocabulary"):
        await sampler.sample(request(0, (2, VOCAB_SIZE)))
    assert not server.prompts


async def test_weights_that_every_server_refuses_are_an_error_at_once(connect: Connect) -> None:
    servers = Servers(a=FakeServer(), b=FakeServer())
    sampler = connect(servers, away_limit_s=3600.0)
    for server in servers.by_host.values():
        server.refuses_weights = True
    async with asyncio.timeout(5):
        with pytest.raises(
            SamplingError, match=r"every server refused.*http://a.*http://b.*memory"
        ):
            await sampler.sync(Learner(), 0)


async def test_one_server_that_is_away_and_one_that_refuses_may_still_come_back(
    connect: Connect,
) -> None:
    servers = Servers(a=FakeServer(), b=FakeServer())
    first, second = servers.by_host["a"], servers.by_host["b"]
    first.takes_weights, second.refuses_weights = False, True  # one tells another version
    sampler = connect(servers)
    syncing = asyncio.create_task(sampler.sync(Learner(), 0))
    await until(lambda: all(replica.lost for replica in sampler.replicas.all))
    first.takes_weights = True
    await syncing
    assert await sampler.ready() == 0


@pytest.mark.parametrize("what", ["sync", "sleep"])
async def test_a_server_that_does_not_come_to_rest_is_lost_before_it_dies_of_it(
    connect: Connect, what: str
) -> None:
    servers = Servers(a=FakeServer(), b=FakeServer())
    first = servers.by_host["a"]
    sampler = connect(servers)
    await sampler.sync(Learner(), 0)
    first.never_rests = True
    first.calls.clear()
    await (sampler.sync(Learner(), 1) if what == "sync" else sampler.sleep())
    assert "does not come to rest" in sampler.replicas.all[0].lost
    assert not {"/update_weights_from_disk", "/release_memory_occupation"} & set(first.calls)


async def test_no_weights_stay_on_disk_when_sampling_is_over(
    connect: Connect, tmp_path: Path
) -> None:
    folder = tmp_path / "sync"
    sampler = connect(Servers(a=FakeServer()))
    for version in range(2):
        await sampler.sync(Learner(), version)
    await sampler.aclose()
    assert not folder.exists()


async def test_what_others_put_beside_the_weights_stays(connect: Connect, tmp_path: Path) -> None:
    (tmp_path / "sync").mkdir()
    (tmp_path / "sync/notes").touch()
    sampler = connect(Servers(a=FakeServer()))
    await sampler.sync(Learner(), 0)
    await sampler.aclose()
    assert [path.name for path in (tmp_path / "sync").iterdir()] == ["notes"]


async def test_others_are_not_blamed_for_the_answers_that_a_server_was_lost_with(
    connect: Connect,
) -> None:
    """They were cancelled three times, and never sent alone."""
    server, sampler = await synced(connect)
    server.at_once = False
    asked = [asyncio.create_task(sampler.sample(request(n))) for n in range(2)]
    for turn in range(4):
        await until(lambda: server.in_flight == 2)
        server.broken = lambda body: httpx.Response(200, json=[])
        bad = asyncio.create_task(sampler.sample(request(7 + turn, (2, 7))))
        await until(lambda turn=turn: sampler.replicas.all[0].lost or sampler.replaced > turn)
        server.broken = lambda body: None
        bad.cancel()
        await until(lambda turn=turn: sampler.replaced > turn)
    await until(lambda: server.in_flight == 2)  # both at once: neither goes alone
    server.end_all("stop")
    assert {c.finish_reason for c in await asyncio.gather(*asked)} == {"stop"}


@pytest.mark.parametrize(
    "trouble",
    [httpx.Response(429), httpx.Response(503), httpx.RemoteProtocolError("keep-alive")],
    ids=["429", "503", "connection"],
)
async def test_trouble_that_passes_loses_no_server(
    connect: Connect, trouble: httpx.Response | Exception
) -> None:
    server, sampler = await synced(connect)
    script = [trouble]

    def broken(body: dict[str, Any]) -> httpx.Response | None:
        if not script:
            return None
        said = script.pop()
        if isinstance(said, Exception):
            raise said  # the server itself lives on
        return said

    server.broken = broken
    assert (await sampler.sample(request())).finish_reason == "stop"
    assert (len(server.prompts), sampler.replaced) == (2, 0)
    assert not sampler.replicas.all[0].lost


async def test_an_abort_that_no_sync_caused_is_asked_again_until_there_is_a_token(
    connect: Connect,
) -> None:
    server, sampler = await synced(connect)
    script = [[5], [], []]
    server.broken = lambda body: server.sampled(script.pop(), "abort") if script else None
    assert (await sampler.sample(request())).response_ids == (5,)
    assert len(server.prompts) == 3
    assert (await sampler.sample(request())).finish_reason == "stop"
    assert sampler.replaced == 0


async def test_a_server_that_only_aborts_is_lost_and_the_request_ends(connect: Connect) -> None:
    server, sampler = await synced(connect)
    server.broken = lambda body: server.sampled([], "abort")
    with pytest.raises(SamplingError, match=r"rollout \(0, 0\).*before their first token"):
        await sampler.sample(request())
    assert len(server.prompts) == 9
    await until(lambda: sampler.replaced == 3)


async def test_an_empty_abort_by_a_sync_is_passed_on(connect: Connect) -> None:
    server, sampler = await synced(connect)
    server.at_once = server.lets_abort = False
    asked = asyncio.create_task(sampler.sample(request()))
    await until(lambda: server.in_flight)
    syncing = asyncio.create_task(sampler.sync(Learner(), 1))
    await until(lambda: "/abort_request" in server.calls[3:])
    server.end_all("abort empty")
    assert await asked == Completion((), (), (), "abort")
    await syncing
    assert len(server.prompts) == 1


async def test_a_request_that_is_never_answered_is_ended_alone_and_named(connect: Connect) -> None:
    server = FakeServer()
    sampler = connect(Servers(a=server), request_limit_s=0.02)
    await sampler.sync(Learner(), 0)
    server.at_once = False
    with pytest.raises(SamplingError, match=r"rollout \(0, 0\).*did not answer.*3 times"):
        await sampler.sample(request())
    assert len(server.prompts) == 3
    assert not server.in_flight
    assert not sampler.replicas.all[0].lost


async def test_the_time_asleep_does_not_count_as_away(connect: Connect) -> None:
    server = FakeServer()
    sampler = connect(Servers(a=server), away_limit_s=0.3)
    await sampler.sync(Learner(), 0)
    server.well = False
    await sampler.sleep()
    assert sampler.replicas.all[0].lost
    await asyncio.sleep(0.4)  # longer than the limit
    await sampler.wake()
    server.well = True
    await sampler.sync(Learner(), 1)
    assert await sampler.ready() == 1


async def test_a_revival_that_fails_in_any_way_is_told_and_tried_again(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    server = FakeServer()
    where: list[str] = []
    knocks = []

    def find() -> list[str]:
        knocks.append(1)
        return where

    sampler = connect(Servers(a=server), current_endpoints=find)
    await sampler.sync(Learner(), 0)
    server.version = "default"
    asked = asyncio.create_task(sampler.sample(request()))
    replica = sampler.replicas.all[0]
    await until(lambda: len(knocks) == 4)
    assert "now IndexError" in replica.lost
    assert replica.lost.startswith("its 2 tokens are of the weights")
    assert len([record for record in caplog.records if record.exc_info]) == 1
    where.append("http://a")
    assert (await asked).policy_versions == (0, 0)


async def test_a_server_that_hangs_when_it_comes_back_holds_up_no_sync(connect: Connect) -> None:
    servers = Servers(a=FakeServer(), b=FakeServer())
    first = servers.by_host["a"]
    sampler = connect(servers, revival_limit_s=0.05)
    await sampler.sync(Learner(), 0)
    first.version, first.hangs_at_weights = "default", True
    await sampler.sample(request())
    await until(lambda: first.calls[-1] == "/update_weights_from_disk")
    async with asyncio.timeout(5):
        await sampler.sync(Learner(), 1)
    assert "no weights taken within" in sampler.replicas.all[0].lost
