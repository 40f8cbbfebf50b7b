"""The run directory, and everything that is checked before anything starts."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.context import get_run_context
from prefect.exceptions import MissingContextError
from pydantic import SecretStr

from opd_core.config import ExperimentConfig, OPDTeacherConfig
from opd_core.errors import PreflightError
from opd_core.preflight import PairCard, PreflightReport, run_preflight
from opd_core.scoring.asking import checked_key
from opd_core.training.files import CONFIG_FILE
from opd_core.whole_file import write_whole
from tasks.cards import card_table, cards_markdown, summary_line, write_cards
from tasks.console import CONSOLE, TERMINAL, announce, logger, warn

LOGS = "logs"
PAIR_CHECK_KEY = "pair-check"
"""Prefect's key of the artifact with the cards."""


@dataclass(frozen=True)
class RunRecord:
    """One run: what it does and where everything of it lies."""

    run_id: str
    directory: Path
    config: ExperimentConfig

    def log(self, name: str) -> Path:
        """The log file of one of its processes."""
        return self.directory / LOGS / f"{name}.log"


@task(name="open run directory", cache_policy=NO_CACHE)
def open_run(config: ExperimentConfig, cards: Sequence[PairCard] = ()) -> RunRecord:
    """Create ``<root>/<name>-<id>/`` with the resolved recipe and the pair check cards in it."""
    run_id = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    directory = config.run.root_dir / run_id
    (directory / LOGS).mkdir(parents=True)
    run = RunRecord(run_id, directory, config)
    write_config(run)
    write_cards(directory, cards)
    return run


def write_config(run: RunRecord) -> None:
    """Write the resolved recipe: what was run, every default spelled out, no key in it."""
    text = json.dumps(run.config.resolved(), indent=2)
    write_whole(run.directory / CONFIG_FILE, text)


@task(name="check environment", cache_policy=NO_CACHE)
def check_environment(config: ExperimentConfig) -> PreflightReport:
    """All checks; raises :class:`~opd_core.errors.PreflightError` with every problem found."""
    started = time.perf_counter()
    report = run_preflight(config)
    for teacher in config.opd.teachers if config.opd else ():
        try:
            resolve_key(teacher)
        except PreflightError as error:
            report.problems.append(str(error))
    show_cards(report)
    for warning in report.warnings:
        warn(warning)
    report.raise_problems()
    rows = sum(report.data_sources.values())
    report.seconds = time.perf_counter() - started
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


def resolve_key(teacher: OPDTeacherConfig) -> str | None:
    """The teacher's API key from where its reference says it is kept.

    Raises :class:`PreflightError` if it is not there, :class:`~opd_core.errors.ConfigError` if no
    HTTP header can carry it.
    """
    if teacher.api_key is None:
        return None
    return checked_key(teacher.name, _find_key(teacher, teacher.api_key))


def _find_key(teacher: OPDTeacherConfig, api_key: SecretStr) -> str:
    reference = api_key.get_secret_value()
    kind, _, name = reference.partition(":")
    who = f"teacher {teacher.name!r}: api_key {reference!r}"
    if kind == "env":
        if not os.environ.get(name):
            raise PreflightError(f"{who}: the environment variable {name} is not set, or empty")
        return os.environ[name]
    if kind == "block":
        from prefect.blocks.system import Secret

        try:
            key = str(Secret.load(name).get())  # type: ignore[union-attr]
        except ValueError as error:
            raise PreflightError(f"{who}: no such Prefect Secret block ({error})") from None
        if not key:
            raise PreflightError(f"{who}: the Prefect Secret block {name} is empty")
        return key
    return reference
