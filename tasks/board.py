"""A run's artifacts in Prefect that change while it goes on.

Prefect keeps every artifact for ever, so each of these is made once and then replaced in place:
a run of a week leaves as many as one of a minute. Used by one thread, which may wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from opd_core.tracking.shipper import short_error
from tasks.console import warn

API_TIMEOUT_S = 5.0
Connect = Callable[[], AbstractContextManager[SyncPrefectClient]]


@contextmanager
def _connect() -> Iterator[SyncPrefectClient]:
    """A client that gives up soon: what it does not bring now, it brings the next time."""
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1}),
        get_client({"timeout": API_TIMEOUT_S}, sync_client=True) as client,
    ):
        yield client


@dataclass(frozen=True, slots=True)
class Shown:
    """One artifact: ``kind`` is Prefect's (``markdown``, ``table``, ``progress``), ``description``
    stands above ``data``."""

    key: str
    kind: str
    data: Any
    description: str = ""


class Board:
    """The artifacts of one flow run; without a flow run nothing is shown. Nothing raises: an API
    that is away is told once, and gets the newest state when it is back."""

    def __init__(self, flow_run_id: str | None, connect: Connect | None = None) -> None:
        self._flow_run_id = UUID(flow_run_id) if flow_run_id else None
        self._connect = connect or _connect
        self._made: dict[str, tuple[UUID, Shown]] = {}
        self._tagged = False
        self._told = False

    @classmethod
    def of_this_flow_run(cls) -> Board:
        """Call it on the flow's own thread."""
        return cls(str(flow_run.id) if flow_run.id else None)

    def show(self, artifacts: Iterable[Shown], tags: Iterable[str] = ()) -> None:
        """Bring what has changed since it was shown last; the flow run gets ``tags`` once."""
        if self._flow_run_id is None:
            return
        try:
            with self._connect() as client:
                self._tag(client, self._flow_run_id, tags)
                for shown in artifacts:
                    self._bring(client, shown)
        except Exception as error:  # whatever Prefect's client raises: the run goes on
            if not self._told:
                self._told = True
                warn(
                    "Prefect does not show how the run goes "
                    f"({short_error(error)}); its files do, and this is tried again"
                )

    def _tag(self, client: SyncPrefectClient, flow_run_id: UUID, tags: Iterable[str]) -> None:
        if not self._tagged:
            known = client.read_flow_run(flow_run_id).tags
            client.update_flow_run(flow_run_id, tags=list(dict.fromkeys((*known, *tags))))
            self._tagged = True

    def _bring(self, client: SyncPrefectClient, shown: Shown) -> None:
        made, before = self._made.get(shown.key, (None, None))
        if shown == before:
            return
        if made is not None:
            change = ArtifactUpdate(data=shown.data, description=shown.description)
            with suppress(ObjectNotFound):  # somebody deleted it, and does not want to see it
                client.update_artifact(made, change)
        else:
            artifact = ArtifactCreate(
                key=shown.key,
                type=shown.kind,
                data=shown.data,
                description=shown.description,
                flow_run_id=self._flow_run_id,
            )
            made = client.create_artifact(artifact).id
        self._made[shown.key] = made, shown
