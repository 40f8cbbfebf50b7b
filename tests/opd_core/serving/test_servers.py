"""The servers that a run starts: who they are, and how those that sample the student are
launched."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from opd_core.config import ExperimentConfig, OPDConfig
from opd_core.serving.servers import SamplingRole, student_servers, teacher_servers


def config(
    engine: str = "sglang", student: dict[str, Any] | None = None, **sampling: Any
) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "name": "test",
            "student": {"model": "/models/student", **(student or {})},
            "data": {"train": "/d.jsonl", "max_prompt_tokens": 100},
            "sampling": {"max_new_tokens": 200, "engine": engine, "max_rows": 5, **sampling},
            "opd": {
                "teachers": [{"name": "t", "endpoint": "http://127.0.0.1:1"}],
                "default_teacher": "t",
            },
            "training": {"steps": 1, "prompts_per_step": 1, "learning_rate": 1e-6},
        }
    )


def devices(given: ExperimentConfig) -> list[tuple[str, ...]]:
    return [server.launch.devices for server in student_servers(given)]


def test_actors_that_sample_need_no_server() -> None:
    assert student_servers(config("transformers")) == ()


def test_a_server_of_the_student_is_known_by_its_number() -> None:
    first, second = student_servers(config(actors=2))
    assert [(server.child, server.kind) for server in (first, second)] == [
        ("student-0", "student"),
        ("student-1", "student"),
    ]
    assert (second.who, second.settings) == ("student server 1", "sampling.server")
    assert first.sampling == SamplingRole(max_rows=5, shares_devices=False)


def test_on_a_cpu_all_of_them_have_it() -> None:
    assert devices(config(actors=2)) == [("cpu",), ("cpu",)]
    assert devices(config(actors=2, student={"devices": ["cpu:0"]})) == [("cpu",), ("cpu",)]


def test_each_gets_its_part_of_their_own_devices() -> None:
    given = config(
        actors=2,
        student={"devices": ["0", "1", "2", "3", "4", "5"]},
        devices=["2", "3", "4", "5"],
        server={"tp_size": 2},
    )
    assert devices(given) == [("2", "3"), ("4", "5")]
    assert not any(server.sampling.shares_devices for server in student_servers(given))  # type: ignore[union-attr]


def test_without_devices_of_their_own_they_share_the_students() -> None:
    server = {"memory_fraction": 0.4}
    given = config(actors=2, student={"devices": ["6", "7"]}, server=server)
    assert devices(given) == [("6",), ("7",)]
    assert all(server.sampling.shares_devices for server in student_servers(given))  # type: ignore[union-attr]
    with pytest.raises(ValidationError, match="2 GPUs are too few for 3 servers of 1"):
        config(actors=3, student={"devices": ["6", "7"]})


@pytest.mark.parametrize(
    ("engine", "trained", "served"),
    [
        ("sglang", "float32", "float32"),
        ("sglang", "bfloat16", "bfloat16"),
        ("lmdeploy", "float32", "bfloat16"),
        ("lmdeploy", "bfloat16", "bfloat16"),
    ],
)
def test_they_serve_the_student_as_it_trains(engine: str, trained: str, served: str) -> None:
    (server,) = student_servers(config(engine, student={"dtype": trained}))
    assert (server.backend, server.launch.model) == (engine, "/models/student")
    assert server.launch.dtype == served
    (server,) = student_servers(config(engine, server={"dtype": "float16"}))
    assert server.launch.dtype == "float16"


@pytest.mark.parametrize(("engine", "margin"), [("sglang", 7), ("lmdeploy", 1)])
def test_their_context_is_what_a_rollout_needs(engine: str, margin: int) -> None:
    (server,) = student_servers(config(engine))
    assert server.launch.context_length == 100 + 200 + margin
    (server,) = student_servers(config(engine, server={"context_length": 999}))
    assert server.launch.context_length == 999


def test_what_a_recipe_says_of_them_reaches_each() -> None:
    given = {"python": "/venv/bin/python", "max_restarts": 9, "env": {"A": "b"}}
    for server in student_servers(config(actors=2, server=given)):
        launch = server.launch
        assert (launch.python, launch.max_restarts, launch.env) == tuple(given.values())


def test_teachers_servers_are_those_that_the_run_launches() -> None:
    model = {"model": "/models/t"}
    replicas = [
        {"backend": "embedded", "launch": {**model, "port": 5}},
        {"endpoint": "http://127.0.0.1:1"},
        {"backend": "lmdeploy", "endpoint": "http://127.0.0.1:7", "launch": model},
    ]
    opd = OPDConfig.model_validate(
        {"teachers": [{"name": "t", "replicas": replicas}], "default_teacher": "t"}
    )
    first, third = teacher_servers(opd)
    assert (first.child, first.who, first.port) == ("teacher-t", "teacher 't'", 5)
    assert (third.child, third.who, third.port) == ("teacher-t-2", "teacher 't' replica 2", 7)
    assert [server.kind for server in (first, third)] == ["teacher", "teacher"]
    assert third.endpoint == "http://127.0.0.1:7"
    assert teacher_servers(None) == ()
