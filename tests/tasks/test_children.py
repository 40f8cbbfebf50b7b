"""Runs that a flow asks for: how many at once, what is told, how long the API may be away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelled, Completed, Failed, Running, Scheduled

from tasks.children import AWAY_S, POLL_S, Asked, Child, run_children

ASKED = [Asked(f"seed-{seed}", f"tiny · seed {seed}", {}) for seed in (1, 2, 3)]


@dataclass
class FakeDeployment:
    """Its runs take two looks, and then end as ``ends`` says, by key."""

    ends: dict[str, State[Any]] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    looks: dict[str, int] = field(default_factory=dict)
    most_at_once: int = 0
    away: Callable[[], bool] = lambda: False

    def start(self, asked: Asked) -> Child:
        if self.away():
            raise ConnectionError("refused")
        self.started.append(asked.key)
        return Child(asked, f"id-{asked.key}", Scheduled())

    def read(self, children: Sequence[Child]) -> list[Child]:
        if self.away():
            raise ConnectionError("refused")
        self.most_at_once = max(self.most_at_once, len(children))
        return [replace(child, state=self._state(child.asked.key)) for child in children]

    def _state(self, key: str) -> State[Any]:
        self.looks[key] = self.looks.get(key, 0) + 1
        return Running() if self.looks[key] < 2 else self.ends.get(key, Completed())


@dataclass
class Clock:
    """Time passes while somebody waits."""

    now: float = 0.0

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("width", "at_once"), [(0, 3), (1, 1), (2, 2), (9, 3)])
def test_no_more_runs_than_the_width_are_under_way(width: int, at_once: int) -> None:
    deployment = FakeDeployment()
    children = run_children(ASKED, deployment, width, lambda _: None)
    assert deployment.most_at_once == at_once
    assert deployment.started == [each.key for each in ASKED]
    assert [child.completed for child in children] == [True] * 3


def test_all_run_to_their_end_also_if_one_fails() -> None:
    ends = {"seed-1": Failed(message="no room"), "seed-3": Cancelled()}
    children = run_children(ASKED, FakeDeployment(ends), 1, lambda _: None)
    assert [child.told for child in children] == [
        "tiny · seed 1 (Failed: no room)",
        "tiny · seed 2 (Completed)",
        "tiny · seed 3 (Cancelled)",
    ]


def test_what_an_earlier_try_completed_takes_no_place() -> None:
    class Remembering(FakeDeployment):
        def start(self, asked: Asked) -> Child:
            child = super().start(asked)
            return replace(child, state=Completed()) if asked is ASKED[0] else child

    deployment = Remembering()
    assert all(child.completed for child in run_children(ASKED, deployment, 1, lambda _: None))
    assert "seed-1" not in deployment.looks


def test_an_api_that_is_away_for_a_while_is_waited_for_as_often_as_it_is() -> None:
    clock = Clock()
    once = [False, *[True] * int(0.6 * AWAY_S / POLL_S)]
    away = [*once, *once, *[False] * len(ASKED)]
    deployment = FakeDeployment(away=lambda: bool(away) and away.pop())
    assert len(run_children(ASKED, deployment, 0, clock.wait, clock)) == 3
    assert clock.now > AWAY_S


def test_an_api_that_is_away_while_runs_are_asked_for_is_waited_for_too() -> None:
    clock, away = Clock(), [True, True, False]
    deployment = FakeDeployment(away=lambda: bool(away) and away.pop())
    children = run_children(ASKED, deployment, 0, clock.wait, clock)
    assert deployment.started == [each.key for each in ASKED]
    assert [child.asked for child in children] == ASKED
    assert clock.now >= 2 * POLL_S


@pytest.mark.parametrize("started", [0, 3])
def test_an_api_that_stays_away_ends_the_wait(started: int) -> None:
    clock, there = Clock(), [True] * started
    deployment = FakeDeployment(away=lambda: not (there and there.pop()))
    with pytest.raises(ConnectionError):
        run_children(ASKED, deployment, 0, clock.wait, clock)
    assert AWAY_S < clock.now <= AWAY_S + 2 * POLL_S


def answer(status: int) -> PrefectHTTPStatusError:
    """What Prefect's client raises for it."""
    request = httpx.Request("POST", "http://prefect/api")
    response = httpx.Response(status, request=request)
    return PrefectHTTPStatusError("refused", request=request, response=response)


@pytest.mark.parametrize("error", [ObjectNotFound(ValueError("deleted")), answer(409)])
def test_what_prefect_refuses_is_not_asked_again(error: Exception) -> None:
    clock = Clock()

    class Refusing(FakeDeployment):
        def start(self, asked: Asked) -> Child:
            raise error

    with pytest.raises(type(error)):
        run_children(ASKED, Refusing(), 0, clock.wait, clock)
    assert clock.now == 0
