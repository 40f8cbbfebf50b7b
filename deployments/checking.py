"""``opd check``: all checks of a recipe and the cards of its pairs. Starts nothing.

Prefect is not imported, unless a teacher's key has to be looked for.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from opd_core.config import ExperimentConfig
from opd_core.errors import PreflightError
from opd_core.preflight import PreflightReport, run_preflight
from opd_core.recipe import load_recipe
from tasks.cards import card_table


def check(path: Path, overrides: list[str], *, as_json: bool) -> bool:
    """Check a recipe and show what was found; True where a run would start.

    Raises :class:`~opd_core.errors.ConfigError`.
    """
    config = load_recipe(path, overrides)
    report = run_preflight(config)
    _check_keys(config, report)
    if as_json:
        typer.echo(json.dumps(_as_record(config, report)))
    else:
        _show(report)
    return not report.problems


def _check_keys(config: ExperimentConfig, report: PreflightReport) -> None:
    for teacher in config.opd.teachers if config.opd else ():
        if teacher.api_key is None:
            continue
        if teacher.api_key.get_secret_value().startswith("block:"):
            report.warnings.append(
                f"teacher {teacher.name!r}: its key is in a Prefect block, which is looked up when "
                "the run starts"
            )
            continue
        from tasks.environment import resolve_key

        try:
            resolve_key(teacher)
        except PreflightError as error:
            report.problems.append(str(error))


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
