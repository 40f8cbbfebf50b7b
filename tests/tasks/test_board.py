"""Artifacts that change are made once and replaced; an API that is away is told once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from httpx import ConnectError
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.exceptions import ObjectNotFound

from tasks.board import Board, Shown

FLOW_RUN = str(uuid4())


@dataclass
class FakeApi:
    """What Prefect keeps; ``away`` refuses every call."""

    away: bool = False
    tags: list[str] = field(default_factory=lambda: ["mine"])
    artifacts: dict[UUID, dict[str, Any]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    @contextmanager
    def connect(self) -> Iterator[SyncPrefectClient]:
        if self.away:
            raise ConnectError("http://user:password@host refused")
        yield cast(SyncPrefectClient, self)

    def read_flow_run(self, flow_run_id: UUID) -> Any:
        assert flow_run_id == UUID(FLOW_RUN)
        return SimpleNamespace(tags=self.tags)

    def update_flow_run(self, flow_run_id: UUID, tags: list[str]) -> None:
        self.calls.append("tags")
        self.tags = tags

    def create_artifact(self, artifact: ArtifactCreate) -> Any:
        self.calls.append(f"create {artifact.key}")
        made = uuid4()
        self.artifacts[made] = artifact.model_dump()
        return SimpleNamespace(id=made)

    def update_artifact(self, artifact_id: UUID, change: ArtifactUpdate) -> None:
        if artifact_id not in self.artifacts:
            raise ObjectNotFound(Exception("deleted"))
        self.calls.append(f"update {self.artifacts[artifact_id]['key']}")
        self.artifacts[artifact_id] |= change.model_dump(exclude_unset=True)


def progress(percent: float) -> Shown:
    return Shown("progress", "progress", percent, f"{percent} %")


def test_an_artifact_is_made_once_and_replaced_only_when_it_changes() -> None:
    api = FakeApi()
    board = Board(FLOW_RUN, api.connect)
    board.show([progress(0), Shown("run", "markdown", "x")], ("recipe:tiny", "mine"))
    board.show([progress(0), Shown("run", "markdown", "x")], ("recipe:tiny",))
    board.show([progress(50), Shown("run", "markdown", "x")])
    assert api.calls == ["tags", "create progress", "create run", "update progress"]
    assert api.tags == ["mine", "recipe:tiny"]
    shown = {a["key"]: (a["type"], a["data"], a["description"]) for a in api.artifacts.values()}
    assert shown == {"progress": ("progress", 50, "50 %"), "run": ("markdown", "x", "")}
    assert {a["flow_run_id"] for a in api.artifacts.values()} == {UUID(FLOW_RUN)}


def test_an_api_that_is_away_is_told_once_and_gets_the_newest_state_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = FakeApi(away=True)
    board = Board(FLOW_RUN, api.connect)
    board.show([progress(0)])
    board.show([progress(10)])
    api.away = False
    board.show([progress(20)])
    (told,) = caplog.messages
    assert "Prefect does not show how the run goes" in told
    assert "password" not in told
    assert [a["data"] for a in api.artifacts.values()] == [20]


def test_an_artifact_that_somebody_deleted_stays_away() -> None:
    api = FakeApi()
    board = Board(FLOW_RUN, api.connect)
    board.show([progress(0)])
    api.artifacts.clear()
    board.show([progress(10), Shown("run", "markdown", "x")])
    assert [a["key"] for a in api.artifacts.values()] == ["run"]


def test_outside_of_a_flow_run_nothing_is_asked() -> None:
    api = FakeApi()
    Board(None, api.connect).show([progress(0)])
    assert Board.of_this_flow_run()._flow_run_id is None
    assert api.calls == []
