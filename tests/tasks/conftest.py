"""A session of the tiny recipe over the fake supervisor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from opd_core.lifecycle.handle import Supervisor
from opd_core.preflight import PreflightReport
from opd_core.recipe import load_recipe
from opd_core.training.attempts import Attempt, RunHistory
from tasks.environment import RunRecord
from tasks.session import Session
from tests.tasks.fake_session import FakeSupervisor, MakeSession, Started

RECIPE = Path(__file__).parents[2] / "deployments" / "recipes" / "tiny.yaml"


@pytest.fixture
def make_session(tmp_path: Path) -> Iterator[MakeSession]:
    """Ends the servers that a test has left."""
    supervisor = FakeSupervisor()
    (tmp_path / "logs").mkdir()

    def make(*overrides: str) -> Started:
        config = load_recipe(RECIPE, overrides)
        run = RunRecord("tiny-1", tmp_path, config, RunHistory("tiny-1", (Attempt(1.0),), {}))
        session = Session(run, PreflightReport(), cast(Supervisor, supervisor), {})
        return Started(session, supervisor)

    yield make
    for name in list(supervisor.sockets):
        supervisor.stop(name)
