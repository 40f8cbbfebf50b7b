"""What is played: every ending at every moment, how fast it must be over, and what is right then.

The rows are `ENDINGS`, the columns `MOMENTS`; `applies` says which pairs mean nothing, and why. The
rest of this folder plays them: `flow.py` (the owner), `servers.py` (its children), `worker.py` (its
parent), `scene.py` (one cell from the test's side).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

BEFORE, LOADS, READINESS, SAMPLING, TRAINING, SYNC, CHECKPOINT, EVALUATION, TEARDOWN = MOMENTS = (
    "before",
    "loading",
    "readiness",
    "sampling",
    "training",
    "weight sync",
    "checkpoint",
    "evaluation",
    "teardown",
)

GRACE_S = 1.0
"""How long a teacher that does not heed its stop signal is waited for."""
DEADLINE_S = 5.0
"""How long a run with a deadline may take; its moment is reached long before."""
LIMIT_S = 10.0
"""An ending in which nothing hangs is over within this time."""


@dataclass(frozen=True)
class Ending:
    """One way for a run to end.

    `cause` stands in the receipt when it ends so before its teardown. `settled_by` writes the run's
    final state. `limit_s`: nothing is left after so many seconds. `teardown_s` and `margin_s` are
    what the supervisor is given.
    """

    name: str
    cause: str
    settled_by: str = "owner"
    limit_s: float = LIMIT_S
    teardown_s: float = 20.0
    margin_s: float = 10.0


_HUNG_S = GRACE_S + 5.0

ENDINGS = (
    Ending("normal", "completed"),
    Ending("flow raises", "StageFailed"),
    Ending("task raises", "TaskFailed"),
    Ending("time-out", "TimedOut"),
    Ending("cancel", "Cancelled"),
    Ending("SIGINT", "KeyboardInterrupt"),
    Ending("SIGTERM", "owner died", "command"),
    Ending("SIGHUP", "owner died", "command"),
    Ending("SIGKILL", "owner died", "command"),
    Ending("terminal closed", "owner died", "command"),
    Ending("worker interrupted", "owner died", "command"),
    Ending("worker killed", "completed"),
    Ending("worker killed, guard", "Cancelled"),
    Ending("supervisor SIGTERM", "signal SIGTERM"),
    Ending("supervisor killed", "supervisor died", "nobody else"),
    Ending(
        "supervisor stopped",
        "supervisor hung",
        "nobody else",
        limit_s=2.0 + 5.0,
        teardown_s=1.5,
        margin_s=0.5,
    ),
    Ending("flow and supervisor killed", "owner and supervisor died", "reaper"),
    Ending("teacher killed", "ChildDied"),
    Ending("teacher stopped", "TeacherSilent", limit_s=_HUNG_S),
    Ending("teacher deaf", "completed", limit_s=_HUNG_S),
    Ending("Ray head killed", "ChildDied"),
    Ending("GCS killed", "ChildDied"),
    Ending("raylet killed", "ChildDied"),
    Ending("actor killed", "ActorDied"),
    Ending("disk full", "completed"),
    Ending("disk full, flow killed", "owner and supervisor died", "reaper"),
    Ending("disk full for a while", "completed"),
    Ending("deadline", "deadline"),
)

SUPERVISOR_DIES = ("supervisor killed", "supervisor stopped", "flow and supervisor killed")
"""Here others end the run. They find strays by the run's marker, and not by descent."""

_ONLY_BEFORE_TEARDOWN = {
    "flow raises": "the flow waits for the end and runs nothing that could raise",
    "task raises": "the flow waits for the end and runs no task",
    "disk full for a while": "a teardown starts nothing; what it writes is tried above",
    "deadline": "the end has begun, and a limit of its own bounds it",
}

_UNSEEN = (*SUPERVISOR_DIES, "disk full, flow killed")
"""Whoever writes the receipt has only the ledger, and that does not know how the children ended."""

_BREAK_OFF_END = ("time-out", "cancel", "SIGINT", "worker killed, guard")
"""These raise in the flow while it waits for the end; then it leaves, and the end goes on."""


def applies(ending: Ending, moment: str) -> str:
    """Return why this ending means nothing at this moment; "" where it means something."""
    if ending.name.startswith("teacher") and moment == BEFORE:
        return "there is no teacher yet"
    if moment == TEARDOWN:
        return _ONLY_BEFORE_TEARDOWN.get(ending.name, "")
    return ""


CELLS = tuple(
    (ending, moment) for ending in ENDINGS for moment in MOMENTS if not applies(ending, moment)
)


def sampled(seed: int = 6) -> frozenset[tuple[str, str]]:
    """Return one cell of every ending, drawn by `seed`, such that every moment comes up."""
    draw = random.Random(seed)
    left: list[str] = []
    drawn = set()
    for ending in draw.sample(ENDINGS, len(ENDINGS)):
        if not any(moment for moment in left if not applies(ending, moment)):
            left += draw.sample(MOMENTS, len(MOMENTS))
        moment = next(moment for moment in left if not applies(ending, moment))
        left.remove(moment)
        drawn.add((ending.name, moment))
    return frozenset(drawn)


def cause(ending: Ending, moment: str) -> str:
    """Return what the receipt must give as the cause."""
    if moment == TEARDOWN and ending.name not in _UNSEEN:
        return "completed"
    return ending.cause


def settled_by(ending: Ending, moment: str) -> str:
    """Return who must have seen to the run's final state."""
    broken_off = moment == TEARDOWN and ending.name in _BREAK_OFF_END
    return "command" if broken_off else ending.settled_by


def exit_status(ending: Ending, moment: str) -> int:
    """Return how the flow must have left, as `subprocess` gives it: its own way, not the run's."""
    signals = {"SIGINT": -2, "SIGTERM": -15, "SIGHUP": -1, "terminal closed": -1}
    killed = ("SIGKILL", "worker interrupted", "flow and supervisor killed")
    if ending.name in (*signals, *killed, "disk full, flow killed"):
        return signals.get(ending.name, -9)
    ends_well = ("normal", "worker killed", "supervisor stopped", "teacher deaf")
    if ending.name in ends_well or ending.name.startswith("disk full"):
        return 0
    return 0 if moment == TEARDOWN and ending.name not in _BREAK_OFF_END else 1


def child_ends(ending: Ending, moment: str) -> Mapping[str, tuple[str, int | None]]:
    """Return how each child must have ended, and its return code, as the receipt tells it."""
    ends: dict[str, tuple[str, int | None]] = {"ray": ("SIGTERM", 0)}
    if moment != BEFORE:
        ends["teacher"] = ("SIGTERM", 0)
    if moment == EVALUATION:
        ends["evaluation"] = ("SIGTERM", -15)
    if ending.name in _UNSEEN:
        ends = dict.fromkeys(ends, ("SIGKILL", None))
    asked = "SIGTERM" if moment == TEARDOWN else "exited"
    if ending.name == "teacher killed":
        ends["teacher"] = ("exited", -9)
    elif ending.name in ("teacher stopped", "teacher deaf"):
        ends["teacher"] = ("SIGKILL", -9)
    elif ending.name == "Ray head killed":
        ends["ray"] = (asked, -9)
    elif ending.name in ("GCS killed", "raylet killed"):
        ends["ray"] = (asked, 1)
    # The flow stops its evaluation server before it ends the run.
    return {**ends, "evaluation": ("SIGTERM", -15)} if moment == TEARDOWN else ends
