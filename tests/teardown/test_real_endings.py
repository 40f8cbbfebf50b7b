"""Every ending, while the student is sampled, on the real stack: ``make test-teardown``."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments.drill.watching import RunView
from tests.teardown.playing import (
    CANCELLED,
    COMPLETED,
    FAILED,
    INTERRUPTED,
    KILLED,
    SETTLED_S,
    Cell,
    assert_outcome,
    assert_receipt,
    assert_resumable,
    await_end,
    await_moment,
    await_nothing,
    await_settled,
    play,
    told,
)
from tests.teardown.report import record
from tests.teardown.stage import Prefect, Stage, wait_until
from tests.teardown.surfaces import (
    CommandLine,
    Door,
    Script,
    Served,
    Terminal,
    Worker,
    skip_without_mounts,
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
    Cell("kill-ray-head", "ServingError", FAILED, exits=1),
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


def test_flow_and_supervisor_are_killed_and_the_reaper_ends_the_rest(
    stage: Stage, door: MakeDoor
) -> None:
    """Nothing of the run would ever end by itself: Ray's processes live on without their head."""

    def killed(door: Door, run: RunView) -> None:
        from deployments.drill.striking import strike

        strike("kill-both", run)
        assert run.run_id in stage.reap(door.prefect)

    cell = Cell("kill-both", "owner and supervisor died", KILLED, act=killed, limit_s=90)
    play(stage, door(CommandLine), cell)


def test_flow_and_supervisor_are_killed_and_the_next_run_ends_the_rest(
    stage: Stage, door: MakeDoor, folder: Path
) -> None:
    from deployments.drill.striking import strike

    first: Door = door(CommandLine)
    next_run: list[Door] = []

    def killed(_: Door, run: RunView) -> None:
        strike("kill-both", run)
        again: CommandLine = door(CommandLine)
        again.folder, again.log = folder / "next", folder / "next.log"
        again.open(("training.steps=1", "data.evaluation_rows=16", "evaluation.samples=1"))
        next_run.append(again)

    cell = Cell("kill-both, next run", "owner and supervisor died", KILLED, act=killed, limit_s=60)
    play(stage, first, cell)
    next_run[0].process.send_signal(signal.SIGINT)
    assert next_run[0].process.wait(120) == 130, next_run[0].output()


def test_the_prefect_server_is_killed_and_comes_back(
    stage: Stage, door: MakeDoor, mortal_prefect: Prefect
) -> None:
    """The run goes on meanwhile, and completes."""

    def restarted(door: Door, run: RunView) -> None:
        mortal_prefect.kill()
        steps = run.trained_steps()
        wait_until(lambda: run.trained_steps() > steps, "a train step without Prefect", 30)
        mortal_prefect.start()

    cell = Cell(
        "Prefect killed, started again",
        "completed",
        COMPLETED,
        act=restarted,
        settings=("training.steps=40",),
        limit_s=120,
    )
    play(stage, door(CommandLine, mortal_prefect), cell)


def test_the_prefect_server_is_killed_for_good(
    stage: Stage, door: MakeDoor, mortal_prefect: Prefect
) -> None:
    """Everything else is ended and written in time; Prefect is told by the reaper, days later."""
    cell = Cell(
        "Prefect killed", "completed", COMPLETED, settings=("training.steps=15",), limit_s=60
    )
    played: Door = door(CommandLine, mortal_prefect)
    played.root.mkdir()
    played.open((*cell.settings, "data.evaluation_rows=16", "evaluation.samples=1"))
    run = played.await_run()
    await_moment(played, run, "sampling")
    flow_run_id = run.flow_run_id()
    mortal_prefect.kill()
    try:
        seconds = await_nothing(played, run, time.monotonic(), cell.limit_s)
        assert_receipt(run, cell)
        from tests.teardown.playing import mlflow_status

        wait_until(lambda: mlflow_status(run) == "FINISHED", "MLflow's final status", SETTLED_S)
        os.kill(run.owner(), signal.SIGKILL)  # it would try for minutes to tell Prefect
        wait_until(lambda: run.events("not_settled"), "the supervisor to give up", 150)
        assert (stage.registry / f"{run.run_id}.json").exists()
    finally:
        mortal_prefect.start()
    assert mortal_prefect.state_of(flow_run_id) == "RUNNING"
    stage.reap(mortal_prefect)
    await_settled(stage, played, run)
    assert_outcome(stage, played, run, COMPLETED)
    assert_resumable(run)
    stage.foreigners.assert_alive()
    record(played.name, cell.ending, cell.moment, seconds, cell.limit_s)


def test_the_disk_is_full(stage: Stage, door: MakeDoor, folder: Path) -> None:
    played: Door = door(CommandLine)
    played.root.mkdir()
    unmount = skip_without_mounts(played.root, "400m")
    filler = played.root / "filler"

    def filled(door: Door, run: RunView) -> None:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(65536))

    ending, cause = "disk full", "TrainingError|owner and supervisor died"
    try:
        played.open(("training.steps=100000", "training.checkpoint_every=1"))
        run = played.await_run()
        await_moment(played, run, "sampling")
        filled(played, run)
        struck = time.monotonic()
        wait_until(lambda: run.leftovers().none, "the end", 60)
        seconds = time.monotonic() - struck
        assert seconds < 30, told(played, run)
        assert played.process.wait(150) == 1, played.output()
        wait_until(lambda: not played.strays(), "the supervisor to give up", SETTLED_S)
        filler.unlink()
        stage.reap(played.prefect)
        cell = Cell(ending, cause, FAILED, limit_s=30)
        await_end(stage, played, run, cell, time.monotonic())
    finally:
        played.close()
        unmount()
