"""What a run needs to end rightly is lost too: supervisor, Prefect, room on the disk."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments.drill.striking import strike
from deployments.drill.watching import RunView
from tests.teardown.playing import (
    COMPLETED,
    FAILED,
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
    mlflow_status,
    play,
)
from tests.teardown.report import record
from tests.teardown.stage import Prefect, Stage, wait_until
from tests.teardown.surfaces import CommandLine, Door, skip_without_mounts

pytestmark = [pytest.mark.teardown, pytest.mark.timeout(480)]

MakeDoor = Callable[..., Any]


def test_flow_and_supervisor_are_killed_and_the_reaper_ends_the_rest(
    stage: Stage, door: MakeDoor
) -> None:
    """Nothing of the run would ever end by itself: Ray's processes live on without their head."""

    def killed(door: Door, run: RunView) -> None:
        strike("kill-both", run)
        assert run.run_id in stage.reap(door.prefect)

    cell = Cell("kill-both", "owner and supervisor died", KILLED, act=killed, limit_s=90)
    play(stage, door(CommandLine), cell)


def test_flow_and_supervisor_are_killed_and_the_next_run_ends_the_rest(
    stage: Stage, door: MakeDoor, folder: Path
) -> None:
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
        # Else the job is started again, twice, and dies again of the same.
        once = "training.max_restarts=0"
        played.open(("training.steps=100000", "training.checkpoint_every=1", once))
        run = played.await_run()
        await_moment(played, run, "sampling")
        filled(played, run)
        wait_until(lambda: run.leftovers().none, "the end", 60)  # no receipt can be written yet
        assert played.process.wait(150) == 1, played.output()
        wait_until(lambda: not played.strays(), "the supervisor to give up", SETTLED_S)
        filler.unlink()
        stage.reap(played.prefect)
        cell = Cell(ending, cause, FAILED, limit_s=30)
        await_end(stage, played, run, cell, time.monotonic())
    finally:
        played.close()
        unmount()
