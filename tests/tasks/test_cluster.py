"""A private Ray cluster: where it has its files, and another one in its place when it dies."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from typing import cast

import pytest

from opd_core.errors import ClusterLost, ServingError, TrainingError
from opd_core.lifecycle.errors import SupervisorGone
from opd_core.lifecycle.handle import Supervisor
from tasks.cluster import HEAD, head_is_dead, short_folder, start_head
from tasks.student import try_training
from tests.tasks.fake_session import MakeSession, Started

BELOW = "/opd-ray-12345678/session_2026-11-30_13-12-54_523851_1234567/sockets/plasma_store"


def test_the_sockets_of_a_cluster_have_room_whatever_the_folder_for_temporary_files() -> None:
    assert short_folder("/scratch") == "/scratch"
    for wanted in ("/scratch/" + "a" * 16, "/scratch/" + "a" * 90):
        assert len(short_folder(wanted) + BELOW) <= 107


@pytest.fixture
def begun(make_session: MakeSession) -> Iterator[Started]:
    """A run whose head never answers."""
    started = make_session("ray.startup_limit_s=0.1", "training.max_restarts=1")
    started.supervisor.silent.add(HEAD)
    start_head(started.session)
    yield started
    for spec in started.supervisor.ordered:
        for folder in spec.scratch:
            shutil.rmtree(folder)


def test_a_dead_head_is_replaced_by_another_one_and_nothing_else_is_stopped(
    begun: Started, caplog: pytest.LogCaptureFixture
) -> None:
    session, supervisor = begun.session, begun.supervisor
    first = session.cluster
    supervisor.dead.add(HEAD)
    with pytest.raises(ClusterLost, match="ray-head"):
        try_training.fn(session)
    assert "the run's Ray head died; starting it again from its last" in caplog.text
    assert (session.job_restarts, supervisor.stopped) == (1, [])
    with pytest.raises(ServingError, match="does not answer"):  # and that is final
        try_training.fn(session)
    assert supervisor.stopped == [HEAD]
    before, after = supervisor.ordered
    assert (before.name, after.name) == (HEAD, HEAD)
    assert not set(before.ports) & set(after.ports)
    assert (session.cluster.address, session.cluster.token) != (first.address, first.token)


def test_a_head_that_dies_once_more_than_the_job_may_be_started_ends_the_run(
    begun: Started,
) -> None:
    begun.session.job_restarts = 1
    begun.supervisor.spawn = lambda spec: begun.supervisor.dead.add(HEAD)  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"started again 1 times already \(training") as raised:
        try_training.fn(begun.session)
    assert not isinstance(raised.value, ClusterLost)
    assert "the end of its log" in str(raised.value)
    shutil.rmtree(str(begun.session.cluster.temp_dir))


class Ending:
    """A supervisor that is ending its run."""

    def raise_if_dead(self, *names: str, but: Collection[str] = ()) -> None:
        raise SupervisorGone("deadline")


def test_a_head_that_ends_with_the_whole_run_is_not_missed(begun: Started) -> None:
    assert not head_is_dead(begun.session)
    begun.supervisor.dead.add(HEAD)
    assert head_is_dead(begun.session)
    begun.session.supervisor = cast(Supervisor, Ending())
    assert not head_is_dead(begun.session)
