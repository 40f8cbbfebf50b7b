"""Every run measured at the target, and the questions that they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from opd_core.analysis.alignment import Axis, axis_of, fell_short, taken_step
from opd_core.analysis.measuring import (
    Measured,
    measure_journal,
    measure_questions,
    measured_steps,
    of_question,
)
from opd_core.analysis.outcome import Target
from opd_core.analysis.run_data import RunData
from opd_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Placed:
    """A run's axis, and the train steps at which its metric's questions were kept and at which its
    journal has the metric."""

    run: RunData
    axis: Axis
    kept: list[int]
    journal: list[int]

    def steps(self, by_question: bool) -> list[int]:
        """The train steps that can be used; raises :class:`ConfigError` without any."""
        if not (steps := self.kept if by_question else self.journal):
            raise ConfigError(
                f"{self.run.run_id} has this metric by question only, and other runs kept no "
                "questions: expected the metric in every journal, or questions of every run"
            )
        return steps


def measure_runs(
    runs: Sequence[RunData], target: Target
) -> tuple[float, dict[str, Measured], list[str]]:
    """The target's place on its axis, each run's measurement there by run id, and warnings.

    Raises :class:`ConfigError`: an axis or a metric that a run does not have, a place that the
    first run did not reach.
    """
    placed = [_place(run, target) for run in runs]
    warnings = _without_questions(placed, target.metric)
    by_question = all(each.kept for each in placed)
    measure = measure_questions if by_question else measure_journal
    at = target.at
    if at is None:
        at = min(each.axis.at(each.steps(by_question)[-1]) for each in placed)
    measured: dict[str, Measured] = {}
    for each in placed:
        run, axis, step = each.run, each.axis, taken_step(each.axis, each.steps(by_question), at)
        if fell_short(axis, axis.reached, at):
            warnings.append(
                f"{run.run_id} is left out: it reached {axis.reached:.6g} of {at:.6g} {axis.name}"
            )
        elif step is None:
            warnings.append(
                f"{run.run_id} is left out: {target.metric} was first measured after {at:.6g} "
                f"{axis.name}"
            )
        else:
            measured[run.run_id] = measure(run, target.metric, step, axis.at(step))
            if fell_short(axis, axis.at(step), at):
                warnings.append(
                    f"{run.run_id} was measured at {axis.at(step):.6g} {axis.name} (train step "
                    f"{step}), before {at:.6g}: evaluate more often, or name another place"
                )
    if runs[0].run_id not in measured:
        raise ConfigError(
            f"{runs[0].run_id}, the baseline, has no {target.metric} at {at:.6g} {target.axis}: "
            "name a smaller value, or another run first"
        )
    return at, measured, list(dict.fromkeys(warnings))


def on_questions(measured: Measured, keys: Sequence[str]) -> Measured:
    """The same, of these questions only; as it is where it was not measured by question."""
    if measured.questions is None:
        return measured
    kept = {key: measured.questions[key] for key in keys}
    return replace(measured, questions=kept, value=sum(kept.values()) / len(kept))


def _place(run: RunData, target: Target) -> _Placed:
    axis = axis_of(run, target.axis)
    if axis is None:
        raise ConfigError(
            f"{run.run_id} recorded no {target.axis}: expected an axis that all runs have; "
            "name another, e.g. steps"
        )
    kept, journal = measured_steps(run, target.metric)
    if not kept and not journal:
        known = ", ".join(name for name in run.series.names if "/" not in name) or "none"
        raise ConfigError(
            f"{run.run_id} has no {target.metric}: expected a metric that all runs recorded, e.g. "
            f"eval/accuracy (evaluation.every) or one of: {known}"
        )
    return _Placed(run, axis, kept, journal)


def _without_questions(placed: Sequence[_Placed], metric: str) -> list[str]:
    """A warning where questions could be paired and some runs kept none."""
    without = [each.run.run_id for each in placed if not each.kept]
    if of_question(metric) is None or not without:
        return []
    return [
        f"{', '.join(dict.fromkeys(without))} kept no questions (evaluations/), so no run's are "
        "paired: intervals are wider than they need be"
    ]


def common_questions(measured: Sequence[Measured]) -> tuple[tuple[str, ...], int]:
    """The keys of the questions that all runs answered, and how many others there are; none where
    runs were not measured by question. Raises :class:`ConfigError` where under half are common."""
    tables = [each.questions for each in measured if each.questions is not None]
    if not tables:
        return (), 0
    keys = tuple(key for key in tables[0] if all(key in table for table in tables[1:]))
    smallest = min(len(table) for table in tables)
    if not keys or 2 * len(keys) < smallest:
        sizes = ", ".join(f"{each.run.run_id} {len(each.questions or ())}" for each in measured)
        raise ConfigError(
            f"the runs answered different questions: {len(keys)} are common ({sizes}), expected at "
            "least half: evaluate them on the same file (data.evaluation), or leave the odd one out"
        )
    return keys, len(set().union(*tables)) - len(keys)
