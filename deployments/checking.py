"""``opd check``: all checks of a recipe and the cards of its pairs. Starts nothing.

Prefect is not imported.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from opd_core.config import ExperimentConfig
from opd_core.preflight import PreflightReport, run_preflight
from opd_core.recipe import load_recipe
from tasks.cards import card_table
from tasks.secrets import missing_secrets, references


def check(path: Path, overrides: list[str], *, as_json: bool) -> bool:
    """Check a recipe and show what was found; True where a run would start.

    Raises :class:`~opd_core.errors.ConfigError`.
    """
    config = load_recipe(path, overrides)
    report = run_preflight(config)
    report.problems += missing_secrets(config, in_blocks=False)
    report.warnings += [
        f"{where} {reference!r}: a Prefect block, which is looked up when the run starts"
        for where, reference in references(config)
        if reference.startswith("block:")
    ]
    if as_json:
        typer.echo(json.dumps(_as_record(config, report)))
    else:
        _show(report)
    return not report.problems


def _show(report: PreflightReport) -> None:
    console = Console(highlight=False)
    for card in report.cards:
        console.print(card_table(card))
    for problem in report.problems:
        console.print(Text(f"problem: {problem}", "red"), soft_wrap=True)
    for warning in report.warnings:
        console.print(Text(f"warning: {warning}", "yellow"), soft_wrap=True)
    if not report.problems:
        console.print(f"a run would start ({sum(report.data_sources.values())} rows of data)")


def _as_record(config: ExperimentConfig, report: PreflightReport) -> dict[str, object]:
    return {
        "name": config.name,
        "ok": not report.problems,
        "problems": report.problems,
        "warnings": report.warnings,
        "cards": [asdict(card) for card in report.cards],
    }
