"""How each ending is brought about, from outside."""

from __future__ import annotations

import contextlib
import os
import signal
from uuid import UUID

from deployments.drill.watching import RunView
from opd_core.errors import OPDError


class DrillError(OPDError):
    """A drill could not be held; the message says why."""


SIGNALS = {
    "kill-flow": signal.SIGKILL,
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
    "hangup": signal.SIGHUP,
}
RAY_PARTS = {
    "kill-actor": "ray::TrainingActor",
    "kill-raylet": "/raylet/raylet ",
    "kill-gcs": "/gcs/gcs_server ",
}


def strike(ending: str, run: RunView) -> None:
    """Do to the run what the ending says. Raises :class:`DrillError` where that cannot be done."""
    if ending in SIGNALS:
        os.kill(run.owner(), SIGNALS[ending])
    elif ending in RAY_PARTS:
        os.kill(part_of(run, RAY_PARTS[ending]), signal.SIGKILL)
    elif ending == "cancel":
        cancel(run.flow_run_id())
    elif ending == "kill-both":
        kill_together(run.owner(), run.supervisor())
    elif ending == "kill-supervisor":
        os.kill(run.supervisor(), signal.SIGKILL)
    elif ending != "deadline":
        kind = "ray" if ending == "kill-ray-head" else "teacher"
        if not (pids := run.started(kind)):
            raise DrillError(f"{ending}: the run has started no {kind} of its own yet")
        os.kill(pids[-1], signal.SIGSTOP if ending == "stop-teacher" else signal.SIGKILL)


def part_of(run: RunView, command: str) -> int:
    """The pid of the run's process with this in its command line. Raises :class:`DrillError`."""
    for pid, found in run.processes().items():
        if command in f"{found} ":
            return pid
    raise DrillError(f"no process {command.strip()!r} of {run.run_id} runs yet")


def kill_together(*pids: int) -> None:
    """SIGKILL all; none of them sees another one die."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def cancel(flow_run_id: str) -> None:
    """Ask Prefect to cancel a flow run, as its UI does."""
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelling

    with get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(flow_run_id), Cancelling())
