"""The student's servers during a run: where they answer is told, and a dead one is replaced."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import pytest

from opd_core.config import LaunchConfig
from opd_core.errors import ServingError
from opd_core.sampling.samplers import Samplers, read_samplers
from opd_core.serving.servers import Server
from tasks.samplers import await_samplers, revive_samplers, start_samplers
from tasks.servers import start_server
from tasks.watch import ServerWatch
from tests.tasks.fake_session import MakeSession, Started

TWO = ("sampling.engine=sglang", "sampling.actors=2")
Up = Callable[..., Started]


@pytest.fixture
def up(make_session: MakeSession) -> Up:
    """A session whose servers are ready."""

    def make(*overrides: str) -> Started:
        started = make_session(*(overrides or TWO))
        start_samplers.fn(started.session)
        await_samplers.fn(started.session)
        return started

    return make


def told(started: Started) -> Samplers:
    return read_samplers(started.session.run.directory / "samplers.json")


def turn(started: Started) -> None:
    watch = ServerWatch(started.session)
    try:
        watch.turn(lambda: None)
    finally:
        watch.close()


def test_the_job_is_told_where_they_answer_by_their_number(up: Up) -> None:
    started = up()
    ordered = started.supervisor.ordered
    assert [(spec.name, spec.kind) for spec in ordered] == [
        ("student-0", "student"),
        ("student-1", "student"),
    ]
    where = tuple(f"http://127.0.0.1:{spec.ports[0]}" for spec in ordered)
    assert told(started) == Samplers("sglang", where)
    assert "samplers_wait" in started.session.seconds


def test_they_end_before_the_teachers(up: Up) -> None:
    started = up()
    launch = LaunchConfig(model="/models/t")
    start_server(started.session, Server("t", 0, "sglang", launch))
    *students, teacher = started.supervisor.ordered
    assert all(student.stop_order < teacher.stop_order for student in students)


def test_where_actors_sample_there_is_no_server_and_nothing_to_tell(up: Up) -> None:
    started = up("sampling.engine=transformers")
    assert started.supervisor.ordered == []
    assert not (started.session.run.directory / "samplers.json").exists()
    assert "samplers_wait" not in started.session.seconds


def test_one_that_dies_while_it_loads_ends_the_run_at_once(make_session: MakeSession) -> None:
    started = make_session(*TWO)
    start_samplers.fn(started.session)
    started.supervisor.die("student-1")
    with pytest.raises(ServingError, match=r"student-1(.|\n)*the end of its log"):
        await_samplers.fn(started.session)


def test_a_dead_one_is_started_again_where_nobody_takes_it_for_the_one_that_had_weights(
    up: Up,
) -> None:
    started = up()
    before = told(started)
    turn(started)
    assert len(started.supervisor.ordered) == 2, "both are well"
    started.supervisor.die("student-1")
    turn(started)
    (again,) = started.supervisor.ordered[2:]
    assert again.name == "student-1"
    assert told(started).endpoints == (before.endpoints[0], f"http://127.0.0.1:{again.ports[0]}")
    assert told(started).endpoints[1] != before.endpoints[1]
    assert started.session.restarts == {"student-1": 1}
    assert started.session.loading == set()


def test_one_that_dies_too_often_is_given_up_and_the_last_one_ends_the_run(
    up: Up, caplog: pytest.LogCaptureFixture
) -> None:
    started = up(*TWO, "sampling.server={max_restarts: 1}")
    limit = r"student server 0 .* \(sampling.server.max_restarts\)"
    watch = ServerWatch(started.session)
    try:
        for _ in range(2):
            started.supervisor.die("student-0")
            watch.turn(lambda: None)
        assert re.search(limit, caplog.text)
        watch.turn(lambda: None)
        turn(started)  # of another job
        revive_samplers(started.session)
        assert caplog.text.count("student server 0 is given up; 1 others sample") == 1
        assert len(started.supervisor.ordered) == 3, "nobody looks at it any more"
        started.supervisor.die("student-1")
        watch.turn(lambda: None)
        started.supervisor.die("student-1")
        with pytest.raises(ServingError, match=r"student server 1 .*max_restarts"):
            watch.turn(lambda: None)
    finally:
        watch.close()


def test_one_that_does_not_come_up_in_time_is_stopped_and_the_other_samples(up: Up) -> None:
    started = up(*TWO, "sampling.server={startup_limit_s: 0.1}")
    started.supervisor.die("student-0")
    started.supervisor.silent.add("student-0")
    turn(started)
    assert started.session.given_up == {"student-0"}
    assert started.supervisor.stopped == ["student-0"] * 3, "it died, was replaced, was given up"


def test_the_death_of_something_else_is_not_a_servers(up: Up) -> None:
    def still_alive() -> None:
        raise ServingError("Ray has died")

    started = up()
    started.supervisor.die("student-0")
    watch = ServerWatch(started.session)
    try:
        with pytest.raises(ServingError, match="Ray has died"):
            watch.turn(still_alive)
    finally:
        watch.close()
    assert started.session.given_up == set()


@pytest.mark.parametrize(("engine", "asked"), [("sglang", False), ("lmdeploy", True)])
def test_only_a_server_whose_health_is_not_a_sample_is_asked_for_it_meanwhile(
    up: Up, engine: str, asked: bool
) -> None:
    started = up(f"sampling.engine={engine}")
    watch = ServerWatch(started.session)
    try:
        threads = {thread.name for thread in threading.enumerate()}
    finally:
        watch.close()
    assert (f"health {told(started).endpoints[0]}" in threads) == asked


def test_between_two_jobs_what_does_not_answer_is_started_again_whatever_its_limit(
    up: Up,
) -> None:
    started = up(*TWO, "sampling.server={max_restarts: 0}")
    revive_samplers(started.session)
    assert len(started.supervisor.ordered) == 2
    started.supervisor.stop("student-0")  # it lives, and does not answer
    started.supervisor.die("student-1")
    revive_samplers(started.session, probe_s=0.1)
    assert [spec.name for spec in started.supervisor.ordered[2:]] == ["student-0", "student-1"]
    assert started.session.restarts == {}


def test_one_that_still_loads_when_its_job_ends_is_waited_for(up: Up) -> None:
    class JobEnded(Exception):
        pass

    def ended() -> None:
        raise JobEnded

    started = up()
    started.supervisor.die("student-0")
    started.supervisor.silent.add("student-0")
    watch = ServerWatch(started.session)
    with pytest.raises(JobEnded):
        watch.turn(ended)
    watch.close()
    ready = threading.Timer(1.0, started.supervisor.speak, ["student-0"])
    ready.start()
    revive_samplers(started.session, probe_s=0.1)
    ready.join()
    assert len(started.supervisor.ordered) == 3, "it was not started once more"
    assert started.session.loading == set()
