"""Two endings on the real stack, in every ``make test``."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.teardown.playing import KILLED, Cell, play
from tests.teardown.stage import Stage
from tests.teardown.surfaces import CommandLine, Worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

MakeDoor = Callable[..., Any]


def test_a_killed_flow_leaves_nothing_and_can_go_on(stage: Stage, door: MakeDoor) -> None:
    cell = Cell("kill-flow", "owner died", KILLED, "checkpoint", orderly=True)
    play(stage, door(CommandLine), cell)


def test_a_stopped_worker_leaves_nothing(stage: Stage, door: MakeDoor) -> None:
    """It kills the flow and says nothing to Prefect."""
    worker: Worker = door(Worker)
    stop: Callable[..., None] = lambda door, run: door.process.send_signal(signal.SIGTERM)  # noqa: E731
    play(stage, worker, Cell("worker SIGTERM", "owner died", KILLED, act=stop))
