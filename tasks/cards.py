"""The pair check cards as a person reads them: terminal, markdown, files of the run directory.

Nothing here imports Prefect: ``opd check`` shows the cards without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from opd_core.preflight import PairCard
from opd_core.whole_file import write_whole

PAIR_CHECK = "pair_check"
"""Name of the two files in the run directory, ``.md`` and ``.json``."""
STYLES = {"ok": "green", "warning": "yellow", "error": "red", "unknown": "cyan"}
DIFF_STYLES = {"-": "red", "+": "green", "@": "cyan"}


def summary_line(card: PairCard) -> str:
    """The card of a pair that fits, in one line."""
    return f"{card.teacher} fits the student: {', '.join(row.item for row in card.rows)}"


def card_table(card: PairCard) -> Group:
    """What was found, for the terminal; the advice is told as problems and warnings."""
    table = Table(title=f"student against {card.teacher}", title_justify="left")
    for title in ("item", "student", "teacher", "level"):
        table.add_column(title, overflow="fold")
    for row in card.rows:
        level = Text(row.level, STYLES[row.level])
        table.add_row(*map(Text, (row.item, row.student, row.teacher)), level)
    diff = [Text(line, DIFF_STYLES.get(line[0], "")) for line in card.rendering_diff.splitlines()]
    return Group(table, *diff)


def to_markdown(card: PairCard) -> str:
    """The whole card: table with advice, and the difference of the prompts as a diff block."""
    lines = [
        f"## Student against {_escaped(card.teacher)}",
        "",
        "| item | student | teacher | level | what to do |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in card.rows:
        cells = (row.item, row.student, row.teacher, row.level, row.advice)
        lines.append(f"| {' | '.join(map(_escaped, cells))} |")
    if card.rendering_diff:
        runs = re.findall("`{3,}", card.rendering_diff)
        fence = "`" * max(3, *(len(run) + 1 for run in runs), 0)
        lines += ["", "The prompt as both render it:", "", f"{fence}diff"]
        lines += [card.rendering_diff, fence]
    return "\n".join(lines) + "\n"


def cards_markdown(cards: Sequence[PairCard]) -> str:
    """All cards of a run."""
    return "\n".join(to_markdown(card) for card in cards)


def write_cards(directory: Path, cards: Sequence[PairCard]) -> None:
    """Write the cards into a run directory, to read and to parse. Raises OSError."""
    if cards:
        data = json.dumps([asdict(card) for card in cards], indent=2, ensure_ascii=False)
        write_whole(directory / f"{PAIR_CHECK}.md", cards_markdown(cards))
        write_whole(directory / f"{PAIR_CHECK}.json", data + "\n")


def _escaped(text: str) -> str:
    """Text as it stands, in a cell of a markdown table."""
    return re.sub(r"([\\|<>`*\[\]])", r"\\\1", text).replace("\n", " ")
