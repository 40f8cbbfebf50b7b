"""The results of the teardown tests, cell by cell, and the tables that the docs show.

    OPD_TEARDOWN_REPORT=runs/teardown.jsonl .venv/bin/python -m pytest tests/teardown
    .venv/bin/python -m tests.teardown.report runs/teardown.jsonl > docs/teardown-matrix.md

One line per cell: {"surface", "ending", "moment", "outcome", "seconds", "limit_s"}. `surface` is
what was ended ("stand-ins", "command line"); `outcome` is "ok", or the reason why the ending means
nothing at this moment, and then the times are 0. A later line of the same cell replaces an earlier.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from deployments.drill.catalogue import MOMENTS

OK = "ok"
VARIABLE = "OPD_TEARDOWN_REPORT"
_DASH = "\N{EN DASH}"


@dataclass(frozen=True)
class Cell:
    """One result. `seconds` passed from the ending until nothing of the run was left."""

    surface: str
    ending: str
    moment: str
    outcome: str
    seconds: float
    limit_s: float


def record(
    surface: str, ending: str, moment: str, seconds: float, limit_s: float, outcome: str = OK
) -> None:
    """Add one cell to the report, if the environment names one."""
    if path := os.environ.get(VARIABLE):
        cell = Cell(surface, ending, moment, outcome, round(seconds, 2), limit_s)
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(cell)) + "\n")


def read(paths: Iterable[Path]) -> tuple[Cell, ...]:
    """Return the cells of these reports, the latest of each, in the order of their first lines."""
    lines = (line for path in paths for line in path.read_text(encoding="utf-8").splitlines())
    cells = (Cell(**json.loads(line)) for line in lines)
    return tuple({(cell.surface, cell.ending, cell.moment): cell for cell in cells}.values())


def table(cells: Sequence[Cell]) -> str:
    """Return one surface's cells: a row per ending, a column per moment, then the reasons."""
    played = {cell.moment for cell in cells}
    moments = [moment.name for moment in MOMENTS if moment.name in played]
    reasons = list(dict.fromkeys(cell.outcome for cell in cells if cell.outcome != OK))
    by_place = {(cell.ending, cell.moment): cell for cell in cells}
    rows = [["ending", *moments, "limit"], ["---", *["---:"] * (len(moments) + 1)]]
    for ending in dict.fromkeys(cell.ending for cell in cells):
        row = [by_place.get((ending, moment)) for moment in moments]
        limit_s = max(cell.limit_s for cell in row if cell is not None)
        rows.append([ending, *(_show(cell, reasons) for cell in row), f"{limit_s:.0f}"])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    notes = [f"- {_DASH}{number}: {reason}" for number, reason in enumerate(reasons, start=1)]
    return "\n".join([*lines, "", *notes, ""] if notes else [*lines, ""])


def _show(cell: Cell | None, reasons: Sequence[str]) -> str:
    if cell is None:
        return ""
    return (
        f"{cell.seconds:.1f}" if cell.outcome == OK else f"{_DASH}{reasons.index(cell.outcome) + 1}"
    )


def page(cells: Sequence[Cell]) -> str:
    """Return the page of the docs."""
    parts = [
        "# Whatever ends a run: how long until nothing of it is left",
        "Seconds from the ending until no process, port, scratch folder, device lock or entry of "
        "the run was left (limit: the most that the test allows). A cell with a dash means "
        "nothing; an empty one has no good result.",
    ]
    for surface in dict.fromkeys(cell.surface for cell in cells):
        of_surface = [cell for cell in cells if cell.surface == surface]
        played = sum(cell.outcome == OK for cell in of_surface)
        parts += [f"## {surface} ({played} cells)", table(of_surface)]
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(page(read(Path(name) for name in sys.argv[1:])), end="")
