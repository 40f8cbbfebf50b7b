"""Secrets are found where a recipe says that they are, and each that lacks is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from opd_core.config import OPDTeacherConfig
from opd_core.errors import ConfigError, PreflightError
from opd_core.recipe import load_recipe
from opd_core.serving.servers import run_servers
from tasks.secrets import find_secrets, missing_secrets, references, resolve_key

RECIPE = Path("deployments/recipes/tiny.yaml")
SECRET = "not-to-be-seen"


def teacher(key: str | None) -> OPDTeacherConfig:
    secret = None if key is None else SecretStr(key)
    return OPDTeacherConfig(name="t", endpoint="http://127.0.0.1:1", api_key=secret)


def test_no_reference_is_no_key() -> None:
    assert resolve_key(teacher(None)) is None


def test_a_plain_key_from_python_is_itself() -> None:
    assert resolve_key(teacher("s3cret")) == "s3cret"


def test_a_key_is_read_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", SECRET)
    assert resolve_key(teacher("env:SOME_KEY")) == SECRET


@pytest.mark.parametrize("value", [None, ""])
def test_a_key_that_is_not_there_is_named(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SOME_KEY", value)
    with pytest.raises(PreflightError, match=r"teacher 't': api_key 'env:SOME_KEY': .* not set"):
        resolve_key(teacher("env:SOME_KEY"))


def test_a_key_that_no_header_can_carry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", f"{SECRET}\n")
    with pytest.raises(ConfigError, match="line break") as caught:
        resolve_key(teacher("env:SOME_KEY"))
    assert SECRET not in str(caught.value)


def test_a_run_needs_its_keys_and_what_its_servers_environments_refer_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_recipe(
        RECIPE,
        [
            "opd.teachers.0.api_key=env:SOME_KEY",
            "opd.teachers.0.launch.env={HF_TOKEN: env:SOME_TOKEN, LEVEL: 3, X: block:there}",
        ],
    )
    launch = "teacher 'teacher': launch.env"
    assert references(config) == (
        ("teacher 'teacher': api_key", "env:SOME_KEY"),
        (f"{launch}.HF_TOKEN", "env:SOME_TOKEN"),
        (f"{launch}.X", "block:there"),
    )
    monkeypatch.delenv("SOME_KEY", raising=False)
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    (problem,) = missing_secrets(config, in_blocks=False)
    assert "SOME_KEY is not set" in problem


def test_what_environments_refer_to_is_found_by_its_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_recipe(RECIPE, ["opd.teachers.0.launch.env={HF_TOKEN: env:SOME_TOKEN, LEVEL: 3}"])
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    assert find_secrets(run_servers(config)) == {"env:SOME_TOKEN": SECRET}
    monkeypatch.delenv("SOME_TOKEN")
    with pytest.raises(PreflightError, match=r"launch\.env\.HF_TOKEN 'env:SOME_TOKEN'"):
        find_secrets(run_servers(config))
