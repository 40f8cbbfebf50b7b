"""The report of a run: one page, made of what stands in its directory.

What is missing, or cannot be read, costs its own section one line, never the page. Whatever the run
left, the page stays under 5 MB: curves are thinned, long rollouts shortened, long texts cut, each
with a mark that says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from opd_core.analysis.kl_tokens import LEVELS, clipped
from opd_core.analysis.kl_view import KLView, load_kl_view
from opd_core.analysis.page import render
from opd_core.analysis.report_charts import kl_charts, report_charts
from opd_core.analysis.report_facts import (
    TONES,
    attempts_said,
    findings_of,
    groups_of,
    head_facts,
    held_out,
    sinks_of,
    stage_seconds,
    time_shares,
    tracking_said,
)
from opd_core.analysis.run_data import RunData, load_run_data
from opd_core.errors import DataError
from opd_core.lifecycle.receipt_text import receipt_text
from opd_core.lifecycle.records import RECEIPT_FILE, read_receipt
from opd_core.training.files import (
    CONFIG_FILE,
    PROVENANCE_FILE,
    REPORT_FILE,
    SUMMARY_FILE,
    TOKEN_KL_FOLDER,
)
from opd_core.training.links import read_links
from opd_core.whole_file import write_whole

PAIR_CHECK_FILE = "pair_check.json"
MAX_TEXT = 100_000
"""Characters of one text that are shown."""
MAX_ITEMS = 50
"""Cards and attempts that are shown."""
CARD_ROW = ("item", "student", "teacher", "level", "advice")


@dataclass(frozen=True)
class Section:
    """What a section shows, or in a line why it shows nothing."""

    content: Any = None
    missing: str = ""


def write_report(directory: Path) -> Path:
    """Write the report of the run in ``directory`` beside the rest of it; returns where.

    Raises OSError, and as :func:`build_report`.
    """
    path = directory / REPORT_FILE
    write_whole(path, build_report(directory))
    return path


def build_report(directory: Path) -> str:
    """The report of the run in ``directory`` as HTML, at any point of the run's life.

    Raises :class:`~opd_core.errors.ConfigError` for what is no run directory, and
    :class:`~opd_core.errors.DataError` where its history is no such thing.
    """
    unreadable: dict[str, str] = {}
    run = load_run_data(directory, unreadable)
    summary, kl = run.summary, _kl(run)
    page = render(
        "report.html",
        title=f"{run.run_id}: run report",
        run=run,
        unreadable=unreadable,
        summary=summary,
        status=summary.get("status", "not ended"),
        tone=TONES.get(str(summary.get("status")), "bad" if summary else "note"),
        pages=_pages(directory),
        error=clipped(str(summary.get("error") or ""), MAX_TEXT),
        facts=_made(SUMMARY_FILE, lambda: head_facts(run)),
        findings=_findings(run),
        charts=report_charts(run.series),
        held_out=held_out(run.evaluations),
        kl=kl,
        kl_charts=kl_charts(kl.content) if kl.content else [],
        levels=LEVELS,
        cards=_pair_cards(run),
        survivors=clipped(str(summary.get("survivors") or ""), MAX_TEXT),
        groups=_made(SUMMARY_FILE, lambda: groups_of(summary)),
        shares=time_shares(run),
        stages=_made(SUMMARY_FILE, lambda: stage_seconds(run)),
        tracking=_made(SUMMARY_FILE, lambda: sinks_of(summary)),
        tracking_said=tracking_said(run),
        receipt=_receipt(directory),
        settings=clipped(yaml.safe_dump(run.config, sort_keys=False), MAX_TEXT),
        attempts=_made(PROVENANCE_FILE, lambda: attempts_said(run.provenance)[-MAX_ITEMS:]),
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # halves of surrogate pairs


def _pages(directory: Path) -> dict[str, str]:
    """Where else the run is shown, by name."""
    pages = read_links(directory).pages.items()
    return {name: url for name, url in pages if url.startswith(("http://", "https://"))}


def _made(file: str, make: Callable[[], Any]) -> Section:
    """What is made of a file's data, which may have any shape."""
    try:
        return Section(make())
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, OSError) as error:
        return Section(missing=f"{file} holds what cannot be shown here: {error}.")


def _findings(run: RunData) -> Section:
    found = _made(f"{SUMMARY_FILE} or {CONFIG_FILE}", lambda: findings_of(run))
    if found.content is None and not found.missing:
        return Section(missing="Nothing looked for known failures in this run.")
    return found


def _without_teacher(run: RunData) -> bool:
    return "opd" in run.config and run.config["opd"] is None


def _kl(run: RunData) -> Section:
    if _without_teacher(run):
        return Section(missing="This run has no teacher (opd: null), so there is no KL to it.")
    try:
        view: KLView | None = load_kl_view(run.directory / TOKEN_KL_FOLDER)
    except DataError as error:
        return Section(missing=str(error))
    if view is None:
        return Section(missing=f"The run directory has no {TOKEN_KL_FOLDER}/: nothing was kept.")
    return Section(view)


def _pair_cards(run: RunData) -> Section:
    if _without_teacher(run):
        return Section(missing="This run has no teacher to check against its student.")
    try:
        cards = json.loads((run.directory / PAIR_CHECK_FILE).read_bytes())
        return Section([_card(card) for card in cards[:MAX_ITEMS]])
    except FileNotFoundError:
        return Section(missing=f"The run directory has no {PAIR_CHECK_FILE}.")
    except (OSError, ValueError, TypeError, KeyError) as error:
        return Section(missing=f"{PAIR_CHECK_FILE} cannot be read: {error}.")


def _card(card: dict[str, Any]) -> dict[str, Any]:
    rows = [{key: clipped(str(row[key]), 2000) for key in CARD_ROW} for row in card["rows"]]
    diff = clipped(str(card.get("rendering_diff") or ""), MAX_TEXT // 5)
    return {"teacher": str(card["teacher"]), "rows": rows[:MAX_ITEMS], "diff": diff}


def _receipt(directory: Path) -> Section:
    try:
        receipt = read_receipt(directory)
    except (OSError, ValueError, TypeError, KeyError) as error:
        return Section(missing=f"{RECEIPT_FILE} cannot be read: {error}.")
    if receipt is None:
        return Section(missing=f"The run directory has no {RECEIPT_FILE}: the run has not ended.")
    return Section(clipped(receipt_text(receipt), MAX_TEXT))
