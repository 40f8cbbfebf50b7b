"""Every moment of a run, ended in three ways, on the real stack: ``make test-teardown``."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments.drill.catalogue import MOMENTS
from deployments.drill.watching import RunView
from tests.teardown.playing import CANCELLED, COMPLETED, FAILED, KILLED, Cell, Outcome, play
from tests.teardown.stage import Stage
from tests.teardown.surfaces import CommandLine, Door, Script, Worker

pytestmark = [pytest.mark.teardown, pytest.mark.timeout(480)]

MakeDoor = Callable[..., Any]
NAMES = [moment.name for moment in MOMENTS]
SLOW_PROOF = {"faults": [{"fault": "slow", "delay_s": 1.0, "count": 8}]}
TOO_LATE = Outcome("COMPLETED|CANCELLED", "FINISHED", "completed")
"""The flow and its worker both write their last word, and either may be the last one."""
RAISED = r"OnPurpose|\w+Error"
"""It comes in the middle of anything; a library may make its own error of it."""
RAISED_LATE = Outcome("FAILED", "FINISHED", "completed")
"""The run was good and is ended in peace; the exception comes after that, and fails the flow."""
TEARDOWN = "teardown"
"""Here training is over, and the receipt's cause was said already."""

TRAINED_AND_FAILED = Outcome("FAILED", "FINISHED", "completed")
"""The student is trained and whole; the flow raised afterwards, and Prefect has its own word."""


@pytest.fixture
def settings(folder: Path) -> tuple[str, ...]:
    """A teacher whose proof takes seconds, so that there is a readiness to hit."""
    script = folder / "chaos.json"
    script.write_text(json.dumps(SLOW_PROOF))
    return (f"opd.teachers.0.launch.extra_args=[--chaos, {script}]",)


def of(settings: tuple[str, ...], moment: str) -> tuple[str, ...]:
    return settings if moment == "readiness" else ()


def raised(door: Door, run: RunView) -> None:
    """In the flow's main thread, wherever it is."""
    os.kill(run.owner(), signal.SIGUSR1)


def cancelled(door: Door, run: RunView) -> None:
    """In Prefect."""
    door.prefect.cancel(run.flow_run_id())


@pytest.mark.parametrize("moment", NAMES)
def test_an_exception(stage: Stage, door: MakeDoor, settings: tuple[str, ...], moment: str) -> None:
    cause, outcome = ("completed", RAISED_LATE) if moment == TEARDOWN else (RAISED, FAILED)
    cell = Cell("exception", cause, outcome, moment, raised, settings=of(settings, moment))
    play(stage, door(Script), cell)


@pytest.mark.parametrize("moment", NAMES)
def test_a_cancellation(
    stage: Stage, worker: Worker, settings: tuple[str, ...], moment: str
) -> None:
    cause, outcome = ("completed", TOO_LATE) if moment == TEARDOWN else ("cancelled", CANCELLED)
    cell = Cell(
        "cancel", cause, outcome, moment, cancelled, settings=of(settings, moment), limit_s=20
    )
    play(stage, worker, cell)


@pytest.mark.parametrize("moment", NAMES)
def test_the_flow_is_killed(
    stage: Stage, door: MakeDoor, settings: tuple[str, ...], moment: str
) -> None:
    """And resumed, to a further train step."""
    outcome: Outcome = COMPLETED if moment == TEARDOWN else KILLED
    cause = "completed" if moment == TEARDOWN else "owner died"
    cell = Cell("kill-flow", cause, outcome, moment, settings=of(settings, moment), resume=True)
    play(stage, door(CommandLine), cell)
