"""A server that loses a known race of its own start is started again; any other death is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opd_core.config import OPDConfig
from opd_core.errors import ServingError
from opd_core.serving.commands import START_RACE
from tasks.teacher import _raced

TWO = [
    {"backend": "sglang", "endpoint": "http://127.0.0.1:20001", "launch": {"model": "/models/t"}},
    {"backend": "lmdeploy", "endpoint": "http://127.0.0.1:20002", "launch": {"model": "/models/t"}},
]


class FakeSession(SimpleNamespace):
    """What starting again needs of a session; the processes named in ``dead`` have ended."""

    def child_exit(self, child: str) -> int | None:
        return 1 if child in self.dead else None

    def stop(self, child: str) -> None:
        self.stopped.append(child)

    def spawn(self, spec: Any) -> None:
        self.spawned.append((spec.name, spec.ports))


@pytest.fixture
def session(tmp_path: Path) -> FakeSession:
    opd = OPDConfig(teachers=[{"name": "t", "replicas": TWO}], default_teacher="t")
    run = SimpleNamespace(
        config=SimpleNamespace(opd=opd), directory=tmp_path, log=lambda name: tmp_path / name
    )
    return FakeSession(run=run, dead=set(), stopped=[], spawned=[], restarts={}, keys={})


def test_the_one_that_lost_its_race_is_started_again_at_its_port(session: FakeSession) -> None:
    session.dead = {"teacher-t-1"}
    session.run.log("teacher-t-1").write_text(f"loading\n{START_RACE['lmdeploy']}\n")
    assert _raced(session)
    assert session.spawned == [("teacher-t-1", (20002,))]
    assert session.restarts == {"teacher-t-1": 1}


def test_another_death_is_not_taken_for_a_race(session: FakeSession) -> None:
    session.dead = {"teacher-t-1"}
    session.run.log("teacher-t-1").write_text("no such model\n")
    assert not _raced(session)
    session.dead = {"teacher-t"}
    session.run.log("teacher-t").write_text(START_RACE["lmdeploy"])
    assert not _raced(session)
    assert session.spawned == []


def test_a_race_that_is_always_lost_ends_with_the_log(session: FakeSession) -> None:
    session.dead = {"teacher-t-1"}
    session.run.log("teacher-t-1").write_text(f"{START_RACE['lmdeploy']}\n")
    session.restarts = {"teacher-t-1": 3}
    with pytest.raises(ServingError, match="started again 3 times already"):
        _raced(session)
