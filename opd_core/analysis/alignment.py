"""Runs side by side on one axis: where each stood at a train step, which of its measurements is the
one at the target, and curves of an arm's seeds together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opd_core.analysis.outcome import AXES, ArmCurve
from opd_core.analysis.run_data import RunData, Steps, Values

NEAR = 0.05
"""Runs end at slightly different token counts: what was measured so much before or beyond the
target is still "at" it. Train steps are exact."""
CURVE_POINTS = 200
CURVE_METRICS = (
    "eval/accuracy",
    "opd_reverse_kl",
    "entropy",
    "rollout/response_tokens_mean",
    "rollout/reward_mean",
    "grad_norm",
)


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a run is taken: after ``train_step``; with ``train_step_after``, on the straight line
    between both measurements, this ``fraction`` of the way."""

    axis_value: float
    train_step: int
    train_step_after: int | None = None
    fraction: float = 0.0

    @property
    def train_steps(self) -> tuple[int, ...]:
        """After which the run was measured."""
        after = self.train_step_after
        return (self.train_step,) if after is None else (self.train_step, after)


class Axis:
    """One run's axis: a value that grows from 0 with the train steps."""

    def __init__(self, name: str, steps: Steps, values: Values) -> None:
        self.name = name
        self._steps, self._values = steps, values

    def at(self, train_step: int) -> float:
        """The value after a train step."""
        if self.name == "steps":
            return float(train_step)
        index = int(np.searchsorted(self._steps, train_step, side="right")) - 1
        return float(self._values[index]) if index >= 0 else 0.0

    def covers(self, train_step: int) -> bool:
        """Whether the axis was recorded up to that train step."""
        return bool(train_step <= self._steps[-1])


def axis_of(run: RunData, name: str) -> Axis | None:
    """The run's axis; None where nothing of it is recorded, or it never left 0.

    Journals of earlier versions have no totals: student tokens are then the sum of
    ``response_tokens``, device-seconds that of ``time/step_s`` times the run's devices.
    """
    if name == "steps":
        recorded = [run.series.of(metric)[0][-1] for metric in run.series.names]
        last = max(recorded + [record.train_step for record in run.evaluations], default=0)
        return Axis(name, np.array([last]), np.array([float(last)]))
    steps, values = run.series.of(f"total/{name}")
    if not len(steps) and name == "student_tokens":
        steps, values = run.series.of("response_tokens")
        values = values.cumsum()
    if not len(steps) and name == "device_seconds":
        steps, values = run.series.of("time/step_s")
        values = values.cumsum() * _devices(run.config)
    if not len(steps) or not values[-1] > 0:
        return None
    return Axis(name, steps, values)


def common_axes(runs: Sequence[RunData]) -> tuple[tuple[str, ...], list[str]]:
    """The axes that all runs have, and a sentence on each other that some have."""
    common, sentences = [], []
    for name in AXES:
        without = [run.run_id for run in runs if axis_of(run, name) is None]
        if not without:
            common.append(name)
        elif len(without) < len({run.run_id for run in runs}):
            sentences.append(
                f"no alignment on {name}: {', '.join(dict.fromkeys(without))} have none, or did "
                "not record it"
            )
    return tuple(common), sentences


def spot_at(axis: Axis, measured: Sequence[int], at: float) -> Spot | None:
    """The nearest of the measured train steps if it is at ``at``, else the two around it; None
    before the first and beyond the last."""
    near = 0.0 if axis.name == "steps" else at * NEAR
    places = [(axis.at(step), step) for step in measured]
    distance, nearest = min((abs(place - at), -step) for place, step in places)
    if distance <= near:
        return Spot(axis.at(-nearest), -nearest)
    before = max((each for each in places if each[0] < at), default=None)
    after = min((each for each in places if each[0] > at), default=None)
    if before is None or after is None:
        return None
    return Spot(at, before[1], after[1], (at - before[0]) / (after[0] - before[0]))


def arm_curves(
    runs: Sequence[RunData], axes: Sequence[str], metrics: Sequence[str]
) -> tuple[ArmCurve, ...]:
    """Every metric that all of these runs recorded, along every axis."""
    found = {metric: [run.series.of(metric) for run in runs] for metric in dict.fromkeys(metrics)}
    along = {name: [axis for run in runs if (axis := axis_of(run, name))] for name in axes}
    return tuple(
        curve
        for metric, series in found.items()
        for name, places in along.items()
        if (curve := _curve(metric, name, series, places)) is not None
    )


def _curve(
    metric: str, name: str, series: Sequence[tuple[Steps, Values]], axes: Sequence[Axis]
) -> ArmCurve | None:
    points = [
        {int(s): float(v) for s, v in zip(steps, values, strict=True) if np.isfinite(v)}
        for steps, values in series
    ]
    common = set.intersection(*(set(each) for each in points))
    steps = sorted(step for step in common if all(axis.covers(step) for axis in axes))
    if not steps:
        return None
    kept = np.linspace(0, len(steps) - 1, min(len(steps), CURVE_POINTS)).round().astype(int)
    steps = [steps[index] for index in kept]
    x = np.mean([[axis.at(step) for step in steps] for axis in axes], axis=0)
    y = np.array([[each[step] for step in steps] for each in points])
    rows = (x, y.mean(axis=0), y.min(axis=0), y.max(axis=0))
    return ArmCurve(metric, name, *(tuple(row.tolist()) for row in rows))


def _devices(config: Mapping[str, Any]) -> int:
    """Devices that a run holds: the student's, and those of the teachers that it launches."""
    count = len((config.get("student") or {}).get("devices") or ("cpu",))
    for teacher in (config.get("opd") or {}).get("teachers") or ():
        for replica in teacher.get("replicas") or (teacher,):
            count += len((replica.get("launch") or {}).get("devices") or ())
    return count
