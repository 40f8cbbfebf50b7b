"""What the driver leaves in the run directory for the flow: ``result.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd_core.training.files import RESULT_FILE

if TYPE_CHECKING:  # the flow reads results without importing torch
    from opd_core.training.loop import Metrics, TrainOutcome

AVERAGED_STEPS = 5


@dataclass(frozen=True, slots=True)
class Span:
    """A quantity before and after training, each with its standard error; None where unknown."""

    before: float | None = None
    after: float | None = None
    before_stderr: float | None = None
    after_stderr: float | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    """``status`` is ``completed`` or ``failed``; a failure carries its error's type and words."""

    status: str
    error_type: str = ""
    error: str = ""
    train_steps: int = 0
    accuracy: Span = Span()
    opd_reverse_kl: Span = Span()
    groups: dict[str, int] = field(default_factory=dict)
    survivors: str = ""
    prompts: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    student_path: str = ""

    def write(self, run_dir: Path) -> None:
        """Write ``result.json``; it appears whole or not at all."""
        partial = run_dir / (RESULT_FILE + ".partial")
        partial.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")
        os.replace(partial, run_dir / RESULT_FILE)


def read_result(run_dir: Path) -> RunResult | None:
    """The driver's result, or None if it left none (it was killed)."""
    path = run_dir / RESULT_FILE
    if not path.is_file():
        return None
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name in ("accuracy", "opd_reverse_kl"):
        data[name] = Span(**data[name])
    return RunResult(**data)


def completed(
    outcome: TrainOutcome, prompts: dict[str, int], seconds: dict[str, float]
) -> RunResult:
    """The result of a loop that ran to its end."""
    evaluations = [outcome.evaluations[step] for step in sorted(outcome.evaluations)]
    accuracy = Span()
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        accuracy = Span(first.accuracy, last.accuracy, first.accuracy_stderr, last.accuracy_stderr)
    return RunResult(
        status="completed",
        train_steps=len(outcome.steps),
        accuracy=accuracy,
        opd_reverse_kl=reverse_kl_span(outcome.steps),
        groups={k: outcome.survivors.by_status[k] for k in ("completed", "filtered", "failed")},
        survivors=outcome.survivors.table(),
        prompts=prompts,
        seconds=seconds | _loop_seconds(outcome.steps) | {"evaluation": outcome.evaluation_s},
        student_path=outcome.student_path,
    )


def reverse_kl_span(steps: Sequence[Metrics]) -> Span:
    """Token-weighted mean of ``opd_reverse_kl`` over the first and the last five train steps."""
    if not steps or "opd_reverse_kl" not in steps[0]:
        return Span()
    before, before_stderr = _token_mean(steps[:AVERAGED_STEPS])
    after, after_stderr = _token_mean(steps[-AVERAGED_STEPS:])
    return Span(before, after, before_stderr, after_stderr)


def _token_mean(steps: Sequence[Metrics]) -> tuple[float, float]:
    tokens = [step["response_tokens"] for step in steps]
    total = sum(tokens) or 1.0
    mean = sum(n * s["opd_reverse_kl"] for n, s in zip(tokens, steps, strict=True)) / total
    variance = sum(
        (n * s["opd_reverse_kl_stderr"]) ** 2 for n, s in zip(tokens, steps, strict=True)
    )
    return mean, variance**0.5 / total


def _loop_seconds(steps: Sequence[Metrics]) -> dict[str, float]:
    names = ("sampling", "scoring", "training", "weight_sync")
    return {name: sum(step[f"time/{name}_s"] for step in steps) for name in names}
