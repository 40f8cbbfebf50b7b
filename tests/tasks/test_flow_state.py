"""Prefect says of a run that has ended what it came to, whoever had the word before."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import State
from prefect.states import (
    AwaitingRetry,
    Cancelled,
    Cancelling,
    Completed,
    Crashed,
    Failed,
    Pending,
    Running,
    Scheduled,
)

from tasks.flow_state import OWN_WORD_S, POLL_S, RunEnd, due_state, settle_flow_run

LOOKS = round(OWN_WORD_S / POLL_S)


def end(cause: str = "owner died", status: str = "crashed", at_s: float | None = None) -> RunEnd:
    at_s = time.time() + 60 if at_s is None else at_s
    return RunEnd(cause, status, at_s, Path("/runs/tiny-1"))


class FakeStates:
    """Answers with these states in turn, the last one for ever."""

    def __init__(self, *states: State[Any] | None) -> None:
        self._states = list(states)
        self.written: list[State[Any]] = []
        self.pauses = 0

    def read(self) -> State[Any] | None:
        return self._states.pop(0) if len(self._states) > 1 else self._states[0]

    def write(self, state: State[Any]) -> None:
        self.written.append(state)

    def pause(self, seconds: float) -> None:
        self.pauses += 1


@pytest.mark.parametrize(
    ("current", "how", "wanted"),
    [
        (Running(), end(), "CRASHED"),
        (Pending(), end(), "CRASHED"),
        (Running(), end("completed", "completed"), "COMPLETED"),
        (Running(), end("TrainingError", "failed"), "FAILED"),
        (Running(), end("KeyboardInterrupt", "cancelled"), "CRASHED"),
        (Running(), end("cancelled", "cancelled"), "CANCELLED"),
        (Cancelling(), end(), "CANCELLED"),
        (Cancelling(), end("completed", "completed"), "CANCELLED"),
        (Crashed(), end("cancelled", "cancelled"), "CANCELLED"),
    ],
)
def test_the_state_follows_from_how_the_run_ended(
    current: State[Any], how: RunEnd, wanted: str
) -> None:
    due = due_state(current, how)
    assert due is not None
    assert due.type.value == wanted
    assert how.cause in (due.message or "")
    assert "/runs/tiny-1" in (due.message or "")


@pytest.mark.parametrize(
    ("current", "how"),
    [
        (Completed(), end()),
        (Failed(), end("cancelled", "cancelled")),
        (Cancelled(), end()),
        (Crashed(), end()),
        (Crashed(), end("worker gone", "cancelled")),
        (AwaitingRetry(), end()),
        (Scheduled(), end("cancelled", "cancelled")),
    ],
)
def test_a_final_state_and_one_that_waits_for_its_turn_are_left(
    current: State[Any], how: RunEnd
) -> None:
    assert due_state(current, how) is None


def test_a_try_that_began_after_the_run_had_ended_is_left() -> None:
    running = Running(timestamp=datetime.fromtimestamp(1000.0, UTC))
    assert due_state(running, end(at_s=999.0)) is None
    assert due_state(running, end(at_s=1001.0)) is not None


def test_prefects_own_processes_have_their_time_to_write_it() -> None:
    states = FakeStates(Cancelling(), Cancelling(), Cancelled())
    settle_flow_run(states, end("cancelled", "cancelled"), states.pause)
    assert states.written == []
    assert states.pauses == 2


def test_the_state_is_written_once_their_time_is_over() -> None:
    states = FakeStates(Running())
    settle_flow_run(states, end(), states.pause)
    assert [state.type.value for state in states.written] == ["CRASHED"]
    assert states.pauses == LOOKS


def test_a_wrong_final_state_is_replaced_without_waiting() -> None:
    states = FakeStates(Crashed())
    settle_flow_run(states, end("cancelled", "cancelled"), states.pause)
    assert [state.type.value for state in states.written] == ["CANCELLED"]
    assert states.pauses == 0


def test_a_flow_run_that_is_gone_is_settled() -> None:
    states = FakeStates(None)
    settle_flow_run(states, end(), states.pause)
    assert states.written == []
    states = FakeStates(*[Running()] * LOOKS, None)
    settle_flow_run(states, end(), states.pause)
    assert states.written == []
