"""The table of servers says of each how it is."""

from __future__ import annotations

from dataclasses import replace

from opd_core.scoring.facts import Canary, TeacherFacts
from opd_core.scoring.state import ReplicaState, ScoringState
from tasks.health import health_rows
from tasks.samplers import start_samplers
from tasks.teacher import start_teachers
from tests.tasks.fake_session import MakeSession

PROVEN = TeacherFacts(64, canaries=(Canary((1, 2, 3), ((-1.0, -1.0),)),))


def state(**seen: object) -> dict[str, ScoringState]:
    return {"teacher": ScoringState(1.0, (ReplicaState(**seen),))}  # type: ignore[arg-type]


def test_a_teacher_is_followed_from_its_start_to_its_death(make_session: MakeSession) -> None:
    started = make_session()
    session = started.session

    def row(states: dict[str, ScoringState]) -> dict[str, str]:
        (only,) = health_rows(session, states, None)
        return only

    assert row({})["state"] == "starting"
    start_teachers.fn(session)
    assert (row({})["state"], row({})["served by"]) == ("starting", "embedded on cpu")
    assert row({})["endpoint"] == session.servers["teacher-teacher"].endpoint
    session.teacher_facts["teacher"] = PROVEN
    assert (row({})["state"], row({})["proof"]) == ("proven", "1 known sequence")
    assert row(state(in_flight=3))["state"] == "scoring, 3 under way"
    assert row(state(away="ConnectError"))["state"] == "away: ConnectError"
    session.restarts["teacher-teacher"] = 1
    assert row({})["restarts"] == "1 of 3"
    started.supervisor.die("teacher-teacher")
    assert row(state(in_flight=3))["state"] == "dead"


def test_the_time_of_an_answer_stands_in_milliseconds(make_session: MakeSession) -> None:
    (row,) = health_rows(make_session().session, {}, 0.0423)
    assert row["answer"] == "42 ms"


def test_an_external_teacher_is_nobodys_to_restart(make_session: MakeSession) -> None:
    session = make_session(
        "opd.teachers.0.endpoint=http://host:1", "opd.teachers.0.launch=null"
    ).session
    session.teacher_facts["teacher"] = replace(PROVEN, endpoints=("http://host:1",))
    (row,) = health_rows(session, {}, None)
    assert row["served by"].endswith(", external")
    assert (row["endpoint"], row["restarts"]) == ("http://host:1", "")


def test_the_students_servers_have_their_rows(make_session: MakeSession) -> None:
    started = make_session("opd=null", "task.group_size=2", "sampling.engine=sglang")
    session = started.session
    started.supervisor.silent.add("student-0")
    start_samplers.fn(session)
    (row,) = health_rows(session, {}, None)
    assert (row["server"], row["state"]) == ("student server 0", "samples the student")
    session.loading.add("student-0")
    assert health_rows(session, {}, None)[0]["state"] == "loading"
    session.given_up.add("student-0")
    session.loading.clear()
    assert health_rows(session, {}, None)[0]["state"] == "given up"
