"""A comparison as MLflow is to keep it: its place, its params, numbers and tags."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from opd_core.analysis.comparison_text import comparison_markdown, title
from opd_core.analysis.outcome import Comparison
from opd_core.analysis.run_data import RunData
from opd_core.config import TrackingConfig
from opd_core.tracking.mlflow_comparison import ComparedRun, TrackedComparison
from opd_core.tracking.mlflow_sink import artifact_root, flatten_params, tracking_uri

BASELINE = "baseline"
"""The verdict on the arm that the others are compared with."""


def tracked_comparison(
    comparison: Comparison, runs: Sequence[RunData], files: tuple[Path, ...]
) -> TrackedComparison | None:
    """The comparison with these files as the MLflow of the first tracked run is to keep it; None
    where no run is tracked."""
    settings = {run.run_id: _tracking(run) for run in runs}
    home = next((run for run in runs if settings[run.run_id].mlflow), None)
    if home is None:
        return None
    tracking, root = settings[home.run_id], home.directory.parent
    uri = tracking_uri(tracking, root)
    return TrackedComparison(
        comparison_id=comparison_id(comparison),
        name=title(comparison),
        tracking_uri=uri,
        artifact_root=artifact_root(uri),
        experiment=tracking.experiment,
        verdict=_overall(comparison),
        baseline=comparison.arms[0].label,
        note=comparison_markdown(comparison),
        params=flatten_params(asdict(comparison.target)),
        metrics=dict(_metrics(comparison)),
        runs=tuple(_compared_runs(comparison, settings)),
        artifacts=files,
    )


def comparison_id(comparison: Comparison) -> str:
    """The same for the same runs, baseline and target."""
    arms = [sorted(run.run_id for run in arm.runs) for arm in comparison.arms]
    asked = [arms[0], sorted(arms[1:]), asdict(comparison.target)]
    asked.append([reference.label for reference in comparison.references])
    return f"comparison-{hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]}"


def _compared_runs(
    comparison: Comparison, settings: Mapping[str, TrackingConfig]
) -> Iterator[ComparedRun]:
    """Each run once, also one that was compared with itself."""
    verdicts = {pair.label: pair.verdict for pair in comparison.pairs}
    labels: dict[str, str] = {}
    for arm in comparison.arms:
        for run in arm.runs:
            labels.setdefault(run.run_id, arm.label)
    for run_id, label in labels.items():
        yield ComparedRun(
            run_id=run_id,
            arm=label,
            verdict=verdicts.get(label, BASELINE),
            experiment=settings[run_id].experiment,
        )


def _tracking(run: RunData) -> TrackingConfig:
    """Also of a run whose recipe has keys that this version does not know."""
    told = run.config.get("tracking") or {}
    known = {key: value for key, value in told.items() if key in TrackingConfig.model_fields}
    return TrackingConfig.model_validate(known)


def _overall(comparison: Comparison) -> str:
    """The verdict; of several arms with whose it is."""
    if len(comparison.pairs) == 1:
        return comparison.pairs[0].verdict
    return "; ".join(f"{pair.label}: {pair.verdict}" for pair in comparison.pairs)


def _metrics(comparison: Comparison) -> Iterable[tuple[str, float]]:
    """What MLflow keeps as numbers, by arm."""
    for arm in comparison.arms:
        yield f"value/{arm.label}", arm.value
    for pair in comparison.pairs:
        yield f"difference/{pair.label}", pair.difference
        basis = {"models": pair.models, "training": pair.training}.get(pair.basis)
        if basis is not None:
            yield f"difference_low/{pair.label}", basis.low
            yield f"difference_high/{pair.label}", basis.high
        if pair.p is not None and pair.holm_p is not None:
            yield f"p_value/{pair.label}", pair.p
            yield f"p_value_holm/{pair.label}", pair.holm_p
