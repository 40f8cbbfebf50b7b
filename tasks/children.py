"""Runs of another deployment that a flow run asks for and waits for; Prefect shows them as its own.

A flow that waits holds nothing but its process. If it ends before them, they are cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
)
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.flows import Flow
from prefect.runtime import flow_run
from prefect.states import Cancelling, Crashed

from opd_core.errors import ConfigError
from tasks.console import announce, warn
from tasks.signals import undisturbed

POLL_S = 3.0
AWAY_S = 600.0
"""So long Prefect's API may be away before a flow gives up waiting for its children."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A run to ask for. ``key`` tells it from its siblings, ``name`` is what Prefect shows."""

    key: str
    name: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Child:
    """A flow run that was asked for, and its last known state."""

    asked: Asked
    flow_run_id: str
    state: State[Any]

    @property
    def completed(self) -> bool:
        """Whether it ended well."""
        return self.state.is_completed()

    @property
    def told(self) -> str:
        """Its name and state, with what Prefect says of that."""
        message = f": {self.state.message}" if self.state.message else ""
        return f"{self.asked.name} ({self.state.name or self.state.type.value}{message})"


class Deployment(Protocol):
    """Where runs are asked for."""

    def start(self, asked: Asked) -> Child:
        """Ask for a run, or take up the one that an earlier try of this flow run asked for. Asked
        once more for the same, it is the same run."""

    def read(self, children: Sequence[Child]) -> list[Child]:
        """The same with their present states."""


class PrefectDeployment:
    """A deployment in Prefect, by ``FLOW/DEPLOYMENT``. Calls raise what Prefect's client raises."""

    def __init__(self, name: str) -> None:
        """Raises :class:`ConfigError` if there is none of that name."""
        self._name = name
        with get_client(sync_client=True) as client:
            try:
                client.read_deployment_by_name(name)
            except ObjectNotFound:
                raise ConfigError(
                    f"no deployment {name!r} in Prefect at {client.api_url}: start `opd up`, or "
                    "register them: prefect deploy --prefect-file deployments/prefect.yaml --all"
                ) from None

    def start(self, asked: Asked) -> Child:
        """Of what earlier tries asked for, what did not end badly is taken up."""
        tries = int(flow_run.run_count or 1)
        for number in range(1, tries + 1):
            run = cast(
                FlowRun,
                run_deployment(
                    self._name,
                    parameters=asked.parameters,
                    flow_run_name=asked.name,
                    idempotency_key=f"{flow_run.id}-{asked.key}-{number}",
                    timeout=0,
                ),
            )
            child = Child(asked, str(run.id), _state(run))
            if child.completed or not child.state.is_final():
                break
        return child

    def read(self, children: Sequence[Child]) -> list[Child]:
        """One that was deleted counts as crashed."""
        wanted = FlowRunFilterId(any_=[UUID(child.flow_run_id) for child in children])
        with get_client(sync_client=True) as client:
            runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=wanted))
        states = {str(run.id): _state(run) for run in runs}
        gone: State[Any] = Crashed(message="deleted in Prefect")
        return [replace(each, state=states.get(each.flow_run_id, gone)) for each in children]


def run_children(
    asked: Sequence[Asked],
    deployment: Deployment,
    width: int = 0,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[Child]:
    """Ask for these runs, at most ``width`` of them at once (0: all), and wait until all have
    ended, however. Raises what Prefect's client raises if its API refuses, or is away for ten
    minutes."""
    waiting, children = list(asked), dict[str, Child]()
    answered = clock()
    while True:
        under_way = [child for child in children.values() if not child.state.is_final()]
        try:
            while waiting and (not width or len(under_way) < width):
                child = deployment.start(waiting[0])
                children[child.flow_run_id] = child
                announce(f"{waiting.pop(0).name}: flow run {child.flow_run_id}")
                under_way += [] if child.state.is_final() else [child]
            if not under_way:
                return list(children.values())
            found = deployment.read(under_way)
        except Exception as error:  # Prefect's API is away for a while: the runs go on
            if _is_refusal(error) or clock() - answered > AWAY_S:
                raise
            warn(f"Prefect does not answer ({type(error).__name__}); waiting on")
        else:
            answered = clock()
            for before, now in zip(under_way, found, strict=True):
                children[now.flow_run_id] = now
                if now.state.name != before.state.name:
                    announce(now.told)
        pause(POLL_S)


@contextmanager
def children_end_with_me() -> Iterator[None]:
    """Whatever ends this flow run early, a cancellation above all, cancels its children."""
    try:
        yield
    except BaseException:
        with undisturbed():
            cancel_children_of(str(flow_run.id))
        raise


def cancel_left(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """A flow's hook for a cancellation: the same where its process was not there to do it."""
    cancel_children_of(str(flow_run.id))


def cancel_children_of(flow_run_id: str) -> None:
    """Cancel the children of a flow run that have not ended, as a person does in Prefect's UI. That
    they cannot be is a warning."""
    parent = FlowRunFilterParentFlowRunId(any_=[UUID(flow_run_id)])
    try:
        with get_client(sync_client=True) as client:
            for child in client.read_flow_runs(
                flow_run_filter=FlowRunFilter(parent_flow_run_id=parent)
            ):
                if not _state(child).is_final():
                    client.set_flow_run_state(child.id, Cancelling())
                    announce(f"cancelling {child.name}")
    except Exception as error:
        warn(f"runs that this one asked for may go on: cancel them in Prefect ({error})")


def _is_refusal(error: Exception) -> bool:
    """Whether Prefect has answered, and would answer the same again."""
    return isinstance(error, ObjectNotFound) or (
        isinstance(error, PrefectHTTPStatusError) and error.response.status_code in (404, 409, 422)
    )


def _state(run: FlowRun) -> State[Any]:
    return run.state or Crashed(message="without a state")
