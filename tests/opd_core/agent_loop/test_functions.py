"""A user's function is found by its name, or the error says why not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opd_core.agent_loop.functions import import_function
from opd_core.errors import ConfigError


@pytest.fixture(autouse=True)
def _modules_are_importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_module.py").write_text("not_a_function = 7\n")
    (tmp_path / "broken_module.py").write_text("def (:\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_function_is_found_by_its_name() -> None:
    assert import_function("os.path:join") is os.path.join


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_module:f", "ModuleNotFoundError"),
        ("os.path:no_such_name", "no_such_name"),
        ("broken_module:f", "SyntaxError"),
        (":f", "cannot be imported"),
        ("some_module:not_a_function", "is 7, not a function"),
    ],
)
def test_a_name_that_names_no_function_is_a_config_error(path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{path}: .*{said}"):
        import_function(path)
