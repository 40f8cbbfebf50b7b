"""One cell on the real stack: a run is started, led to its moment, ended, and searched for."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from deployments.drill.catalogue import QUICK, ending_named, moment_named
from deployments.drill.resuming import resumes_from, why_not_resumable
from deployments.drill.striking import strike
from deployments.drill.watching import RunView
from opd_core.training.forks import newest_checkpoint
from tests.teardown.report import record
from tests.teardown.stage import FINAL, Stage, wait_until
from tests.teardown.surfaces import CommandLine, Door

MOMENT_LIMIT_S = 180.0
RECOVERY_LIMIT_S = 150.0
STEPS_AFTER = 3
IDLE_S = 15.0
"""Until nothing is left of a run that is told to end: its teardown (12 s), and 3 s to be told."""
SETTLED_S = 90.0
RESUMED_S = 240.0


@dataclass(frozen=True)
class Outcome:
    """What Prefect, MLflow and summary.json must say in the end; Prefect one of some, with ``|``
    between them."""

    prefect: str
    mlflow: str
    status: str


COMPLETED = Outcome("COMPLETED", "FINISHED", "completed")
FAILED = Outcome("FAILED", "FAILED", "failed")
INTERRUPTED = Outcome("CRASHED", "KILLED", "cancelled")
CANCELLED = Outcome("CANCELLED", "KILLED", "cancelled")
KILLED = Outcome("CRASHED", "FAILED", "crashed")


@dataclass(frozen=True)
class Cell:
    """An ending at a moment. ``act`` does it; without one the catalogue does. One that ``comes`` by
    itself, within so many seconds, is only waited for.

    ``cause`` is a pattern that the receipt's cause must match in full, ``exits`` the exit status of
    the command line. ``orderly``: no child has to be killed.
    """

    ending: str
    cause: str
    outcome: Outcome
    moment: str = "sampling"
    act: Callable[[Door, RunView], object] | None = None
    comes: float = 0.0
    settings: tuple[str, ...] = ()
    limit_s: float = IDLE_S
    exits: int | None = None
    orderly: bool = False
    survived: bool = False
    resume: bool = False

    def __str__(self) -> str:
        return f"{self.ending}, {self.moment}"


def play(stage: Stage, door: Door, cell: Cell) -> RunView:
    """All of a cell; what it leaves is the run directory."""
    door.root.mkdir(parents=True, exist_ok=True)
    moment = moment_named(cell.moment)
    door.open((*QUICK, *moment.settings, *cell.settings))
    run = door.await_run()
    await_moment(door, run, cell.moment)
    struck = time.monotonic()
    if cell.comes:
        wait_until(lambda: run.events("teardown_begun"), cell.ending, cell.comes, pause_s=0.01)
        struck = time.monotonic()
    elif cell.act is not None:
        cell.act(door, run)
    else:
        strike(ending_named(cell.ending).name, run)
    if cell.survived:
        await_recovery(door, run)
        struck = time.monotonic()
        os.kill(run.owner(), signal.SIGINT)
    await_end(stage, door, run, cell, struck)
    return run


def await_moment(door: Door, run: RunView, moment: str) -> None:
    """Return within milliseconds after it has come."""

    def reached() -> bool:
        if found := run.reached(moment):
            return found
        door.assert_lives()
        return False

    wait_until(reached, f"the moment {moment}", MOMENT_LIMIT_S, pause_s=0.005)


def await_recovery(door: Door, run: RunView) -> None:
    """Wait for further train steps than those that may have been under way."""
    steps = run.trained_steps() + STEPS_AFTER

    def recovered() -> bool:
        door.assert_lives()
        return run.trained_steps() >= steps

    wait_until(recovered, "the recovery", RECOVERY_LIMIT_S)


def await_end(stage: Stage, door: Door, run: RunView, cell: Cell, struck: float) -> None:
    """Wait until nothing is left, then until everything is written; assert all of it."""
    seconds = await_nothing(door, run, struck, cell.limit_s)
    await_settled(stage, door, run)
    stage.foreigners.assert_alive()
    if cell.exits is not None:
        assert door.process.wait(10) == cell.exits, told(door, run)
    assert_receipt(run, cell)
    assert_outcome(stage, door, run, cell.outcome)
    assert_resumable(run)
    if cell.resume:
        resume(stage, door, run)
    record(door.name, cell.ending, cell.moment, seconds, cell.limit_s)


def await_nothing(door: Door, run: RunView, struck: float, limit_s: float) -> float:
    """Seconds until no process, port or folder of the run was left."""
    while not (left := run.leftovers()).none or run.receipt() is None:
        seconds = time.monotonic() - struck
        if seconds > limit_s + 60.0:  # then it is told what is late, and what stays
            pytest.fail(f"still there after {seconds:.0f} s: {left}\n{told(door, run)}")
        time.sleep(0.05)
    seconds = time.monotonic() - struck
    assert seconds <= limit_s, f"it took {seconds:.1f} s\n{told(door, run)}"
    return seconds


def await_settled(stage: Stage, door: Door, run: RunView) -> None:
    """Wait until flow and supervisor are gone and the run is struck out of the registry."""
    entry = stage.registry / f"{run.run_id}.json"
    deadline = time.monotonic() + SETTLED_S
    while entry.exists() or not door.flow_is_gone() or door.strays():
        if time.monotonic() > deadline:
            what = f"registered: {entry.exists()}, flow gone: {door.flow_is_gone()}"
            pytest.fail(f"{what}, strays: {door.strays()}\n{told(door, run)}")
        time.sleep(0.1)


def assert_receipt(run: RunView, cell: Cell) -> None:
    """It is clean, and tells of each child that the ledger tells of."""
    receipt = run.receipt()
    assert receipt is not None
    assert receipt.clean, receipt
    assert re.fullmatch(cell.cause, receipt.cause), receipt.cause
    started = [r.facts["pid"] for r in run.events("child_started")]
    assert [child.pid for child in receipt.children] == started
    if cell.orderly:
        assert {child.how for child in receipt.children} <= {"SIGTERM", "exited"}, receipt


def assert_outcome(stage: Stage, door: Door, run: RunView, outcome: Outcome) -> None:
    """Prefect, MLflow and the summary tell the same truth."""
    flow_run_id = run.flow_run_id()

    def final() -> str:
        state = door.prefect.state_of(flow_run_id)
        return state if state in FINAL else ""

    prefect = wait_until(final, "Prefect's final state", 30)
    summary = run.json_file("summary.json")
    attempt = run.json_file("run.json")["attempts"][-1]
    told_of = (mlflow_status(run), summary.get("status"), attempt["status"])
    assert told_of == (outcome.mlflow, outcome.status, outcome.status), told(door, run)
    assert prefect in outcome.prefect.split("|"), told(door, run)


def mlflow_status(run: RunView) -> str:
    """The status of the run in MLflow's database, which lies in the run root."""
    query = (
        "select runs.status from runs join tags on runs.run_uuid = tags.run_uuid "
        "where tags.key = 'opd.run_id' and tags.value = ?"
    )
    database = run.directory.parent / "mlflow.db"
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        found = connection.execute(query, (run.run_id,)).fetchall()
    finally:
        connection.close()
    return ", ".join(row[0] for row in found) or "no run"


