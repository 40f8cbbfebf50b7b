"""Several runs, one verdict: which arm was better at a declared target, and how sure that is.

``placing`` measures every run at the target (``alignment``: its axes, ``measuring``: its metric),
``arms`` says which runs belong together, ``pooling`` takes an arm's runs together and their
intervals, ``verdict`` judges, ``differences`` tells in what they differ, ``outcome`` holds what
comes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from opd_core.analysis.alignment import (
    CURVE_METRICS,
    arm_curves,
    common_axes,
)
from opd_core.analysis.arms import ArmRuns, group_arms
from opd_core.analysis.differences import find_differences
from opd_core.analysis.measuring import (
    Measured,
    lower_is_better,
    margin_of,
    of_question,
    question_values,
)
from opd_core.analysis.outcome import (
    Arm,
    ArmRun,
    Comparison,
    Difference,
    Interval,
    Pair,
    ReferenceValue,
    Target,
)
from opd_core.analysis.placing import common_questions, measure_runs, on_questions
from opd_core.analysis.pooling import Pool, models_interval, pool, training_interval
from opd_core.analysis.run_data import RunData
from opd_core.analysis.verdict import judge
from opd_core.errors import ConfigError
from opd_core.training.evaluation_records import EvaluationRecord

__all__ = [
    "Arm",
    "ArmRun",
    "Comparison",
    "Difference",
    "Interval",
    "Pair",
    "Reference",
    "ReferenceValue",
    "Target",
    "compare",
]


@dataclass(frozen=True, slots=True)
class Reference:
    """Something to draw as a line beside the arms, e.g. the teacher's own evaluation."""

    label: str
    record: EvaluationRecord


def compare(
    runs: Sequence[RunData], target: Target, references: Sequence[Reference] = ()
) -> Comparison:
    """Compare runs at the target; the arm of the first run is the baseline.

    Raises:
        ConfigError: no runs; an axis or a metric that a run does not have; a target that the
            baseline did not reach; runs that were evaluated on different questions.
    """
    if not runs:
        raise ConfigError("expected runs to compare, got none")
    target = replace(target, margin=margin_of(target.metric, target.margin))
    axes, warnings = common_axes(runs)
    at, measured, said = measure_runs(runs, target)
    warnings += said
    groups, said = group_arms([run for run in runs if run.run_id in measured])
    warnings += said
    keys, left_out = common_questions(list(measured.values()))
    measured = {run_id: on_questions(each, keys) for run_id, each in measured.items()}
    if left_out:
        warnings.append(f"{left_out} questions that not all runs answered are left out")
    pools = [pool([measured[run.run_id] for run in group.runs], keys) for group in groups]
    lower = lower_is_better(target.metric)
    pairs = judge(
        [(group.label, each) for group, each in zip(groups, pools, strict=True)],
        target,
        lower_is_better=lower,
        questions=len(keys),
        left_out=left_out,
    )
    lines, said = _references(references, target, keys, list(measured.values()))
    return Comparison(
        target=target,
        at=at,
        lower_is_better=lower,
        axes=axes,
        arms=tuple(
            _arm(group, each, measured, axes, target, baseline=group is groups[0])
            for group, each in zip(groups, pools, strict=True)
        ),
        pairs=pairs,
        differences=find_differences([(group.label, group.runs) for group in groups]),
        references=lines,
        warnings=tuple(warnings + said),
    )


def _references(
    references: Sequence[Reference],
    target: Target,
    keys: Sequence[str],
    measured: Sequence[Measured],
) -> tuple[tuple[ReferenceValue, ...], list[str]]:
    value_of = of_question(target.metric)
    if value_of is None or not keys:
        ignored = [f"{r.label}: no line without questions to compare on" for r in references]
        return (), ignored
    lines, warnings = [], []
    for reference in references:
        table = question_values(reference.record, value_of)
        common = [key for key in keys if key in table]
        if not common or 2 * len(common) < len(keys):
            raise ConfigError(
                f"reference {reference.label}: it answered {len(common)} of the {len(keys)} "
                "questions, expected at least half: evaluate it on the runs' data.evaluation"
            )
        if len(common) < len(keys):
            warnings.append(
                f"{reference.label} answered {len(common)} of the {len(keys)} questions"
            )
        if not all(_alike(reference.record, each) for each in measured):
            warnings.append(f"{reference.label} was sampled at another temperature than the runs")
        values = np.array([[table[key] for key in common]])
        own = Pool(frozenset(), (0,), values.mean(axis=1), values, None, 1.0)
        lines.append(ReferenceValue(reference.label, own.value, models_interval(own), len(common)))
    return tuple(lines), warnings


def _alike(record: EvaluationRecord, measured: Measured) -> bool:
    return all(
        each.temperature == record.temperature
        for each in measured.run.evaluations
        if each.train_step in measured.spot.train_steps
    )


def _arm(
    group: ArmRuns,
    pooled: Pool,
    measured: dict[str, Measured],
    axes: Sequence[str],
    target: Target,
    *,
    baseline: bool,
) -> Arm:
    found = [measured[run.run_id] for run in group.runs]
    return Arm(
        label=group.label,
        baseline=baseline,
        runs=tuple(
            ArmRun(
                m.run.run_id,
                m.run.seed,
                m.spot.train_step,
                m.spot.axis_value,
                m.value,
                m.spot.train_step_after,
                m.spot.fraction,
            )
            for m in found
        ),
        value=pooled.value,
        models=models_interval(pooled),
        training=training_interval(pooled),
        curves=arm_curves(group.runs, axes, (target.metric, *CURVE_METRICS)),
    )
