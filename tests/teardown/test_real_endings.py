"""Every ending, while the student is sampled, on the real stack: ``make test-teardown``."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from deployments.drill.watching import RunView
from tests.teardown.playing import (
    CANCELLED,
    COMPLETED,
    FAILED,
    INTERRUPTED,
    KILLED,
    Cell,
    play,
)
from tests.teardown.stage import Stage
from tests.teardown.surfaces import (
    CommandLine,
    Door,
    Script,
    Served,
    Terminal,
    Worker,
)

pytestmark = [pytest.mark.teardown, pytest.mark.timeout(480)]

MakeDoor = Callable[..., Any]
GUARDED_S = 45.0
"""A cancellation that nobody carries out: the guard waits 20 s, and looks every 5 s."""
UNGUARDED_S = 30.0
"""One of a flow that no worker has started: the guard looks twice."""


def signalled(signum: signal.Signals) -> Callable[[Door, RunView], None]:
    """To the flow."""
    return lambda door, run: os.kill(run.owner(), signum)


def door_signalled(signum: signal.Signals) -> Callable[[Door, RunView], None]:
    """To the worker or the runner."""
    return lambda door, run: door.process.send_signal(signum)


def cancelled(door: Door, run: RunView) -> None:
    """In Prefect."""
    door.prefect.cancel(run.flow_run_id())


def killed_and_cancelled(door: Door, run: RunView) -> None:
    """The worker first; the run is one that outlives its worker."""
    door.process.kill()
    door.prefect.cancel(run.flow_run_id())


NO_RESTART = ("training.max_restarts=0",)
COMMAND_LINE = (
    Cell("interrupt", "KeyboardInterrupt", INTERRUPTED, exits=130, orderly=True),
    Cell("terminate", "TerminationSignal", INTERRUPTED, exits=-signal.SIGTERM, orderly=True),
    Cell("hangup", "TerminationSignal", INTERRUPTED, exits=-signal.SIGTERM, orderly=True),
    Cell("kill-flow", "owner died", KILLED, exits=-signal.SIGKILL, orderly=True),
    Cell("cancel", "cancelled", CANCELLED, act=cancelled, limit_s=UNGUARDED_S, orderly=True),
    Cell(
        "deadline",
        "deadline",
        FAILED,
        "loading",
        comes=60,
        settings=("run.deadline_s=30",),
        exits=1,
    ),
    Cell("kill-supervisor", "supervisor died", FAILED, exits=1),
    Cell("kill-ray-head", "TrainingError", FAILED, settings=NO_RESTART, exits=1),
    Cell("kill-raylet", "(Serving|Training)Error", FAILED, settings=NO_RESTART, exits=1),
    Cell("kill-gcs", "(Serving|Training)Error", FAILED, settings=NO_RESTART, exits=1),
    Cell("kill-actor", "KeyboardInterrupt", INTERRUPTED, survived=True),
    Cell("kill-teacher", "KeyboardInterrupt", INTERRUPTED, survived=True),
    Cell(
        "stop-teacher",
        "KeyboardInterrupt",
        INTERRUPTED,
        settings=("opd.teachers.0.hang_limit_s=8",),
        survived=True,
    ),
)


@pytest.mark.parametrize("cell", COMMAND_LINE, ids=str)
def test_from_the_command_line(stage: Stage, door: MakeDoor, cell: Cell) -> None:
    play(stage, door(CommandLine), cell)


def test_a_run_that_ends_by_itself(stage: Stage, door: MakeDoor) -> None:
    steps = ("training.steps=3",)
    cell = Cell(
        "normal",
        "completed",
        COMPLETED,
        comes=60,
        settings=steps,
        exits=0,
        orderly=True,
    )
    play(stage, door(CommandLine), cell)


RAISED = {"flow raises": "in_the_flow", "task raises": "plain"}
TIMED = {"task time-out": ("timed_task", 45.0), "flow time-out": ("timed_flow", 75.0)}
"""Counted from the task's and the flow's own beginning: the student trains by then."""


@pytest.mark.parametrize("ending", RAISED)
def test_an_exception_in_a_script(stage: Stage, door: MakeDoor, ending: str) -> None:
    cell = Cell(ending, "OnPurpose", FAILED, act=signalled(signal.SIGUSR1), orderly=True)
    play(stage, door(Script, mode=RAISED[ending]), cell)


@pytest.mark.parametrize("ending", TIMED)
def test_a_time_out_in_a_script(stage: Stage, door: MakeDoor, ending: str) -> None:
    mode, timeout_s = TIMED[ending]
    cell = Cell(ending, ".*[Tt]ime.*", FAILED, comes=timeout_s, orderly=True)
    play(stage, door(Script, mode=mode, timeout_s=timeout_s), cell)


def test_a_child_flow_run_is_cancelled(stage: Stage, door: MakeDoor) -> None:
    cell = Cell("cancel", "cancelled", CANCELLED, act=cancelled, limit_s=UNGUARDED_S, orderly=True)
    played: Door = door(Script, mode="as_child")
    played.name = "child flow run"
    play(stage, played, cell)


def test_a_worker_cancels_a_run(stage: Stage, worker: Worker) -> None:
    cell = Cell("cancel", "cancelled", CANCELLED, act=cancelled, limit_s=20, orderly=True)
    play(stage, worker, cell)


def test_a_workers_flow_is_killed(stage: Stage, worker: Worker) -> None:
    play(stage, worker, Cell("kill-flow", "owner died", KILLED, orderly=True))


WORKER_ENDS = (
    Cell("worker SIGTERM", "owner died", KILLED, act=door_signalled(signal.SIGTERM)),
    Cell("worker SIGINT", "owner died", KILLED, act=door_signalled(signal.SIGINT)),
    Cell(
        "worker SIGKILL", "worker gone", INTERRUPTED, act=door_signalled(signal.SIGKILL), limit_s=20
    ),
    Cell(
        "worker killed, then cancelled",
        "cancelled",
        CANCELLED,
        act=killed_and_cancelled,
        settings=("run.end_with_worker=false",),
        limit_s=GUARDED_S,
    ),
)


@pytest.mark.parametrize("cell", WORKER_ENDS, ids=str)
def test_a_worker_ends(stage: Stage, door: MakeDoor, cell: Cell) -> None:
    play(stage, door(Worker), cell)


SERVED = (
    Cell("cancel", "cancelled", CANCELLED, act=cancelled, limit_s=20, orderly=True),
    Cell("runner SIGTERM", "cancelled", CANCELLED, act=door_signalled(signal.SIGTERM), limit_s=20),
    Cell("runner SIGINT", "owner died|worker gone", KILLED, act=door_signalled(signal.SIGINT)),
    Cell(
        "runner SIGKILL", "worker gone", INTERRUPTED, act=door_signalled(signal.SIGKILL), limit_s=20
    ),
)


@pytest.mark.parametrize("cell", SERVED, ids=str)
def test_a_served_run(stage: Stage, door: MakeDoor, cell: Cell) -> None:
    play(stage, door(Served), cell)


def test_a_terminal_is_closed(stage: Stage, door: MakeDoor) -> None:
    terminal: Terminal = door(Terminal)

    def closed(door: Door, run: RunView) -> None:
        terminal.close_terminal()

    cell = Cell("terminal closed", "TerminationSignal", INTERRUPTED, act=closed, orderly=True)
    play(stage, terminal, cell)