def assert_resumable(run: RunView) -> None:
    """It can go on, from a checkpoint that can be read."""
    assert why_not_resumable(run.directory) == ""
    checkpoint = newest_checkpoint(run.directory)
    if checkpoint is not None:
        assert_loads(checkpoint.state)


def assert_loads(folder: Path) -> None:
    """Every tensor of a checkpoint can be read."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {name: torch.full(t.size, -7, dtype=t.properties.dtype) for name, t in saved.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    assert any(name.startswith("model/") for name in state)
    assert all(bool((t != -7).any()) for t in state.values() if t.numel() > 1)


def resume(stage: Stage, door: Door, run: RunView) -> None:
    """``opd run --resume`` trains one further step and completes."""
    steps = max(run.trained_steps(), resumes_from(run.directory)) + 1
    again = CommandLine(stage, door.folder, door.prefect)
    again.log = door.folder / "resumed.log"
    settings = (f"training.steps={steps}", "evaluation.every=0")
    again.open(settings, "--resume", str(run.directory))
    try:
        status = again.process.wait(RESUMED_S)
        assert status == 0, again.output()
    finally:
        again.close()
    assert run.trained_steps() == steps
    receipt = run.receipt()
    assert receipt is not None
    assert (receipt.clean, receipt.cause) == (True, "completed")
    await_settled(stage, again, run)
    assert_outcome(stage, again, run, COMPLETED)


def told(door: Door, run: RunView) -> str:
    """What a person would read first."""
    parts = [f"receipt: {run.receipt()}", f"summary: {run.json_file('summary.json')}"]
    parts += [f"last of the ledger: {run.ledger()[-3:]}", door.output()]
    for name in ("supervisor.log", "logs/settle.log"):
        path = run.directory / name
        if path.exists():
            parts.append(f"{name}:\n{path.read_text()[-3000:]}")
    return "\n".join(parts)
