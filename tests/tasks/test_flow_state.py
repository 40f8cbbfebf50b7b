"""Prefect says of a run that has ended what it came to, whoever had the word before."""

from __future__ import annotations

import time
from collections.abc import Callable
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
    Paused,
    Pending,
    Running,
    Scheduled,
    Suspended,
)

from opd_core.lifecycle.records import Receipt, write_receipt
from opd_core.training.attempts import Attempt, RunHistory
from tasks.flow_state import (
    OWN_WORD_S,
    POLL_S,
    RunEnd,
    due_state,
    earlier_ends,
    settle_flow_run,
)

LOOKS = round(OWN_WORD_S / POLL_S)


def end(cause: str = "owner died", status: str = "crashed", began_s: float | None = None) -> RunEnd:
    began_s = time.time() + 60 if began_s is None else began_s
    return RunEnd(cause, status, began_s, Path("/runs/tiny-1"))


class FakeStates:
    """Answers with these states in turn, the last one for ever."""

    def __init__(self, *states: State[Any] | None) -> None:
        self._states = list(states)
        self.deployed = True
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
        (AwaitingRetry(), end(), "CRASHED"),
    ],
)
def test_the_state_follows_from_how_the_run_ended(
    current: State[Any], how: RunEnd, wanted: str
) -> None:
    due = due_state(current, how, deployed=False)
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
        (Paused(), end()),
        (Suspended(), end()),
    ],
)
def test_a_final_state_and_one_that_waits_for_its_turn_are_left(
    current: State[Any], how: RunEnd
) -> None:
    assert due_state(current, how, deployed=True) is None


@pytest.mark.parametrize("state", [Running, Pending])
def test_a_try_that_is_under_way_since_the_attempt_is_left_however_late_that_one_is_settled(
    state: Callable[..., State[Any]],
) -> None:
    under_way = state(timestamp=datetime.fromtimestamp(1000.0, UTC))
    assert due_state(under_way, end(began_s=999.0), deployed=False) is None
    assert due_state(under_way, end(began_s=1001.0), deployed=False) is not None


def test_earlier_flow_runs_end_as_their_last_attempt_did(tmp_path: Path) -> None:
    attempts = (
        Attempt(1.0, "a", "failed"),
        Attempt(2.0, "a", "cancelled"),
        Attempt(3.0, "b"),
        Attempt(4.0, "c"),
    )
    folder = tmp_path / "attempts" / "2"
    folder.mkdir(parents=True)
    write_receipt(folder, Receipt("tiny-1", "cancelled", True, 0.5, (), (), (), ()))
    assert earlier_ends(RunHistory("tiny-1", attempts, {}), tmp_path) == {
        "a": RunEnd("cancelled", "cancelled", 2.0, folder),
        "b": RunEnd("unknown", "", 3.0, tmp_path / "attempts" / "3"),
    }


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
