"""Names of task runs say what happens, to whom and where."""

from __future__ import annotations

from tasks.cluster import start_cluster
from tasks.names import (
    awaiting_samplers,
    awaiting_teachers,
    starting_cluster,
    starting_samplers,
    starting_teachers,
    training,
)
from tests.tasks.fake_session import MakeSession

NAMES = (
    *(starting_cluster, starting_teachers, starting_samplers),
    *(awaiting_teachers, awaiting_samplers, training),
)
REPLICA = "{launch: {model: m, devices: [cpu]}, backend: embedded}"


def test_the_tiny_run_is_told_stage_by_stage(make_session: MakeSession) -> None:
    session = make_session("training.steps=60").session
    assert [name(session) for name in NAMES] == [
        "start a private Ray head",
        "start teacher 'teacher': embedded on cpu",
        "no student server to start: actors sample",
        "wait until teacher 'teacher' scores",
        "no student server to wait for",
        "train tiny for 60 steps on cpu",
    ]


def test_an_external_teacher_a_cluster_and_no_teacher_are_told(make_session: MakeSession) -> None:
    session = make_session(
        "opd.teachers.0.endpoint=http://host:1",
        "opd.teachers.0.launch=null",
        "ray.address=http://head:8265",
    ).session
    assert starting_teachers(session) == "no teacher to start: they run already"
    assert starting_cluster(session) == "use the Ray cluster at http://head:8265"
    session = make_session("opd=null", "task.group_size=2").session
    assert starting_teachers(session) == "no teacher to start"
    assert awaiting_teachers(session) == "no teacher to wait for"


def test_a_long_list_of_replicas_is_cut(make_session: MakeSession) -> None:
    replicas = ", ".join([REPLICA] * 5)
    session = make_session(
        f"opd.teachers.0={{name: teacher, replicas: [{replicas}]}}", "opd.score_store=null"
    ).session
    assert starting_teachers(session) == (
        "start teacher 'teacher': embedded on cpu; teacher 'teacher' replica 1: embedded on cpu; "
        "teacher 'teacher' replica 2: embedded on cpu and 2 more"
    )


def test_prefect_takes_them_from_the_tasks_parameters(make_session: MakeSession) -> None:
    named = start_cluster.task_run_name
    assert callable(named)
    given = {"session": make_session().session}
    assert named(parameters=given) == "start a private Ray head"  # type: ignore[call-arg]
