"""The house rules: who imports whom, what a config costs to read, what a file says of itself."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from opd_core.quiet import DEFAULTS, apply_defaults

ROOT = Path(__file__).parent.parent
PACKAGES = ("flows", "tasks", "opd_core", "deployments")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
HEAVY = ("torch", "transformers", "ray", "mlflow", "prefect", "httpx")

# In a process of its own: the linter changes the import path and caches what it has read.
LINT = """
import sys
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports
status = lint_imports(config_filename=sys.argv[1], no_cache=True)
sys.exit(0 if status == EXIT_STATUS_SUCCESS else 1)
"""


def test_the_import_contracts_are_kept() -> None:
    command = [sys.executable, "-c", LINT, str(ROOT / "pyproject.toml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert f"Contracts: {len(contracts['contracts'])} kept, 0 broken." in done.stdout


@pytest.mark.parametrize("module", ["opd_core.config", "opd_core.errors", "opd_core.recipe"])
def test_a_config_is_read_without_any_heavy_library(module: str) -> None:
    listing = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", listing]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert module in loaded
    assert loaded.isdisjoint(HEAVY)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_says_what_it_owns(package: str) -> None:
    modules = [path for path in SOURCES if path.relative_to(ROOT).parts[0] == package]
    assert modules
    silent = [
        str(path.relative_to(ROOT))
        for path in modules
        if (tree := ast.parse(path.read_text(encoding="utf-8"))).body
        and not ast.get_docstring(tree)
    ]
    assert silent == []


def test_an_empty_file_only_marks_a_package() -> None:
    empty = [path for path in SOURCES if not path.read_text(encoding="utf-8").strip()]
    assert {path.name for path in empty} <= {"__init__.py"}


# ------------------------------------------------------------------ nothing phones home


def test_telemetry_is_off_unless_the_user_turned_it_on() -> None:
    environ = {"MLFLOW_DISABLE_TELEMETRY": "false", "HF_HUB_OFFLINE": "0", "OTHER": "x"}
    apply_defaults(environ)
    own = {"MLFLOW_DISABLE_TELEMETRY": "false", "HF_HUB_OFFLINE": "0", "OTHER": "x"}
    assert environ == DEFAULTS | own


def test_the_libraries_that_report_home_are_all_told_not_to() -> None:
    environ: dict[str, str] = {}
    apply_defaults(environ)
    off = {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",
    }
    assert off.items() <= environ.items()
