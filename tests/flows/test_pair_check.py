"""Inside a real Prefect flow the cards are an artifact, and one that cannot be kept ends no run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

FLOW = """
import sys
from prefect import flow
from opd_core.recipe import load_recipe
from tasks.checks import check_environment, check_files, show_cards

def refuse(*arguments):
    raise RuntimeError("the API is away")

@flow
def checks(overrides: list[str]):
    config = load_recipe("deployments/recipes/tiny.yaml", overrides)
    report = check_environment(config, check_files(config))
    show_cards(report, refuse)

checks([])
print("went on")
checks(["sampling.max_new_tokens=300"])
"""


def artifacts(api: str) -> list[dict[str, Any]]:
    """All that were kept, the newest first."""
    question = {"artifacts": {"key": {"any_": ["pair-check"]}}, "sort": "CREATED_DESC"}
    answer = httpx.post(f"{api}/artifacts/filter", json=question, trust_env=False)
    return list(answer.raise_for_status().json())


def test_a_flow_keeps_its_cards_as_an_artifact_also_when_it_is_refused(
    prefect_api: str, tmp_path: Path
) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, "-c", FLOW],
        cwd=ROOT,
        env=environment | {"PREFECT_HOME": str(tmp_path), "PREFECT_API_URL": prefect_api},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "went on" in done.stdout, done.stderr
    assert "could not be kept as an artifact: the API is away" in done.stderr
    assert "its context of 256 tokens is too short" in done.stderr
    refused, fitting = artifacts(prefect_api)[:2]  # other tests leave theirs
    assert "| 256 of 339 needed | error |" in refused["data"]
    assert "## Student against teacher 'teacher'" in fitting["data"]
    assert "| 256 of 80 needed | 256 of 87 needed | ok |" in fitting["data"]
    assert fitting["flow_run_id"] != refused["flow_run_id"]
