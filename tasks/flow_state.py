"""What Prefect must say of a run that has ended, and saying it where the engine could not.

Wanted are: completed → Completed; failed → Failed; cancelled in Prefect → Cancelled; a flow that
was interrupted, terminated or killed → Crashed. A final state that Prefect has already is left
alone, with one exception: a flow that the guard ended because of a cancellation is called
Crashed by the engine, and was cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Completed, Crashed, Failed

from opd_core.lifecycle.records import Receipt, read_receipt
from opd_core.training.attempts import RunHistory
from opd_core.training.files import ATTEMPTS_FOLDER
from tasks.receipts import keep_late

CANCELLED = "cancelled"
"""The cause of a run's end where somebody cancelled its flow run in Prefect."""
OWN_WORD_S = 10.0
"""So long the engine, or a worker, has to write the final state itself."""
POLL_S = 1.0
BY_STATUS = {"completed": Completed, "failed": Failed}


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How an attempt ended: the receipt's ``cause``, the summary's ``status``; and when it began
    (unix time)."""

    cause: str
    status: str
    began_s: float
    directory: Path

    @property
    def message(self) -> str:
        """What Prefect shows with the state."""
        return f"The run was ended ({self.cause}); everything about it is in {self.directory}"


class FlowStates(Protocol):
    """Prefect's states of one flow run. ``deployed``, known after :meth:`read`: it is a
    deployment's, so a worker takes it up when it is scheduled."""

    deployed: bool

    def read(self) -> State[Any] | None:
        """The present state; None for a flow run that is not there."""

    def write(self, state: State[Any]) -> None:
        """Replace it, whatever it is."""


class ApiStates:
    """The states as Prefect's API has them. Calls raise what Prefect's client raises."""

    def __init__(self, client: SyncPrefectClient, flow_run_id: str) -> None:
        self._client = client
        self._id = UUID(flow_run_id)
        self.deployed = False

    def read(self) -> State[Any] | None:
        """The present state; None for a flow run that is not there."""
        try:
            flow_run = self._client.read_flow_run(self._id)
        except ObjectNotFound:
            return None
        self.deployed = flow_run.deployment_id is not None
        return flow_run.state

    def write(self, state: State[Any]) -> None:
        """Replace it, whatever it is."""
        self._client.set_flow_run_state(self._id, state, force=True)

    def propose(self, state: State[Any]) -> None:
        """Replace it if Prefect's rules allow that: one that is cancelled stays so."""
        self._client.set_flow_run_state(self._id, state)

    def keep_receipt(self, receipt: Receipt) -> None:
        """Make its artifact, if it lacks; for a flow run that is not there, do nothing."""
        if self.read() is not None:
            keep_late(self._client, self._id, receipt)


@contextmanager
def api_states(flow_run_id: str, timeout_s: float, retries: int) -> Iterator[ApiStates]:
    """The states of a flow run through a client of its own, which waits no longer than this."""
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: retries}),
        get_client({"timeout": timeout_s}, sync_client=True) as client,
    ):
        yield ApiStates(client, flow_run_id)


def stands(state: State[Any], cause: str) -> bool:
    """Whether a final state is right for a run that ended for this cause."""
    return not (state.is_crashed() and cause == CANCELLED)


def due_state(current: State[Any], end: RunEnd, *, deployed: bool) -> State[Any] | None:
    """The state that has to take the place of ``current``; None where nothing is to be done."""
    if current.is_final():
        return None if stands(current, end.cause) else Cancelled(message=end.message)
    waits = current.is_paused() or (current.is_scheduled() and deployed)
    if waits or _begun_later(current, end):
        return None
    if current.is_cancelling() or end.cause == CANCELLED:
        return Cancelled(message=end.message)
    return BY_STATUS.get(end.status, Crashed)(message=end.message)


def _begun_later(current: State[Any], end: RunEnd) -> bool:
    """Whether the flow run is at its next try, which nobody may end for the last one's sake: an
    attempt begins when its flow is Running already."""
    under_way = current.is_running() or current.is_pending()
    return under_way and current.timestamp.timestamp() > end.began_s


def settle_flow_run(
    states: FlowStates,
    end: RunEnd,
    pause: Callable[[float], None] = time.sleep,
    patience_s: float = OWN_WORD_S,
) -> None:
    """Make Prefect's state the right one, after giving its own processes time to do so."""
    for _ in range(round(patience_s / POLL_S)):
        current = states.read()
        if current is None or due_state(current, end, deployed=states.deployed) is None:
            return
        if current.is_final():
            break
        pause(POLL_S)
    current = states.read()
    due = None if current is None else due_state(current, end, deployed=states.deployed)
    if due is not None:
        states.write(due)


def settle_earlier(history: RunHistory, run_dir: Path, timeout_s: float, retries: int) -> None:
    """The same for the flow runs of a run's earlier attempts, which are long over. Raises what
    Prefect's client raises."""
    latest = history.attempts[-1].flow_run_id
    for flow_run_id, end in earlier_ends(history, run_dir).items():
        if flow_run_id not in ("", latest):
            with api_states(flow_run_id, timeout_s, retries) as states:
                settle_flow_run(states, end, patience_s=0.0)


def earlier_ends(history: RunHistory, run_dir: Path) -> dict[str, RunEnd]:
    """How the last attempt of each earlier flow run ended, as far as its own files tell."""
    ends = {}
    for number, attempt in enumerate(history.attempts[:-1], start=1):
        folder = run_dir / ATTEMPTS_FOLDER / str(number)
        receipt = read_receipt(folder)
        cause = receipt.cause if receipt else "unknown"
        ends[attempt.flow_run_id] = RunEnd(cause, attempt.status, attempt.started_at, folder)
    return ends
