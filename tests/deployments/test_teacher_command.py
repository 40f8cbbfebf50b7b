"""``opd teacher``: what it prints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.teachers import app
from opd_core.recipe import find_recipe, load_recipe
from opd_core.serving.kept.record import KeptOrder, KeptTeacher
from tests.opd_core.serving.kept_standin import an_order, said_to_serve

ENDPOINTS = ("http://127.0.0.1:7", "http://127.0.0.1:8")


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def run(*arguments: str) -> str:
    """The output of ``opd teacher …``."""
    done = CliRunner(env={"COLUMNS": "400", "NO_COLOR": "1"}).invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


def order_of_tiny(folder: Path, *changes: str) -> KeptOrder:
    """An order to keep the teacher of the recipe tiny."""
    opd = load_recipe(find_recipe("tiny"), changes).opd
    assert opd is not None
    return replace(an_order(folder), teacher=opd.teachers[0])


def test_up_says_how_a_run_and_the_form_use_it_with_its_key(tmp_path: Path) -> None:
    key = "opd.teachers.0.api_key=env:KEPT_KEY"
    kept = KeptTeacher.named("kept")
    with said_to_serve(kept, order_of_tiny(tmp_path, key), ENDPOINTS[0]):
        said = run("up", "tiny", "--name", "kept", "--set", key)
    assert f"opd run tiny --set opd.teachers.0.endpoint={ENDPOINTS[0]}" in said
    assert f"--set {key}" in said
    assert f"teacher_endpoint  {ENDPOINTS[0]}" in said
    assert said.split()[-2:] == ["teacher_api_key", "env:KEPT_KEY"]


def test_up_names_no_key_where_there_is_none(tmp_path: Path) -> None:
    with said_to_serve(KeptTeacher.named("kept"), order_of_tiny(tmp_path), ENDPOINTS[0]):
        said = run("up", "tiny", "--name", "kept")
    assert "api_key" not in said


def test_up_says_how_a_run_and_the_form_use_all_replicas(tmp_path: Path) -> None:
    server = "{backend: embedded, launch: {model: assets/tiny/teacher}}"
    changes = (
        "opd.teachers.0.launch=null",
        "opd.teachers.0.backend=sglang",
        f"opd.teachers.0.replicas=[{server}, {server}]",
        "opd.teachers.0.api_key=env:KEPT_KEY",
    )
    flags = [part for change in changes for part in ("--set", change)]
    with said_to_serve(KeptTeacher.named("kept"), order_of_tiny(tmp_path, *changes), *ENDPOINTS):
        said = run("up", "tiny", "--name", "kept", *flags)
    form = said.splitlines()[-1]
    assert form.startswith("in Prefect's form:  overrides  opd.teachers.0.replicas=")
    assert all(endpoint in form for endpoint in ENDPOINTS)
    assert "opd.teachers.0.api_key=env:KEPT_KEY" in form
    assert "teacher_endpoint" not in said


def test_one_that_cannot_be_read_is_a_line_among_the_others(tmp_path: Path) -> None:
    order = an_order(tmp_path)
    with (
        said_to_serve(KeptTeacher.named("broken"), order, ENDPOINTS[0]),
        said_to_serve(KeptTeacher.named("whole"), order, ENDPOINTS[1]),
    ):
        (KeptTeacher.named("broken").folder / "order.json").write_text('{"recipe": 1}')
        told = json.loads(run("list", "--json"))
        table = run("list")
    assert [(each["name"], each["state"]) for each in told] == [
        ("broken", "unreadable"),
        ("whole", "ready"),
    ]
    assert "order.json cannot be read" in told[0]["said"]
    assert "broken" in table
    assert ENDPOINTS[1] in table
