"""A server's order to the supervisor: its name, its key, how it ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from opd_core.config import Backend, LaunchConfig
from opd_core.errors import ServingError
from opd_core.lifecycle.records import ChildSpec
from opd_core.serving.child import NO_SECRETS, server_child
from opd_core.serving.servers import SamplingRole, Server

KEY = "sk-not-to-be-seen"


def child(
    backend: Backend = "sglang", number: int = 0, key: str | None = None, **launch: Any
) -> ChildSpec:
    return order(Server("maths", number, backend, LaunchConfig(model="/models/m", **launch)), key)


def order(
    server: Server, key: str | None = None, secrets: Mapping[str, str] = NO_SECRETS
) -> ChildSpec:
    return server_child(
        server,
        port=13141,
        key=key,
        cwd=Path("/runs/one"),
        log=Path("/runs/one/teacher.log"),
        stop_order=7,
        secrets=secrets,
    )


def test_the_first_replica_has_the_teachers_name_and_the_others_a_number() -> None:
    assert child().name == "teacher-maths"
    assert child(number=2).name == "teacher-maths-2"


def test_the_key_stands_in_the_environment_and_nowhere_else() -> None:
    spec = child(key=KEY)
    assert spec.env["OPD_API_KEY"] == KEY
    assert KEY not in " ".join((*spec.argv, *spec.ledger_argv, repr(spec)))
    assert "keyed_launch.py" in spec.argv[1]
    assert "OPD_API_KEY" not in child().env


def test_it_serves_under_the_teachers_name_on_its_port() -> None:
    argv = child().argv
    assert argv[argv.index("--served-model-name") + 1] == "maths"
    assert argv[argv.index("--port") + 1] == "13141"
    assert child().ports == (13141,)
    assert child().ledger_argv == argv


@pytest.mark.parametrize(
    ("backend", "signal", "grace_s"),
    [("sglang", "SIGINT", 30.0), ("lmdeploy", "SIGTERM", 30.0), ("embedded", "SIGTERM", 15.0)],
)
def test_each_server_ends_as_it_likes_to(backend: Backend, signal: str, grace_s: float) -> None:
    spec = child(backend)
    assert (spec.stop_signal, spec.grace_s, spec.stop_order) == (signal, grace_s, 7)


def test_it_runs_where_it_is_told_and_with_its_own_variables() -> None:
    spec = child(env={"LEVEL": "1"})
    assert (spec.kind, spec.cwd, spec.log) == (
        "teacher",
        Path("/runs/one"),
        Path("/runs/one/teacher.log"),
    )
    assert spec.env["LEVEL"] == "1"


def test_what_its_environment_refers_to_is_there_and_not_in_the_ledger() -> None:
    server = Server(
        "maths", 0, "sglang", LaunchConfig(model="/models/m", env={"HF_TOKEN": "block:hf"})
    )
    spec = order(server, secrets={"block:hf": KEY})
    assert spec.env["HF_TOKEN"] == KEY
    assert KEY not in " ".join((*spec.argv, *spec.ledger_argv, repr(spec)))
    with pytest.raises(ServingError, match=r"launch\.env\.HF_TOKEN: block:hf was not looked up"):
        order(server)


def test_one_that_samples_the_student_is_told_so() -> None:
    role = SamplingRole(5, shares_devices=False)
    spec = order(Server(None, 1, "sglang", LaunchConfig(model="/models/m"), sampling=role))
    assert (spec.name, spec.kind) == ("student-1", "student")
    assert spec.argv[spec.argv.index("--served-model-name") + 1] == "student"
    assert spec.argv[spec.argv.index("--max-running-requests") + 1] == "5"
    assert "--max-running-requests" not in child().argv
