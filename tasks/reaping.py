"""The reaper, as `opd reap` and the janitor tell of it: which runs there are, and what was done."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from rich.table import Table
from rich.text import Text

from opd_core.errors import OPDError
from opd_core.lifecycle.reaper import Finding, Reaped, forget, look, reap
from opd_core.lifecycle.registry import Registry
from tasks.console import announce, warn

HEADINGS = ("run", "state", "found", "done", "directory")


class NotReaped(OPDError):
    """Something of a dead run is left; the message says what, run by run."""


@dataclass(frozen=True, slots=True)
class ReapLine:
    """One unsettled run. ``left`` says that it is dead, and not everything of it could be ended and
    written; ``lives`` that processes of it are left."""

    run: str
    state: str
    found: str
    done: str
    directory: str
    left: bool = False
    lives: bool = False

    @property
    def cells(self) -> tuple[str, ...]:
        """In the order of :data:`HEADINGS`."""
        return self.run, self.state, self.found, self.done, self.directory


@dataclass(frozen=True, slots=True)
class ReapReport:
    """Every unsettled run of this user, and what was done about it."""

    lines: tuple[ReapLine, ...]

    @property
    def left(self) -> tuple[ReapLine, ...]:
        """The dead runs of which something is left."""
        return tuple(line for line in self.lines if line.left)

    def to_json(self) -> list[dict[str, Any]]:
        """One object for each run."""
        return [asdict(line) for line in self.lines]

    def table(self) -> Table:
        """For a terminal."""
        table = Table(*HEADINGS, title="runs that are not settled")
        for line in self.lines:
            table.add_row(*(Text(cell, overflow="fold") for cell in line.cells))
        return table

    def markdown(self) -> str:
        """For a Prefect artifact."""
        if not self.lines:
            return "Every run is settled."
        rows = [HEADINGS, ["---"] * len(HEADINGS), *(line.cells for line in self.lines)]
        return "\n".join(_row(cells) for cells in rows)

    def raise_left(self) -> None:
        """Raise :class:`NotReaped` if processes are left: those hold devices and ports. A final
        state that could not be written so far is no failure."""
        living = [f"{line.run}: {line.done}" for line in self.lines if line.left and line.lives]
        if living:
            raise NotReaped("\n".join(living))


def reap_dead_runs(dry_run: bool, registry: Registry | None = None) -> ReapReport:
    """End what is left of this user's dead runs and write their final states; with ``dry_run``
    only say what there is."""
    registry = registry or Registry.of_user()
    findings = look(registry)
    if dry_run:
        return ReapReport(tuple(_found(finding) for finding in findings))
    others = [_found(finding) for finding in findings if finding.state != "dead"]
    reaped = reap(registry)
    living = {finding.run.run_id for finding in look(registry) if finding.leftovers}
    return ReapReport((*others, *(_reaped(each, living) for each in reaped)))


def forget_run(run_id: str) -> str:
    """Strike out a run that can never be settled; returns why it was not done."""
    return forget(Registry.of_user(), run_id)


@task(name="end what dead runs left", cache_policy=NO_CACHE)
def end_dead_runs() -> None:
    """At the start of a run: whatever holds devices, ports and memory for nobody goes first. What
    could not be ended is told, and does not stop this run; a final state that could not be written
    so far is left to the janitor."""
    for reaped in reap(Registry.of_user(), again=False):
        line = _reaped(reaped)
        tell = warn if line.left else announce
        tell(f"dead run {line.run}: {line.found}; {line.done}")


def _found(finding: Finding) -> ReapLine:
    done = "would be ended" if finding.state == "dead" else "-"
    return _line(finding, done, left=False)


def _reaped(reaped: Reaped, living: Collection[str] = ()) -> ReapLine:
    done = reaped.said or "ended and settled"
    lives = reaped.finding.run.run_id in living
    return _line(reaped.finding, done, left=not reaped.settled, lives=lives)


def _line(finding: Finding, done: str, *, left: bool, lives: bool = False) -> ReapLine:
    processes = [f"process {each.pid} ({each.executable})" for each in finding.leftovers]
    found = ", ".join([finding.why, *processes])
    run = finding.run
    return ReapLine(run.run_id, finding.state, found, done, str(run.run_dir), left, lives)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
