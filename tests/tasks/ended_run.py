"""A run directory as a killed flow and its supervisor leave it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from opd_core.lifecycle.ledger import LEDGER_FILE, Ledger
from opd_core.lifecycle.records import Receipt, write_receipt
from opd_core.recipe import load_recipe
from opd_core.tracking.journal import Journal
from opd_core.training.attempts import Attempt, RunHistory
from opd_core.training.files import JOURNAL_FILE
from tasks.environment import RunRecord, write_config

RECIPE = Path(__file__).parents[2] / "deployments" / "recipes" / "tiny.yaml"
MakeRun = Callable[..., RunRecord]
"""Makes one with these overrides; ``cause`` is its receipt's, other keywords are a Ray job's."""


def ended_run(root: Path, *overrides: str, cause: str = "owner died", **ray_job: str) -> RunRecord:
    """The run ``tiny-1`` under ``root``, with one evaluation in its journal."""
    directory = root / "tiny-1"
    directory.mkdir()
    config = load_recipe(RECIPE, overrides)
    run = RunRecord("tiny-1", directory, config, RunHistory("tiny-1", (Attempt(1.0),), {}))
    run.history.write(directory)
    write_config(run)
    write_receipt(directory, Receipt("tiny-1", cause, True, 0.5, (), (), (), ()))
    ledger = Ledger.open(directory / LEDGER_FILE, "tiny-1")
    ledger.append("run_started", run_id="tiny-1")
    if ray_job:
        ledger.append("ray_job", **ray_job)
    ledger.append("receipt")
    ledger.close()
    with Journal(directory / JOURNAL_FILE) as journal:
        journal.append(0, {"eval/accuracy": 0.4, "eval/accuracy_stderr": 0.01})
    return run
