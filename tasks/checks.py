"""Everything that is checked before anything starts. What depends on files alone is checked once,
and again when a file, a setting or the code has changed, or after ``REUSED_FOR``."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.context import get_run_context
from prefect.exceptions import MissingContextError
from pydantic import TypeAdapter, ValidationError

from opd_core import preflight
from opd_core.config import ExperimentConfig
from opd_core.preflight import PreflightReport
from tasks.cards import card_table, cards_markdown, summary_line
from tasks.console import CONSOLE, TERMINAL, announce, logger, warn
from tasks.secrets import missing_secrets

PAIR_CHECK_KEY = "pair-check"
"""Prefect's key of the artifact with the cards."""
KEPT_CHECKS = ".checks"
"""Folder of the run root with what was found of files."""
REUSED_FOR = timedelta(hours=12)
REPORT = TypeAdapter(PreflightReport)


def check_files(config: ExperimentConfig) -> PreflightReport:
    """Models and data, or what an earlier run under this root found of the very same ones. A report
    with problems is never kept."""
    started = time.perf_counter()
    folder, key = config.run.root_dir.absolute() / KEPT_CHECKS, preflight.files_key(config)
    _clear(folder)
    check = check_models_and_data.with_options(
        result_storage=folder, cache_key_fn=lambda *_: key, cache_expiration=REUSED_FOR
    )
    report, known = _ask(check, config)
    if report is None:  # the file was changed by somebody
        (folder / key).unlink(missing_ok=True)
        report, known = _ask(check, config)
    assert report is not None, "it was made just now"
    if known:
        announce("models and data are as they were when they were last checked")
    if report.problems:
        (folder / key).unlink(missing_ok=True)
    report.seconds = time.perf_counter() - started
    return report


@task(name="check models and data", result_serializer="json", cache_result_in_memory=False)
def check_models_and_data(config: ExperimentConfig) -> str:
    """What the files say, as JSON."""
    return REPORT.dump_json(preflight.check_files(config)).decode()


@task(name="check environment", cache_policy=NO_CACHE)
def check_environment(config: ExperimentConfig, report: PreflightReport) -> PreflightReport:
    """What may be another thing now than a minute ago, and the verdict on all of it; ``report`` is
    that of :func:`check_files`.

    Raises :class:`~opd_core.errors.PreflightError` with every problem found.
    """
    started = time.perf_counter()
    preflight.check_machine(config, report)
    report.problems += missing_secrets(config)
    show_cards(report)
    for warning in report.warnings:
        warn(warning)
    report.raise_problems()
    rows = sum(report.data_sources.values())
    report.seconds += time.perf_counter() - started
    announce(f"checked models, data ({rows} rows), ports in {report.seconds:.1f} s")
    return report


def show_cards(
    report: PreflightReport, create_artifact: Callable[..., Any] = create_markdown_artifact
) -> None:
    """A line for each pair that fits, else its table; in a Prefect run also an artifact."""
    for card in report.cards:
        if card.ok:
            announce(summary_line(card))
        elif TERMINAL.lines:
            CONSOLE.print(card_table(card))
    if not report.cards:
        return
    try:
        get_run_context()
        create_artifact(cards_markdown(report.cards), PAIR_CHECK_KEY, "Pair check")
    except MissingContextError:
        return  # not in a Prefect run
    except Exception as error:  # Prefect's API may be away; the files tell the same
        logger().warning(f"the pair check could not be kept as an artifact: {error}")


def _ask(check: Any, config: ExperimentConfig) -> tuple[PreflightReport | None, bool]:
    """The report, None where what was kept is none; and whether it was kept."""
    state = check(config, return_state=True)
    try:
        return REPORT.validate_json(state.result()), state.name == "Cached"
    except ValidationError:
        return None, True


def _clear(folder: Path) -> None:
    """Remove what is too old to be used."""
    oldest = time.time() - REUSED_FOR.total_seconds()
    with suppress(OSError):
        for file in folder.iterdir():
            if file.stat().st_mtime < oldest:
                file.unlink()
