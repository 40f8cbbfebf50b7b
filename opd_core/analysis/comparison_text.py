"""A comparison as words: for a terminal, and as markdown for a page of documentation, a Prefect
artifact, the description of an MLflow run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from opd_core.analysis.comparison_words import (
    ARM_HEADINGS,
    arm_rows,
    coverage,
    difference_headings,
    difference_rows,
    place,
    reference_rows,
    run_headings,
    run_rows,
    sentence_case,
)
from opd_core.analysis.outcome import BETTER, CANNOT_TELL, NO_DIFFERENCE, WORSE, Comparison

STYLES = {BETTER: "green", WORSE: "red", NO_DIFFERENCE: "blue", CANNOT_TELL: "yellow"}
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
ONLY_SEEDS = "They differ in nothing but the seed."


def comparison_text(comparison: Comparison) -> Group:
    """For a terminal: the verdict, a table of arms and references, all differences, what the
    intervals are about, warnings."""
    parts: list[Text | Table] = []
    for pair in comparison.pairs:
        parts.append(Text(pair.sentence, style=f"bold {STYLES.get(pair.verdict, '')}"))
    rows = arm_rows(comparison) + reference_rows(comparison)
    parts.append(_table(place(comparison), ARM_HEADINGS, rows))
    if comparison.differences:
        rows = difference_rows(comparison)
        parts.append(_table("in what they differ", difference_headings(comparison), rows))
    else:
        parts.append(Text(ONLY_SEEDS))
    parts += [Text(sentence, style="dim") for sentence in coverage(comparison)]
    parts += [Text(f"warning: {warning}", style="yellow") for warning in comparison.warnings]
    return Group(*parts)


def comparison_markdown(
    comparison: Comparison, charts: Sequence[tuple[str, str]] = (), heading: str = "#"
) -> str:
    """As markdown. ``charts`` are (title, file beside the text); ``heading`` is the mark of its
    first heading."""
    lines = [f"{heading} {title(comparison)}", "", sentence_case(place(comparison)) + ".", ""]
    for pair in comparison.pairs:
        lines += [f"**{pair.sentence}**", ""]
    rows = arm_rows(comparison) + reference_rows(comparison)
    lines += [*_markdown_table(ARM_HEADINGS, rows), ""]
    lines += [f"- {sentence}" for sentence in coverage(comparison)]
    lines += ["", *(f"> **Warning:** {warning}\n" for warning in comparison.warnings)]
    for name, file in charts:
        lines += [f"![{name}]({file})", ""]
    lines += [f"{heading}# In what they differ", ""]
    if comparison.differences:
        rows = [(kind, *map(_code, cells)) for kind, *cells in difference_rows(comparison)]
        lines += _markdown_table(difference_headings(comparison), rows)
    else:
        lines.append(ONLY_SEEDS)
    runs = _markdown_table(run_headings(comparison), run_rows(comparison))
    lines += ["", f"{heading}# Runs", "", *runs]
    lines += ["", "```sh", command_of(comparison), "```"]
    return "\n".join(lines) + "\n"


def command_of(comparison: Comparison) -> str:
    """The command that makes this comparison again, without its references."""
    target = comparison.target
    given = {"metric": target.metric, "axis": target.axis, "margin": f"{target.margin:g}"}
    if target.at is not None:
        given["at"] = f"{target.at:g}"
    runs = " ".join(run.run_id for arm in comparison.arms for run in arm.runs)
    return f"opd compare {runs} " + " ".join(f"--{name} {value}" for name, value in given.items())


def title(comparison: Comparison) -> str:
    """Who is compared: ``mixed, task only against pure``; more than three arms by their number."""
    baseline, *others = (arm.label for arm in comparison.arms)
    who = ", ".join(others) if len(others) <= 2 else f"{len(others)} arms"
    return f"{who} against {baseline}" if others else baseline


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading in NUMBERS else "left"
        table.add_column(NARROW.get(heading, heading), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    return table


def _markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    marks = ["--:" if heading in NUMBERS else "---" for heading in headings]
    return [_row(headings), _row(marks), *(_row(row) for row in rows)]


def _code(cell: str) -> str:
    return "<br>".join(f"`{line}`" for line in cell.splitlines())


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"
