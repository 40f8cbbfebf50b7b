"""A server that loses a known race of its own start is started again; any other death is told."""

from __future__ import annotations

import pytest

from opd_core.config import Backend, LaunchConfig
from opd_core.errors import ServingError
from opd_core.serving.commands import START_RACE
from opd_core.serving.servers import Server
from tasks.servers import await_start, start_server
from tests.tasks.fake_session import MakeSession, Started

LAUNCH = LaunchConfig(model="/models/t", startup_limit_s=10)
RACE = f"loading\n{START_RACE['lmdeploy']}\n"


def died(started: Started, teacher: str | None, backend: Backend, log: str) -> Server:
    """A server that ended while it was starting."""
    server = start_server(started.session, Server(teacher, 0, backend, LAUNCH))
    started.session.run.log(server.child).write_text(log)
    started.supervisor.die(server.child)
    return server


@pytest.mark.parametrize("teacher", ["t", None])
def test_the_one_that_lost_its_race_is_started_again_at_its_port(
    make_session: MakeSession, teacher: str | None
) -> None:
    started = make_session()
    waited_for = start_server(started.session, Server("other", 0, "sglang", LAUNCH))
    raced = died(started, teacher, "lmdeploy", RACE)
    await_start(started.session, waited_for.endpoint, "sglang", 10)
    again = started.supervisor.ordered[-1]
    assert (again.name, again.ports) == (raced.child, (raced.port,))
    assert started.session.restarts == {raced.child: 1}


@pytest.mark.parametrize(
    ("backend", "log"), [("lmdeploy", "no such model\n"), ("sglang", RACE)], ids=["other", "sglang"]
)
def test_another_death_is_not_taken_for_a_race(
    make_session: MakeSession, backend: Backend, log: str
) -> None:
    started = make_session()
    server = died(started, "t", backend, log)
    with pytest.raises(ServingError, match="teacher-t"):
        await_start(started.session, server.endpoint, backend, 10)
    assert len(started.supervisor.ordered) == 1


def test_a_race_that_is_always_lost_ends_with_the_log(make_session: MakeSession) -> None:
    started = make_session()
    server = died(started, "t", "lmdeploy", RACE)
    started.session.restarts = {"teacher-t": 3}
    with pytest.raises(ServingError, match=r"started again 3 times already \(launch.max_restarts"):
        await_start(started.session, server.endpoint, "lmdeploy", 10)
