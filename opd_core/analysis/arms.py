"""Which runs belong together: an arm is the runs that are equal in everything but the seed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from opd_core.analysis.differences import code_of, identity
from opd_core.analysis.run_data import RunData

TOLD_SETTINGS = 2
"""Settings in the label of an arm whose recipe's name is not its own."""


@dataclass(frozen=True, slots=True)
class ArmRuns:
    """An arm's label and runs."""

    label: str
    runs: tuple[RunData, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The distinct seeds, ascending."""
        return tuple(sorted({run.seed for run in self.runs}))


def group_arms(runs: Sequence[RunData]) -> tuple[tuple[ArmRuns, ...], list[str]]:
    """The arms, that of the first run first, and what there is to warn of.

    - A run that is given twice counts once; a single run given twice is compared with itself.
    - Code is not part of a recipe. Where a seed occurs twice with different code, it is the code
      that is compared: such an arm is divided by it.
    - Runs that are all of one arm are compared with each other, one by one.
    """
    distinct = list({run.run_id: run for run in runs}.values())
    if len(distinct) == 1:
        again = [ArmRuns(f"{runs[0].run_id} again", (runs[0],))] if len(runs) > 1 else []
        return (ArmRuns(runs[0].run_id, (runs[0],)), *again), []
    warnings = []
    if len(distinct) < len(runs):
        warnings.append("a run that was given more than once counts once")
    groups = [
        part
        for group in _grouped((tuple(sorted(identity(run).items())), run) for run in distinct)
        for part in _by_code(group)
    ]
    if len(groups) == 1:
        warnings.append(
            "all runs are of one recipe and differ in nothing but the seed or their surroundings: "
            "they are compared one by one, which tells models apart and no recipes"
        )
        return tuple(ArmRuns(run.run_id, (run,)) for run in distinct), warnings
    arms = tuple(map(ArmRuns, _labels(groups), groups))
    return arms, warnings + [warning for arm in arms for warning in _doubts(arm)]


def _grouped(keyed: Iterable[tuple[Hashable, RunData]]) -> list[tuple[RunData, ...]]:
    groups: dict[Hashable, list[RunData]] = {}
    for key, run in keyed:
        groups.setdefault(key, []).append(run)
    return [tuple(group) for group in groups.values()]


def _by_code(group: tuple[RunData, ...]) -> list[tuple[RunData, ...]]:
    repeated = len({run.seed for run in group}) < len(group)
    return _grouped((code_of(run), run) for run in group) if repeated else [group]


def _doubts(arm: ArmRuns) -> Iterable[str]:
    if len(arm.seeds) < len(arm.runs):
        yield f"{arm.label}: runs of one seed are no independent evidence and count as one"
    if len({code_of(run) for run in arm.runs}) > 1:
        yield f"{arm.label}: its runs were made with different code (see the differences)"


def _labels(groups: Sequence[tuple[RunData, ...]]) -> list[str]:
    """The recipe's name; of further arms of that name, with what differs from the first."""
    first: dict[str, RunData] = {}
    labels: list[str] = []
    for run, *_ in groups:
        label = name = run.name
        if first.setdefault(name, run) is not run:
            label = f"{name} ({_what_differs(first[name], run)})"
        labels.append(label if label not in labels else f"{label} #{len(labels) + 1}")
    return labels


def _what_differs(first: RunData, run: RunData) -> str:
    mine, theirs = identity(run), identity(first)
    changed = [f"{key}={value}" for key, value in mine.items() if theirs.get(key) != value]
    if not changed:
        return f"code {code_of(run)[0][:8]}"
    more = len(changed) - TOLD_SETTINGS
    return ", ".join(changed[:TOLD_SETTINGS]) + (f" and {more} more" if more > 0 else "")
