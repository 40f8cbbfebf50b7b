"""Who may ask a teacher when, and how the window follows the server."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd_core.scoring.limits import FlowLimit, Share, Slot


class User:
    """One request: a task that takes a slot and keeps it until :meth:`done`."""

    def __init__(self, limit: FlowLimit, tokens: int = 1, *, alone: bool = False) -> None:
        self.slot: Slot | None = None
        self._end = asyncio.Event()
        self.task = asyncio.create_task(self._run(limit, tokens, alone))

    async def _run(self, limit: FlowLimit, tokens: int, alone: bool) -> None:
        async with limit.slot(tokens, alone=alone) as self.slot:
            await self._end.wait()

    async def done(self) -> None:
        self._end.set()
        await self.task

    async def cancelled(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)


async def entered(limit: FlowLimit, tokens: int = 1, *, alone: bool = False) -> User:
    user = User(limit, tokens, alone=alone)
    await until(lambda: user.slot is not None)
    return user


async def queued(limit: FlowLimit, tokens: int = 1, *, alone: bool = False) -> User:
    before = limit.waiting
    user = User(limit, tokens, alone=alone)
    await until(lambda: limit.waiting == before + 1)
    return user


@pytest.mark.parametrize(("share", "tokens"), [(Share(2, 100), 1), (Share(10, 100), 50)])
async def test_requests_and_tokens_in_flight_are_bounded(share: Share, tokens: int) -> None:
    limit = FlowLimit(share)
    users = [await entered(limit, tokens), await entered(limit, tokens)]
    third = await queued(limit, tokens)
    assert (limit.in_flight, limit.tokens_in_flight) == (2, 2 * tokens)
    await users[0].done()
    await until(lambda: third.slot is not None)
    await users[1].done()
    await third.done()
    assert (limit.in_flight, limit.tokens_in_flight, limit.waiting) == (0, 0, 0)


async def test_a_large_request_is_not_passed_by_small_ones() -> None:
    limit = FlowLimit(Share(10, 100))
    first, tiny = await entered(limit, 60), await entered(limit, 5)
    large, small = await queued(limit, 80), await queued(limit, 30)
    await tiny.done()
    assert limit.tokens_in_flight == 60
    await first.done()
    assert limit.tokens_in_flight == 80
    await large.done()
    await small.done()


async def test_a_request_larger_than_the_whole_share_goes_when_nothing_else_is_in_flight() -> None:
    limit = FlowLimit(Share(10, 100))
    first = await entered(limit, 1)
    huge, next_one = await queued(limit, 1000), await queued(limit, 1)
    await first.done()
    assert (limit.in_flight, limit.tokens_in_flight, limit.waiting) == (1, 100, 1)
    await huge.done()
    await next_one.done()
    assert limit.tokens_in_flight == 0


async def test_a_request_that_must_be_alone_waits_for_all_others_and_keeps_them_out() -> None:
    limit = FlowLimit(Share(10, 100))
    first = await entered(limit)
    alone, later = await queued(limit, alone=True), await queued(limit)
    assert limit.in_flight == 1
    await first.done()
    await until(lambda: alone.slot is not None)
    assert (limit.in_flight, limit.waiting, limit.try_slot(1)) == (1, 1, None)
    await alone.done()
    await until(lambda: later.slot is not None)
    await later.done()


async def test_one_that_gives_up_waiting_leaves_nothing_behind_and_lets_the_next_go() -> None:
    limit = FlowLimit(Share(10, 100))
    first = await entered(limit, 60)
    large, small = await queued(limit, 80), await queued(limit, 10)
    await large.cancelled()
    await until(lambda: small.slot is not None)
    assert (limit.in_flight, limit.tokens_in_flight, limit.waiting) == (2, 70, 0)
    await first.done()
    await small.done()
    assert (limit.in_flight, limit.tokens_in_flight) == (0, 0)


async def test_one_that_is_cancelled_just_as_its_turn_comes_gives_the_place_to_the_next() -> None:
    limit = FlowLimit(Share(1, 100))
    first = limit.try_slot(7)
    assert first is not None
    second, third = await queued(limit, 5), await queued(limit, 3)
    with first:
        pass
    assert limit.tokens_in_flight == 5  # the second has its place, and does not know it yet
    await second.cancelled()
    await until(lambda: third.slot is not None)
    assert (limit.in_flight, limit.tokens_in_flight) == (1, 3)
    await third.done()
    assert (limit.in_flight, limit.tokens_in_flight) == (0, 0)


async def test_a_request_that_fails_gives_its_place_back() -> None:
    limit = FlowLimit(Share(1, 1))
    with pytest.raises(OSError, match="cut"):
        async with limit.slot(1):
            raise OSError("cut")
    assert (limit.in_flight, limit.tokens_in_flight) == (0, 0)


async def test_a_spare_slot_is_given_only_where_there_is_room_and_nobody_waits() -> None:
    limit = FlowLimit(Share(2, 100))
    spare = limit.try_slot(60)
    assert spare is not None
    with spare:
        assert limit.try_slot(60) is None
        waits = await queued(limit, 60)
        assert limit.try_slot(10) is None
        await waits.cancelled()
        assert limit.in_flight == 1
    assert limit.in_flight == 0


async def test_a_larger_share_admits_at_once_and_a_smaller_one_cancels_nobody() -> None:
    limit = FlowLimit(Share(1, 100))
    users = [await entered(limit), await queued(limit), await queued(limit)]
    limit.resize(Share(2, 100))
    assert (limit.in_flight, limit.waiting) == (2, 1)
    limit.resize(Share(1, 100))
    await users[0].done()
    assert (limit.in_flight, limit.waiting) == (1, 1)
    await users[1].done()
    assert (limit.in_flight, limit.waiting) == (1, 0)
    await users[2].done()


async def test_a_paused_limit_tells_what_is_in_flight_and_admits_nobody_until_it_is_resized() -> (
    None
):
    limit = FlowLimit(Share(2, 100))
    first = await entered(limit, 30)
    assert limit.pause() == Share(1, 30)
    second = await queued(limit, 20)
    await first.done()
    assert (limit.in_flight, limit.try_slot(1)) == (0, None)
    limit.resize(Share(2, 100))
    assert limit.in_flight == 1
    await second.done()


async def test_a_slot_tells_how_long_it_was_waited_for() -> None:
    now = [5.0]
    limit = FlowLimit(Share(1, 1), clock=lambda: now[0])
    first = await entered(limit)
    second = await queued(limit)
    now[0] = 7.5
    await first.done()
    await until(lambda: second.slot is not None)
    assert first.slot is not None
    assert second.slot is not None
    assert (first.slot.queue_s, second.slot.queue_s) == (0.0, 2.5)
    await second.done()


def taken(limit: FlowLimit, count: int = 1) -> list[Slot]:
    slots = [limit.try_slot(1) for _ in range(count)]
    assert None not in slots
    return [slot for slot in slots if slot is not None]


def given_back(slots: list[Slot]) -> None:
    for slot in slots:
        with slot:
            pass


def adaptive(requests: int, target_latency_s: float = math.inf) -> FlowLimit:
    return FlowLimit(Share(requests, 1000), adaptive=True, target_latency_s=target_latency_s)


def test_the_window_is_cut_once_for_all_requests_of_one_round_trip() -> None:
    limit = adaptive(10)
    before = taken(limit, 5)
    for slot in before:
        slot.overloaded()
    assert limit.window == pytest.approx(7)
    (after,) = taken(limit)
    before[0].overloaded()
    before[0].answered(0.1)
    assert limit.window == pytest.approx(7)
    after.overloaded()
    assert limit.window == pytest.approx(4.9)


def test_the_window_admits_no_more_than_its_whole_requests_and_never_less_than_one() -> None:
    limit = adaptive(4)
    for _ in range(9):
        (slot,) = taken(limit)
        slot.overloaded()
        given_back([slot])
    assert limit.window == 1
    held = taken(limit)
    assert limit.try_slot(1) is None
    held[0].answered(0.1)
    assert limit.window == 2


def test_a_slow_answer_counts_as_an_overload() -> None:
    limit = adaptive(10, target_latency_s=2.0)
    (slot,) = taken(limit)
    slot.answered(2.0)
    assert limit.window == 10
    slot.answered(2.1)
    assert limit.window == pytest.approx(7)


async def test_a_window_of_good_answers_adds_one_up_to_the_share() -> None:
    limit = adaptive(10)
    taken(limit)[0].overloaded()
    (slot,) = taken(limit)
    for _ in range(7):
        slot.answered(0.1)
    assert 7.9 < limit.window <= 8
    for _ in range(100):
        slot.answered(0.1)
    assert limit.window == 10


async def test_a_window_that_grows_admits_one_that_waits() -> None:
    limit = adaptive(2)
    (slot,) = taken(limit)
    slot.overloaded()
    given_back([slot])
    (slot,) = taken(limit)
    second = await queued(limit)
    slot.answered(0.1)
    assert limit.waiting == 0
    await second.done()


def test_the_cut_outlives_a_change_of_the_share() -> None:
    limit = adaptive(10)
    taken(limit)[0].overloaded()
    limit.resize(Share(20, 1000))
    assert limit.window == pytest.approx(14)
    limit.resize(Share(1, 1000))
    assert limit.window == 1


def test_a_limit_that_is_not_adaptive_keeps_its_window() -> None:
    limit = FlowLimit(Share(10, 10), target_latency_s=0.1)
    (slot,) = taken(limit)
    slot.overloaded()
    slot.answered(5.0)
    assert limit.window == 10


def test_two_limits_that_see_only_the_overload_come_to_equal_windows() -> None:
    limits, capacity = [adaptive(40), adaptive(40)], 24
    for _ in range(12):
        slots = taken(limits[0])
        slots[0].overloaded()
        given_back(slots)
    assert [limit.window for limit in limits] == [1, 40]
    for _ in range(200):
        sent = [taken(limit, int(limit.window)) for limit in limits]
        for slot in (slot for slots in sent for slot in slots):
            slot.overloaded() if len(sent[0] + sent[1]) > capacity else slot.answered(0.1)
        given_back(sent[0] + sent[1])
    low, high = sorted(limit.window for limit in limits)
    assert high - low < 2
    assert capacity * 0.6 < low + high < capacity + 3


USE = st.tuples(
    st.sampled_from(["enter", "alone", "leave", "cancel", "resize"]),
    st.integers(0, 7),
    st.integers(1, 15),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(USE, max_size=30))
def test_in_any_order_of_events_places_are_given_in_turn_and_none_is_lost(
    uses: list[tuple[str, int, int]],
) -> None:
    asyncio.run(play(uses))


async def play(uses: list[tuple[str, int, int]]) -> None:
    limit = FlowLimit(Share(3, 10))
    users: list[User] = []
    wants: dict[User, tuple[int, bool]] = {}

    async def check() -> None:
        for _ in range(4):
            await asyncio.sleep(0)
        inside = [user for user in users if user.slot]
        outside = [user for user in users if not user.slot]
        assert users == inside + outside  # in turn
        assert (limit.in_flight, limit.waiting) == (len(inside), len(outside))
        assert limit.tokens_in_flight == sum(user.slot.tokens for user in inside if user.slot)
        assert len(inside) == 1 or not any(wants[user][1] for user in inside)
        if outside:  # the first that waits has a reason
            tokens, alone = wants[outside[0]]
            room = limit.share.tokens - limit.tokens_in_flight
            full = len(inside) >= limit.share.requests or min(tokens, limit.share.tokens) > room
            assert inside
            assert full or alone or wants[inside[0]][1]

    for what, which, number in uses:
        if what in ("enter", "alone"):
            users.append(User(limit, number, alone=what == "alone"))
            wants[users[-1]] = (number, what == "alone")
        elif what == "resize":
            limit.resize(Share(1 + which % 4, number))
        elif users:
            user = users.pop(which % len(users))
            await (user.done() if what == "leave" and user.slot else user.cancelled())
        await check()
        assert limit.in_flight <= 4
    while users:
        await users.pop(0).done()
        await check()
    assert (limit.in_flight, limit.tokens_in_flight, limit.waiting) == (0, 0, 0)


async def test_a_slot_costs_far_less_than_a_millisecond_however_many_wait() -> None:
    limit, requests = FlowLimit(Share(64, 64 * 100), adaptive=True), 5000

    async def use(left: list[int]) -> None:
        while left:
            async with limit.slot(left.pop() % 150) as slot:
                await asyncio.sleep(0)
                slot.answered(0.0)

    left, started = list(range(requests)), time.process_time()
    await asyncio.gather(*(use(left) for _ in range(512)))
    assert (time.process_time() - started) / requests < 0.5e-3

    holder = await entered(limit, alone=True)
    users = [User(limit) for _ in range(requests)]
    await until(lambda: limit.waiting == requests)
    started = time.process_time()
    for user in users:
        user.task.cancel()
    await asyncio.wait([user.task for user in users])
    assert (time.process_time() - started) / requests < 0.5e-3
    await holder.done()
