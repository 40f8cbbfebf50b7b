"""A flow lets its supervisor go when nothing is left to write, and only then."""

from __future__ import annotations

from typing import Any, cast
from uuid import uuid4

import pytest
from prefect import flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Completed, Crashed, Failed

from tasks.hooks import UNSETTLED, Unsettled, conclude, try_again


class FakeSupervisor:
    def __init__(self) -> None:
        self.calls: list[bool] = []

    def settled(self, *, complete: bool = True) -> None:
        self.calls.append(complete)


@flow
def nothing() -> None:
    """The hooks want a flow."""


def concluded(state: State[Any], *, tracked: bool = True, cause: str = "completed") -> bool:
    """Whether the supervisor was let go."""
    supervisor, flow_run = FakeSupervisor(), FlowRun(id=uuid4(), flow_id=uuid4())
    UNSETTLED[str(flow_run.id)] = Unsettled(supervisor, tracked, cause)
    conclude(nothing, flow_run, state)
    assert str(flow_run.id) not in UNSETTLED
    return bool(supervisor.calls)


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        (Completed(), "completed"),
        (Failed(), "TrainingError"),
        (Crashed(), "KeyboardInterrupt"),
        (Crashed(), "worker gone"),
    ],
)
def test_a_run_that_all_know_the_end_of_is_settled(state: State[Any], cause: str) -> None:
    assert concluded(state, cause=cause)


def test_a_cancelled_run_that_the_engine_calls_crashed_is_left_to_the_supervisor() -> None:
    assert not concluded(Crashed(), cause="cancelled")


def test_a_run_of_which_mlflow_lacks_something_is_left_to_the_supervisor() -> None:
    assert not concluded(Completed(), tracked=False)


def test_a_flow_run_of_another_process_is_nobodys_business() -> None:
    conclude(nothing, FlowRun(id=uuid4(), flow_id=uuid4()), cast(State[Any], Crashed()))


@pytest.mark.parametrize("tracked", [True, False])
def test_a_further_try_in_this_process_gets_the_run_directory_and_the_run_may_stay_registered(
    tracked: bool,
) -> None:
    supervisor = FakeSupervisor()
    UNSETTLED["1"] = Unsettled(supervisor, tracked, cause="TrainingError")
    try_again("1")
    try_again("1")
    assert supervisor.calls == [tracked]
