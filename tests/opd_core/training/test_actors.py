"""Several sampling actors as one stream, and what is said when one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from opd_core.errors import ActorLost, OPDError, SamplingError, TrainingError
from opd_core.sampling.protocol import Completion, SampleRequest
from opd_core.training.handles import RaySampler, all_of
from opd_core.training.placement import bundles_of, not_ready


class FakeActor:
    """Answers like an actor's streaming method: every item is awaited by itself. ``error`` comes
    after the answers, or the actor never ends."""

    def __init__(self, error: Exception | None = None, *, ends: bool = True) -> None:
        self.sample = SimpleNamespace(remote=self._stream)
        self.asked: list[SampleRequest] = []
        self._error, self._ends = error, ends

    async def _stream(self, share: Sequence[SampleRequest]) -> AsyncIterator[Any]:
        self.asked += share
        for request in share:
            yield self._item([Completion(request.key, (1,), (-1.0,), "stop", 0)])
        if self._error:
            yield self._item(self._error)
        if not self._ends:
            await asyncio.Event().wait()

    async def _item(self, item: Any) -> Any:
        if isinstance(item, Exception):
            raise item
        return item


def raised(cause: Exception) -> Exception:
    """What Ray raises where an actor's method raised ``cause``."""
    words = f"Traceback (most recent call last):\n{type(cause).__name__}: {cause}"
    error = RayTaskError("sample", words, cause, proctitle="actor", pid=1, ip="127.0.0.1")
    return error.as_instanceof_cause()


REQUESTS = [SampleRequest((group, i), (3,), 0, 1) for group in range(5) for i in range(2)]


async def drain(actors: Sequence[FakeActor]) -> list[Completion]:
    async with asyncio.timeout(20):
        return [c for part in [p async for p in RaySampler(actors).sample(REQUESTS)] for c in part]


async def test_every_request_is_answered_once_and_a_group_stays_on_one_actor() -> None:
    actors = [FakeActor(), FakeActor(), FakeActor()]
    completions = await drain(actors)
    assert sorted(c.key for c in completions) == sorted(r.key for r in REQUESTS)
    groups = [{r.key[0] for r in actor.asked} for actor in actors]
    assert groups == [{0, 3}, {1, 4}, {2}]


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ActorDiedError(), ActorLost, "a sampling actor died: "),
        (
            raised(RuntimeError("out of memory")),
            SamplingError,
            r"a sampling actor failed: [\s\S]*out of memory",
        ),
        (raised(SamplingError("no room for 9 rows")), SamplingError, "^no room for 9 rows$"),
    ],
)
async def test_a_lost_actor_ends_the_stream_at_once(
    error: Exception, kind: type[OPDError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        await drain([FakeActor(ends=False), FakeActor(error)])


async def test_a_mistake_of_our_own_is_not_hidden() -> None:
    with pytest.raises(KeyError, match="mistake"):
        await drain([FakeActor(ends=False), FakeActor(KeyError("mistake"))])


def test_actors_that_are_not_ready_are_told_with_what_was_asked_and_what_there_is() -> None:
    said = not_ready(2, 3, (0.6, 0.4), 180.0, {"CPU": 4.0, "GPU": 2.0}, {"CPU": 1.0})
    assert "not ready after 180 s" in said
    assert "2 training actors (1 CPU and 0.6 GPUs each)" in said
    assert "3 sampling actors (1 CPU and 0.4 GPUs each)" in said
    assert "has 4 CPUs and 2 GPUs; free now: 1 and 0." in said


async def test_a_dead_rank_is_told_from_one_that_failed() -> None:
    async def ends(error: Exception, *, later: bool = False) -> None:
        for _ in range(20 * later):  # Ray tells of a death after the other ranks have missed it
            await asyncio.sleep(0)
        raise error

    with pytest.raises(ActorLost, match=r"^training: an actor died"):
        await all_of([ends(ActorDiedError())], "training")
    peer_lost = raised(RuntimeError("Connection reset by peer"))
    with pytest.raises(ActorLost, match="an actor died"):
        await all_of([ends(peer_lost), ends(ActorDiedError(), later=True)], "training")
    with pytest.raises(TrainingError, match=r"^no memory$") as failed:
        await all_of([ends(raised(TrainingError("no memory")))], "training")
    assert not isinstance(failed.value, ActorLost)


def test_actors_that_share_a_gpu_are_placed_together_and_others_apart() -> None:
    assert bundles_of(2, 1, (0.0, 0.0)) == [{"CPU": 1.0}] * 3
    assert bundles_of(2, 1, (1.0, 1.0)) == [{"CPU": 1.0, "GPU": 1.0}] * 3
    assert bundles_of(1, 2, (0.6, 0.4)) == [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]
