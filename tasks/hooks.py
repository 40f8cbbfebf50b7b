"""What a flow does when Prefect has stored its final state: let the run's supervisor go.

The engine calls these hooks in the flow's own process, after the API has taken the state, for
Completed, Failed (also a time-out) and Crashed. They are not called there for a cancellation by a
worker, whose state is written only when the flow is gone, nor when the API is away: then the
supervisor sees that nobody said that all is settled, and settles it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow

from tasks.flow_state import stands


class Settleable(Protocol):
    """A supervisor that has ended its run and waits for this word."""

    def settled(self, *, complete: bool = True) -> None:
        """Everything about the run is written, or else is written by somebody later."""


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A run that has ended, while Prefect does not know it yet. ``tracked``: MLflow has everything.
    ``cause`` is the receipt's."""

    supervisor: Settleable
    tracked: bool
    cause: str


UNSETTLED: dict[str, Unsettled] = {}
"""The runs of this process, by flow run id."""


def conclude(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """A flow's hook for each final state. Where something is lacking or wrong, the supervisor waits
    for the end of this process and mends it."""
    run = UNSETTLED.pop(str(flow_run.id), None)
    if run is not None and run.tracked and stands(state, run.cause):
        run.supervisor.settled()


def try_again(flow_run_id: str) -> None:
    """Prefect tries a failed flow again in this process: the next attempt goes on in the same
    run directory, and needs it for itself. What the last one did not bring to MLflow, it will; the
    run stays registered for the case that it does not come to that."""
    run = UNSETTLED.pop(flow_run_id, None)
    if run is not None:
        run.supervisor.settled(complete=run.tracked)
