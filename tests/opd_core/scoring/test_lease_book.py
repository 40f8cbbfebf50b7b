"""How several agent loops share one teacher's limit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd_core.errors import ConfigError
from opd_core.scoring.limits import NOTHING, LeaseBook, Share

TOTAL = Share(20, 999)
NAMES = ("a", "b", "c", "d")
CHANGE = st.tuples(
    st.sampled_from(["renew", "renew", "renew", "release", "later"]),
    st.sampled_from(NAMES),
    st.integers(0, 1000),
    st.floats(0, 1),
)


def play_leases(changes: list[tuple[str, str, int, float]]) -> tuple[LeaseBook, float]:
    """A book after these changes, its promises checked after each."""
    book, now = LeaseBook(TOTAL, len(NAMES), expires_s=100.0), 0.0
    for what, member, demand, used in changes:
        before = book.shares()
        if what == "later":
            now += used * 80
        elif what == "release":
            book.release(member)
        else:
            held = before.get(member, NOTHING)
            in_flight = Share(int(held.requests * used), int(held.tokens * used))
            share = book.renew(member, demand, now, in_flight)
            if held != NOTHING and now == 0:  # nothing can have expired
                assert share.requests >= in_flight.requests
                assert share.tokens >= in_flight.tokens
            assert book.shares()[member] == share
        after = book.shares()
        assert all(after[name] == before[name] for name in after if name != member)
        assert all(share.requests >= 1 and share.tokens >= 1 for share in after.values())
        seats = len(NAMES) - len(after)
        assert sum(share.requests for share in after.values()) + seats <= TOTAL.requests
        assert sum(share.tokens for share in after.values()) <= TOTAL.tokens
    return book, now


@settings(max_examples=150, deadline=None)
@given(st.lists(CHANGE, max_size=40))
def test_leases_are_never_more_than_the_total_and_everyone_has_a_request(
    changes: list[tuple[str, str, int, float]],
) -> None:
    play_leases(changes)


@settings(max_examples=150, deadline=None)
@given(st.lists(CHANGE, max_size=20), st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_two_rounds_after_the_demands_were_told_all_is_split_in_their_proportion(
    changes: list[tuple[str, str, int, float]], demands: list[int]
) -> None:
    book, now = play_leases(changes)
    for _ in range(3):  # told in the first
        shares = {
            name: book.renew(name, demand, now) for name, demand in zip(NAMES, demands, strict=True)
        }
    rest = TOTAL.requests - len(NAMES)
    for name, demand in zip(NAMES, demands, strict=True):
        exact = 1 + rest * demand / (sum(demands) or 1)
        assert abs(shares[name].requests - exact) < 1
        assert shares[name].tokens == TOTAL.tokens * shares[name].requests // TOTAL.requests
    if sum(demands):
        assert sum(share.requests for share in shares.values()) == TOTAL.requests


def test_an_idle_member_keeps_one_request_and_the_other_takes_the_rest() -> None:
    book = LeaseBook(Share(8, 800), 2)
    assert book.renew("a", 50, 0.0) == Share(7, 700)
    assert book.renew("b", 50, 0.0) == Share(1, 100)  # what nobody gave back cannot be given
    assert book.renew("a", 50, 1.0) == Share(4, 400)
    assert book.renew("b", 50, 1.0) == Share(4, 400)
    assert book.renew("a", 0, 2.0) == Share(1, 100)
    assert book.renew("b", 50, 2.0) == Share(7, 700)


def test_what_is_still_in_flight_is_not_given_to_others() -> None:
    book = LeaseBook(Share(8, 800), 2)
    book.renew("a", 50, 0.0)
    assert book.renew("a", 0, 1.0, Share(3, 10)) == Share(3, 300)
    assert book.renew("a", 0, 2.0, Share(1, 201)) == Share(3, 300)
    assert book.renew("b", 50, 2.0) == Share(5, 500)


def test_a_member_that_is_not_heard_of_loses_its_lease_and_its_place_is_kept() -> None:
    book = LeaseBook(Share(8, 800), 2, expires_s=10.0)
    book.renew("a", 50, 0.0)
    book.renew("a", 50, 9.0)
    assert book.renew("b", 50, 18.0).requests == 1
    assert book.renew("b", 50, 19.0).requests == 7
    assert book.renew("a", 50, 20.0, Share(5, 500)).requests == 1  # the 5 are not its own now


def test_a_member_too_many_is_refused_until_another_has_left() -> None:
    book = LeaseBook(Share(8, 800), 2)
    book.renew("a", 1, 0.0)
    book.renew("b", 1, 0.0)
    with pytest.raises(ConfigError, match=r"'c' is one agent loop too many: .* for 2, and a, b"):
        book.renew("c", 1, 0.0)
    book.release("a")
    assert book.renew("c", 1, 0.0).requests >= 1


@pytest.mark.parametrize(
    ("total", "members"), [(Share(1, 9), 2), (Share(9, 8), 2), (Share(9, 9), 0)]
)
def test_a_total_that_is_too_small_to_share_is_refused(total: Share, members: int) -> None:
    with pytest.raises(ConfigError, match="cannot be shared"):
        LeaseBook(total, members)
