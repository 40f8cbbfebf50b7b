"""Flows as a user may write them around ours: ``python -m tests.teardown.own_flows MODE
KEY=VALUE…``

SIGUSR1 raises an exception in the main thread, wherever it is.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

from prefect import flow

import flows.distill as stages
from flows.distill import distill
from flows.request import DistillRequest
from opd_core.quiet import apply_defaults

RECIPE = "deployments/recipes/tiny.yaml"


class OnPurpose(RuntimeError):
    """What SIGUSR1 raises."""


@flow(name="parent")
def parent(request: DistillRequest) -> dict[str, Any]:
    """A flow whose child is the experiment."""
    return distill(request)


def plain(request: DistillRequest, seconds: float) -> None:
    """Nothing around it; an exception while the student trains is one of that task."""
    distill(request)


def in_the_flow(request: DistillRequest, seconds: float) -> None:
    """The student is trained in the flow itself, not in a task."""
    stages.train_student = stages.train_student.fn  # type: ignore[attr-defined,assignment]
    distill(request)


def timed_task(request: DistillRequest, seconds: float) -> None:
    """The training's task has a time-out."""
    task = stages.train_student.with_options(timeout_seconds=seconds)  # type: ignore[attr-defined]
    stages.train_student = task  # type: ignore[attr-defined]
    distill(request)


def timed_flow(request: DistillRequest, seconds: float) -> None:
    """The flow has a time-out."""
    distill.with_options(timeout_seconds=seconds)(request)


def as_child(request: DistillRequest, seconds: float) -> None:
    """The experiment is a child flow run."""
    parent(request)


MODES = {each.__name__: each for each in (plain, in_the_flow, timed_task, timed_flow, as_child)}


def _fail(number: int, frame: FrameType | None) -> None:
    raise OnPurpose("an exception on purpose")


if __name__ == "__main__":
    apply_defaults()
    signal.signal(signal.SIGUSR1, _fail)
    mode, timeout_s, *settings = sys.argv[1:]
    MODES[mode](DistillRequest(recipe_file=RECIPE, overrides=settings), float(timeout_s))
