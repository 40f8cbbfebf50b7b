"""A reproduction as markdown: for a Prefect artifact, and beside the comparison's files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from opd_core.analysis.comparison_words import metric_name, shown_value
from opd_core.analysis.outcome import Difference
from opd_core.analysis.reproduction import ORIGINAL, RERUNS, Reproduction

NO_DIFFERENCES = "Nothing but the seed differs."


def reproduction_markdown(
    reproduction: Reproduction, links: Mapping[str, str] | None = None
) -> str:
    """The verdict, the runs, all in which they differ. ``links`` are markdown, by run id."""
    lines = ["# Reruns", "", f"**{_plain(reproduction.sentence)}**", ""]
    if reproduction.left_out:
        lines += [
            f"> **Warning:** not measured where the others were, and left out: "
            f"{', '.join(map(_code, reproduction.left_out))}",
            "",
        ]
    lines += _table(
        ("", "run", "seed", metric_name(reproduction.metric)), _runs(reproduction, links)
    )
    lines += ["", "## In what they differ", ""]
    if reproduction.differences:
        whose = (ORIGINAL, RERUNS) if reproduction.original else (RERUNS,)
        rows = [_row_of(each, whose) for each in reproduction.differences]
        lines += _table(("what", "key", *whose), rows)
    else:
        lines.append(NO_DIFFERENCES)
    return "\n".join(lines) + "\n"


def differences_in_words(reproduction: Reproduction) -> str:
    """``code (commit), packages (torch)``: what differs between original and reruns, in short."""
    found: dict[str, list[str]] = {}
    for each in reproduction.differences:
        found.setdefault(each.kind, []).append(each.key)
    return ", ".join(f"{kind} ({', '.join(keys)})" for kind, keys in found.items())


def _runs(reproduction: Reproduction, links: Mapping[str, str] | None) -> Iterable[tuple[str, ...]]:
    originals = [reproduction.original] if reproduction.original else []
    for who, run in [
        *((ORIGINAL, run) for run in originals),
        *(("rerun", r) for r in reproduction.reruns),
    ]:
        shown = (links or {}).get(run.run_id, f"`{run.run_id}`")
        yield who, shown, str(run.seed), shown_value(reproduction.metric, run.value)


def _row_of(difference: Difference, whose: Sequence[str]) -> tuple[str, ...]:
    """Where the reruns are not at one, what each has."""
    values = dict(difference.values)
    each = "<br>".join(f"{who}: {_code(v)}" for who, v in values.items() if who not in whose)
    cells = [_code(values[who]) if who in values else each for who in whose]
    return (difference.kind, _code(difference.key), *cells)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_line(headings), _line(["---"] * len(headings)), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _code(text: str) -> str:
    """As it is: nothing in it is taken for a mark."""
    return f"`{text.replace('`', chr(39))}`" if text else ""


def _plain(text: str) -> str:
    return text.replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")
