"""Every run measured at the target, and the questions that they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from opd_core.analysis.alignment import Axis, axis_of, spot_at
from opd_core.analysis.measuring import Measured, measure, measured_steps, of_question
from opd_core.analysis.outcome import Target
from opd_core.analysis.run_data import RunData
from opd_core.errors import ConfigError

CLEARLY_LESS = 0.9
"""A run that was last measured before this share of what another one reached holds it back."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A run's axis, the train steps after which its metric was measured and that have a place on
    it, and those that have none; ``by_question``: whether its questions were kept."""

    run: RunData
    axis: Axis
    steps: tuple[int, ...]
    placeless: tuple[int, ...]
    by_question: bool

    @property
    def reached(self) -> float:
        """Where it was last measured."""
        return self.axis.at(self.steps[-1])

    @property
    def who(self) -> str:
        """The run and how it ended."""
        return f"{self.run.run_id} (status: {self.run.summary.get('status') or 'not recorded'})"


def measure_runs(
    runs: Sequence[RunData], target: Target
) -> tuple[float, dict[str, Measured], list[str]]:
    """The target's place on its axis, each run's measurement there by run id, and warnings.

    Raises :class:`ConfigError`: an axis or a metric that a run does not have, a place at which the
    first run was not measured, or none that all reached after training.
    """
    placed = [_place(run, target) for run in runs]
    warnings = [*_beyond_journal(placed), *_without_questions(placed, target.metric)]
    at, said = (target.at, []) if target.at is not None else _farthest(placed)
    warnings += said
    measured: dict[str, Measured] = {}
    for each in placed:
        spot = spot_at(each.axis, each.steps, at) if each.steps else None
        if spot is not None:
            measured[each.run.run_id] = measure(
                each.run, target.metric, spot, by_question=each.by_question
            )
        elif each is placed[0]:
            raise ConfigError(
                f"{each.who}, the baseline, has no {target.metric} at {at:.6g} {target.axis}"
                f"{_measured_from(each)}: name a place within, or another run first"
            )
        else:
            warnings.append(
                f"{each.who} is left out: it has no {target.metric} at {at:.6g} {target.axis}"
                f"{_measured_from(each)}"
            )
    if between := [run_id for run_id, found in measured.items() if found.spot.train_step_after]:
        warnings.append(
            f"{', '.join(between)}: not measured at {at:.6g} {target.axis}, so taken on the "
            "straight line between the measurements around it; evaluate more often, or name "
            "another place"
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
    steps = kept or journal
    there = tuple(step for step in steps if axis.covers(step))
    beyond = tuple(step for step in steps if not axis.covers(step))
    return _Placed(run, axis, there, beyond, bool(kept))


def _farthest(placed: Sequence[_Placed]) -> tuple[float, list[str]]:
    """The farthest place at which all were measured, and a warning where one holds all back."""
    somewhere = sorted((each for each in placed if each.steps), key=lambda each: each.reached)
    if not somewhere:
        return 0.0, []
    least, most = somewhere[0], somewhere[-1]
    told = f"{least.who} was last measured at {least.reached:.6g} {least.axis.name}"
    if least.reached == 0 < most.reached:
        raise ConfigError(
            f"{told}, before training, and {most.run.run_id} at {most.reached:.6g}: leave "
            f"{least.run.run_id} out, or name the place (at)"
        )
    if least.reached < CLEARLY_LESS * most.reached:
        return least.reached, [
            f"{told}, {most.run.run_id} at {most.reached:.6g}; all are compared where "
            f"{least.run.run_id} was: leave it out, or name another place (at)"
        ]
    return least.reached, []


def _measured_from(placed: _Placed) -> str:
    if not placed.steps:
        return ""
    first = placed.axis.at(placed.steps[0])
    return f", only from {first:.6g} to {placed.reached:.6g}"


def _beyond_journal(placed: Sequence[_Placed]) -> list[str]:
    """A warning for each run that was measured after the last train step of its axis."""
    return [
        f"{each.run.run_id}: what was measured after train step "
        f"{', '.join(map(str, each.placeless))} is left out: {each.axis.name} was not recorded "
        "up to there"
        for each in placed
        if each.placeless
    ]


def _without_questions(placed: Sequence[_Placed], metric: str) -> list[str]:
    """A warning where questions could be paired and some runs kept none."""
    without = [each.run.run_id for each in placed if not each.by_question]
    if of_question(metric) is None or not without:
        return []
    return [
        f"{', '.join(dict.fromkeys(without))} kept no questions (evaluations/): the arms of these "
        "runs are compared by recorded errors and over all their questions, not paired by "
        "question; intervals are wider than they need be"
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
