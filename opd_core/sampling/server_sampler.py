"""The student sampled by servers: several of one kind, behind the protocol of a sampling engine.

A lost server costs time and nothing else (:mod:`opd_core.sampling.server_replicas`). Nothing is
sampled before the first sync: what a server loaded by itself is not trusted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

import httpx

from opd_core.config import Backend
from opd_core.errors import SamplingError
from opd_core.sampling.protocol import Completion, SampleRequest
from opd_core.sampling.server_calls import StudentServer
from opd_core.sampling.server_replicas import Replica, Replicas, Trials
from opd_core.sampling.server_wire import (
    ServerLost,
    check_sendable,
    parse_completion,
    sample_body,
)
from opd_core.sampling.weight_paths import WeightPath, check_not_refused
from opd_core.scoring.asking import checked_key
from opd_core.scoring.transport import PooledTransport

ABORT_AGAIN_S = 0.2
"""A server aborts what has reached its scheduler: what was still on its way runs on."""
EMPTY_ABORTS = 3
"""A server that ends so many answers to one request before their first token, unasked, is lost."""
REVIVAL_LIMIT_S = 300.0
"""For one server that is given the weights when it comes back: a sync waits for that, and so does
training. One that needs longer stays lost, and is tried again."""


class ServerSampler:
    """A :class:`~opd_core.sampling.protocol.Sampler` over servers. An async context manager.

    ``end_ids`` are the student's end tokens. ``current_endpoints`` is read before a lost server is
    knocked at: one that was started again may answer elsewhere (OSError and ValueError mean: not
    now). A server that answers no request for ``hang_limit_s`` and then fails its health check is
    lost; with all of them lost for ``away_limit_s``, sampling fails. A request without an answer
    for ``request_limit_s``, from a server that is well, is ended and asked again. ``transport`` and
    ``sleep`` are seams for tests. Raises :class:`ConfigError` for a key that no HTTP header can
    carry.

    LMDeploy tells no version of its weights. One that is started again must answer at another port
    than before: nothing else tells it, with the weights that it loaded by itself, from the one that
    was given the student's.
    """

    def __init__(
        self,
        backend: Backend,
        endpoints: Sequence[str],
        path: WeightPath,
        *,
        vocab_size: int,
        end_ids: Sequence[int],
        max_rows: int,
        hang_limit_s: float = 120.0,
        away_limit_s: float = 1800.0,
        request_limit_s: float = 3600.0,
        revival_limit_s: float = REVIVAL_LIMIT_S,
        current_endpoints: Callable[[], Sequence[str]] | None = None,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        headers = {"content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {checked_key('student', api_key)}"
        # Two more for each server: its weights and its health.
        transport = transport or PooledTransport(len(endpoints) * (max_rows + 2))
        self._http = httpx.AsyncClient(headers=headers, trust_env=False, transport=transport)
        self._backend = backend
        self._path = path
        self._vocab_size = vocab_size
        self._end_ids = tuple(end_ids)
        self._hang_limit_s = hang_limit_s
        self._request_limit_s = request_limit_s
        self._revival_limit_s = revival_limit_s
        self._current_endpoints = current_endpoints or (lambda: endpoints)
        self._sleep = sleep
        replicas = [
            Replica(number, StudentServer(backend, endpoint, self._http), max_rows, sleep)
            for number, endpoint in enumerate(endpoints)
        ]
        self.replicas = Replicas(
            replicas, revive=self._revive, away_limit_s=away_limit_s, sleep=sleep
        )
        self.policy_version = -1
        self._asleep = False
        self._open = asyncio.Event()
        self._loading = asyncio.Lock()
        """Held from the preparation of weights until all have them: what is given to a server that
        comes back is then never older."""
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def replaced(self) -> int:
        """How often a lost server has come back."""
        return self.replicas.revived

    async def aclose(self) -> None:
        """Stop watching and reviving, close the connections, and remove the weights that were
        prepared."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.replicas.aclose()
        await self._http.aclose()
        await self._path.aclose()

    async def ready(self) -> int:
        """Wait while weights are being synced; the policy version that samples now."""
        while not self._open.is_set():
            await self._open.wait()
        return self.policy_version

    async def sample(self, request: SampleRequest) -> Completion:
        """One completion; waits while weights are being synced, and for a place on a server.

        Raises :class:`SamplingError` for a request that no server may get, that was refused, that
        servers are lost with or never answer; and when all stay lost.
        """
        check_sendable(request, self._vocab_size)
        trials = Trials(request.key)
        while True:
            replica = self.replicas.pick(request.key[0])
            if replica is None:
                await self.replicas.wait_for_one()
                continue
            async with replica.limit.slot(len(request.token_ids), alone=trials.alone):
                version = await self.ready()
                if replica.lost:  # while the request waited for its place
                    continue
                try:
                    return await self._ask(replica, request, version)
                except ServerLost as error:
                    self.replicas.lose(replica, str(error))
                    trials.count_loss(error)
                except TimeoutError:
                    trials.count_no_answer(self._request_limit_s)

    async def sync(self, learner: Any, policy_version: int) -> None:
        """Give the servers the learner's weights; what they have in flight comes back as it is.

        One that does not take them is lost. Raises :class:`SamplingError` if all refuse them, and
        if all stay lost.
        """
        async with self._loading:
            await self._path.prepare(learner, policy_version)
            await self._close()
            present = self.replicas.present
            if present:
                servers = [replica.server for replica in present]
                failed = await self._path.load(servers, policy_version)
                check_not_refused(failed, len(servers), policy_version)
                for replica in present:
                    if error := failed.get(replica.server.endpoint):
                        self.replicas.lose(replica, str(error))
            self.policy_version = policy_version
        await self.replicas.wait_for_one()
        self._open.set()

    async def sleep(self) -> None:
        """Interrupt what is in flight and release the servers' device memory, their weights with
        it; nothing is sampled until :meth:`wake` and then :meth:`sync`."""
        async with self._loading:
            await self._close()
            self._asleep = True
            await self._each(lambda server: server.release_memory())

    async def wake(self) -> None:
        """Let the servers take their memory again."""
        async with self._loading:
            await self._each(lambda server: server.resume_memory())
            self._asleep = False
            self.replicas.woken()

    async def _ask(self, replica: Replica, request: SampleRequest, version: int) -> Completion:
        """One answer; an abort before the first token that no sync caused is none yet. Raises
        TimeoutError after ``request_limit_s``."""
        for _ in range(EMPTY_ABORTS):
            completion = await self._ask_once(replica, request, version)
            if completion.response_ids or completion.finish_reason != "abort":
                return completion
            await self._sleep(ABORT_AGAIN_S)
            synced_since = not self._open.is_set() or self.policy_version != version
            if replica.lost or synced_since:
                return completion
        raise ServerLost(f"it ended {EMPTY_ABORTS} answers before their first token, unasked")

    async def _ask_once(self, replica: Replica, request: SampleRequest, version: int) -> Completion:
        body = sample_body(self._backend, request, self._end_ids)
        try:
            async with asyncio.timeout(self._request_limit_s):
                answer = await replica.ask(body)
            return parse_completion(
                self._backend,
                answer,
                request,
                end_ids=self._end_ids,
                vocab_size=self._vocab_size,
                policy_version=version,
            )
        except ServerLost:
            raise
        except SamplingError as error:
            raise SamplingError(f"rollout {request.key}: {error}") from None

    async def _close(self) -> None:
        """Send nothing more, and have all that is in flight answered; return when the servers are
        at rest, with what nobody waits for any more too."""
        self._open.clear()
        began = time.monotonic()
        while True:
            await self._each(lambda server: server.abort_all())
            busy = [replica for replica in self.replicas.all if replica.open]
            if not busy:
                break
            await asyncio.wait([r for replica in busy for r in replica.open], timeout=ABORT_AGAIN_S)
            if time.monotonic() - began > self._hang_limit_s:
                for replica in busy:
                    self.replicas.lose(replica, "its requests go on though they were aborted")
        await self._each(lambda server: server.settle())

    async def _each(self, call: Callable[[StudentServer], Awaitable[None]]) -> None:
        """Call all present servers at once; one that fails is lost."""

        async def one(replica: Replica) -> None:
            try:
                await call(replica.server)
            except SamplingError as error:
                self.replicas.lose(replica, str(error))

        await asyncio.gather(*(one(replica) for replica in self.replicas.present))

    async def _revive(self, replica: Replica) -> None:
        """See that a lost server is well, and give it the current weights."""
        try:
            endpoints = self._current_endpoints()
        except (OSError, ValueError) as error:
            raise SamplingError(f"where it answers cannot be read: {error}") from None
        server = replica.server
        server.endpoint = endpoints[replica.number]
        if self._asleep:  # the health check samples a token, which takes the memory released
            raise SamplingError("the servers sleep")
        await server.check_health()
        await server.abort_all()
        await server.settle()
        async with self._loading:
            if self._asleep:
                raise SamplingError("the servers sleep")
            try:
                async with asyncio.timeout(self._revival_limit_s):
                    failed = await self._path.load([server], self.policy_version)
            except TimeoutError:
                raise ServerLost(
                    f"{server.endpoint}: no weights taken within {self._revival_limit_s:.0f} s"
                ) from None
            if server.endpoint in failed:
                raise failed[server.endpoint]
            self.replicas.back(replica)

    async def _watch(self) -> None:
        """Lose servers that answer nothing any more."""
        while True:
            await self._sleep(self._hang_limit_s / 4)
            await asyncio.gather(*(self._check(replica) for replica in self.replicas.present))

    async def _check(self, replica: Replica) -> None:
        silent_s = time.monotonic() - replica.progress_at
        if not replica.open or silent_s < self._hang_limit_s:
            return
        try:
            await replica.server.check_health()
        except SamplingError as error:
            self.replicas.lose(replica, f"no answer for {silent_s:.0f} s, and {error}")
        else:
            replica.progress_at = time.monotonic()
