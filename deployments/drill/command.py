"""``opd drill`` itself: what a person asks for, and what they read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import typer

from deployments.drill.catalogue import ENDINGS, MOMENTS, ending_named, moment_named
from deployments.drill.rehearsal import DrillReport, hold_drill
from opd_core.errors import ConfigError
from opd_core.lifecycle.receipt_text import receipt_text


def drill(
    ending: str,
    moment: str,
    recipe: str,
    overrides: Sequence[str],
    *,
    show_list: bool,
    as_json: bool,
) -> bool:
    """Hold a drill and tell of it; whether it was clean. Raises :class:`ConfigError` for names that
    are not in the catalogue, and :class:`DrillError` if the run does not come to its moment."""
    if show_list:
        typer.echo("\n".join(catalogue_lines()))
        return True
    try:
        chosen = ending_named(ending), moment_named(moment)
    except KeyError as error:
        raise ConfigError(f"no ending or moment {error}; `opd drill --list` shows them") from None
    report = hold_drill(*chosen, recipe, overrides, _tell)
    for line in report_lines(report):
        _tell(line)
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    return report.clean


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def catalogue_lines() -> Iterator[str]:
    """All endings and moments, with what they mean."""
    yield "endings:"
    for ending in ENDINGS:
        survives = " (the run goes on)" if ending.survived else ""
        yield f"  {ending.name:16} {ending.meaning}{survives}"
    yield "moments (--moment):"
    for moment in MOMENTS:
        yield f"  {moment.name.replace(' ', '-'):16} {moment.meaning}"


def report_lines(report: DrillReport) -> Iterator[str]:
    """Receipt, the look from outside, and the verdict."""
    yield ""
    yield receipt_text(report.receipt) if report.receipt else "NO RECEIPT was written"
    yield ""
    left = report.left
    found = [*left.processes, *(f"port {port}" for port in left.ports), *left.folders]
    yield f"an independent look finds: {'nothing' if left.none else ''}"
    yield from (f"  {each}" for each in found)
    yield f"final states: {'written' if report.settled else 'NOT written'}"
    step = report.resumes_from
    where = f"from train step {step}" if step else "from its beginning"
    why = report.not_resumable
    yield f"it CANNOT be resumed: {why}" if why else f"it can be resumed {where}"
    yield ""
    if report.clean:
        yield f"{report.ending} during {report.moment}: nothing was left and nothing was lost"
    else:
        yield f"{report.ending} during {report.moment}: NOT CLEAN; read {report.run_directory}"
