"""A comparison as words: for a terminal, and as markdown for a page of documentation, a Prefect
artifact, the description of an MLflow run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from opd_core.analysis.comparison_words import (
    ARM_HEADINGS,
    POINTS,
    arm_rows,
    coverage,
    difference_headings,
    difference_rows,
    nothing_differs,
    place,
    reference_rows,
    run_headings,
    run_rows,
    sentence_case,
)
from opd_core.analysis.measuring import is_share
from opd_core.analysis.outcome import (
    BETTER,
    CANNOT_TELL,
    HIGHER,
    LOWER,
    NO_DIFFERENCE,
    WORSE,
    Comparison,
)

STYLES = {
    BETTER: "green",
    WORSE: "red",
    HIGHER: "cyan",
    LOWER: "cyan",
    NO_DIFFERENCE: "blue",
    CANNOT_TELL: "yellow",
}
NUMBERS = {"seeds", "value", "difference", "p (Holm)", "more seeds"}
"""Columns that are aligned on the right."""
NARROW = {
    "these models, new questions": "models",
    "new training runs": "training",
    "difference": "diff",
    "p (Holm)": "p",
    "more seeds": "+seeds",
}
"""Headings at a terminal; what they stand for is told below the table."""
FEWEST_LETTERS = 16
"""Of an arm's name in a table."""
SPECIAL = re.compile(
    r"[\\`*~$]|<(?=[a-zA-Z/!?])|&(?=#?\w+;)|(?<=\])[(\[:]|(?<![^\W_])_|_(?![^\W_])"
)
"""What markdown would take for a mark, a tag, an entity, a link or emphasis."""


@dataclass(frozen=True)
class _Arms:
    """The table of arms; where it would not fit, a block of lines for each arm."""

    title: str
    rows: Sequence[tuple[str, ...]]
    points: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = [tuple(cell.removesuffix(POINTS) for cell in row) for row in self.rows]
        table = _table(self.title + (", differences in points" if self.points else ""), cells)
        if _least_width(cells) <= options.max_width:
            yield table
            return
        yield Text(self.title, style="bold")
        for arm, *row in self.rows:
            yield Text(arm, style="bold")
            told = [(h, cell) for h, cell in zip(ARM_HEADINGS[1:], row, strict=True) if cell]
            width = max(map(len, ARM_HEADINGS))
            for heading, cell in told:
                yield Text(f"  {heading:<{width}}  ").append(cell, STYLES.get(cell, ""))


def comparison_text(comparison: Comparison) -> Group:
    """For a terminal: the verdict, a table of arms and references, all differences, what the
    intervals are about, warnings."""
    parts: list[Text | Table | _Arms] = []
    for pair in comparison.pairs:
        parts.append(Text(pair.sentence, style=f"bold {STYLES.get(pair.verdict, '')}"))
    rows = arm_rows(comparison) + reference_rows(comparison)
    parts.append(_Arms(place(comparison), rows, is_share(comparison.target.metric)))
    if comparison.differences:
        parts.append(_differences(comparison))
    else:
        parts.append(Text(nothing_differs(comparison)))
    parts += [Text(sentence, style="dim") for sentence in coverage(comparison)]
    parts += [Text(f"warning: {warning}", style="yellow") for warning in comparison.warnings]
    return Group(*parts)


def comparison_markdown(
    comparison: Comparison, charts: Sequence[tuple[str, str]] = (), heading: str = "#"
) -> str:
    """As markdown. ``charts`` are (title, file beside the text); ``heading`` is the mark of its
    first heading."""
    where = _escaped(sentence_case(place(comparison)))
    lines = [f"{heading} {_escaped(title(comparison))}", "", f"{where}.", ""]
    for pair in comparison.pairs:
        lines += [f"**{_escaped(pair.sentence)}**", ""]
    rows = arm_rows(comparison) + reference_rows(comparison)
    lines += [*_markdown_table(ARM_HEADINGS, map(_all_escaped, rows)), ""]
    lines += [f"- {_escaped(sentence)}" for sentence in coverage(comparison)]
    lines += ["", *(f"> **Warning:** {_escaped(warning)}\n" for warning in comparison.warnings)]
    for name, file in charts:
        lines += [f"![{_escaped(name)}]({file})", ""]
    lines += [f"{heading}# In what they differ", ""]
    if comparison.differences:
        rows = [(kind, *map(_code, cells)) for kind, *cells in difference_rows(comparison)]
        lines += _markdown_table(_all_escaped(difference_headings(comparison)), rows)
    else:
        lines.append(nothing_differs(comparison))
    headings, cells = (
        _all_escaped(run_headings(comparison)),
        map(_all_escaped, run_rows(comparison)),
    )
    runs = _markdown_table(headings, cells)
    lines += ["", f"{heading}# Runs", "", *runs]
    lines += ["", "```sh", command_of(comparison), "```"]
    return "\n".join(lines) + "\n"


def command_of(comparison: Comparison) -> str:
    """The command that makes this comparison again, without its references."""
    target = comparison.target
    given = {"metric": target.metric, "axis": target.axis}
    if target.margin is not None:
        given["margin"] = f"{target.margin:g}"
    if target.at is not None:
        given["at"] = f"{target.at:g}"
    runs = " ".join(run.run_id for arm in comparison.arms for run in arm.runs)
    return f"opd compare {runs} " + " ".join(f"--{name} {value}" for name, value in given.items())


def title(comparison: Comparison) -> str:
    """Who is compared: ``mixed, task only against pure``; more than three arms by their number."""
    baseline, *others = (arm.label for arm in comparison.arms)
    who = ", ".join(others) if len(others) <= 2 else f"{len(others)} arms"
    return f"{who} against {baseline}" if others else baseline


def _table(title: str, rows: Iterable[Sequence[str]]) -> Table:
    """Of arms: no cell but their names is broken."""
    table = Table(title=Text(title, "bold"), title_justify="left")
    first, *others = ARM_HEADINGS
    table.add_column(first, overflow="fold")
    for heading in others:
        justify: Literal["left", "right"] = "right" if heading in NUMBERS else "left"
        table.add_column(NARROW.get(heading, heading), justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell, STYLES.get(cell, "")) for cell in row))
    return table


def _least_width(rows: Sequence[tuple[str, ...]]) -> int:
    """Of the table of arms: only an arm's name may be broken."""
    headings = [NARROW.get(heading, heading) for heading in ARM_HEADINGS]
    arm, *others = (max(map(len, column)) for column in zip(headings, *rows, strict=True))
    return min(arm, FEWEST_LETTERS) + sum(others) + 3 * len(headings) + 1


def _differences(comparison: Comparison) -> Table:
    table = Table(title=Text("in what they differ", "bold"), title_justify="left")
    for heading in difference_headings(comparison):
        table.add_column(Text(heading), overflow="fold")
    for row in difference_rows(comparison):
        table.add_row(*map(Text, row))
    return table


def _markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    marks = ["--:" if heading in NUMBERS else "---" for heading in headings]
    return [_row(headings), _row(marks), *(_row(row) for row in rows)]


def _code(cell: str) -> str:
    return "<br>".join(
        f"`{line}`" if "`" not in line else _escaped(line) for line in cell.splitlines()
    )


def _escaped(text: str) -> str:
    """The text, and nothing that markdown takes for more than that."""
    return SPECIAL.sub(r"\\\g<0>", text.replace("\n", " "))


def _all_escaped(cells: Sequence[str]) -> list[str]:
    return [_escaped(cell) for cell in cells]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"
