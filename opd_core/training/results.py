"""What a run came to: read from its journal, so that a run that was ended has its numbers too.

The driver adds ``result.json``: how its job ended, and what no metric holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from opd_core.tracking.journal import JournalRecord
from opd_core.training.files import RESULT_FILE
from opd_core.whole_file import write_whole

AVERAGED_STEPS = 5
SHARES = ("sampling", "scoring", "training", "weight_sync")
GROUPS, LOST, PASS_AT = "groups/", "lost/", "eval/pass_at_"


@dataclass(frozen=True, slots=True)
class Span:
    """A quantity before and after training, each with its standard error; None where unknown."""

    before: float | None = None
    after: float | None = None
    before_stderr: float | None = None
    after_stderr: float | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    """How the job ended. ``status`` is ``completed`` or ``failed``; a failure carries its error's
    type and words, and is ``restartable`` where another job can go on from what is on disk.
    ``stopped`` says why training ended before its last step."""

    status: str
    error_type: str = ""
    error: str = ""
    survivors: str = ""
    prompts: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    student_path: str = ""
    restartable: bool = False
    stopped: str = ""

    def write(self, run_dir: Path) -> None:
        """Write ``result.json``; it appears whole or not at all."""
        write_whole(run_dir / RESULT_FILE, json.dumps(asdict(self), indent=2))


def read_result(run_dir: Path) -> RunResult | None:
    """The driver's result, or None if it left none (it was killed)."""
    path = run_dir / RESULT_FILE
    if not path.is_file():
        return None
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return RunResult(**data)


@dataclass(frozen=True, slots=True)
class RunNumbers:
    """What the journal says of a run, however far it came.

    ``groups`` counts by status, ``lost`` by cause, over all train steps. ``pass_at`` holds the last
    pass@k by k.
    """

    train_steps: int
    accuracy: Span
    opd_reverse_kl: Span
    groups: dict[str, int]
    lost: dict[str, int]
    pass_at: dict[str, float]
    seconds: dict[str, float]


def summarise(records: Sequence[JournalRecord], since_s: float = 0.0) -> RunNumbers:
    """The numbers of a run from its journal; seconds are counted from ``since_s`` (unix time) on,
    so that those of earlier attempts are left out."""
    metrics = [record.metrics for record in records]
    steps = [m for m in metrics if "time/step_s" in m]
    recent = [record.metrics for record in records if record.time_s >= since_s]
    seconds = {name: sum(m.get(f"time/{name}_s", 0.0) for m in recent) for name in SHARES}
    seconds["evaluation"] = sum(m.get("time/evaluation_s", 0.0) for m in recent)
    return RunNumbers(
        train_steps=len(steps),
        accuracy=_accuracy([m for m in metrics if "eval/accuracy" in m]),
        opd_reverse_kl=reverse_kl_span(steps),
        groups=_counts(metrics, GROUPS),
        lost=_counts(metrics, LOST),
        pass_at=_pass_at(metrics),
        seconds=seconds,
    )


def reverse_kl_span(steps: Sequence[Mapping[str, float]]) -> Span:
    """Token-weighted mean of ``opd_reverse_kl`` over the first and the last five train steps; over
    fewer where the two would overlap."""
    if not steps or "opd_reverse_kl" not in steps[0]:
        return Span()
    count = min(AVERAGED_STEPS, max(len(steps) // 2, 1))
    before, before_stderr = _token_mean(steps[:count])
    if len(steps) == 1:
        return Span(before, before_stderr=before_stderr)
    after, after_stderr = _token_mean(steps[-count:])
    return Span(before, after, before_stderr, after_stderr)


def _accuracy(evaluations: Sequence[Mapping[str, float]]) -> Span:
    if not evaluations:
        return Span()
    first, last = evaluations[0], evaluations[-1]
    if len(evaluations) == 1:
        return Span(first["eval/accuracy"], before_stderr=first["eval/accuracy_stderr"])
    return Span(
        first["eval/accuracy"],
        last["eval/accuracy"],
        first["eval/accuracy_stderr"],
        last["eval/accuracy_stderr"],
    )


def _token_mean(steps: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    tokens = [step["response_tokens"] for step in steps]
    total = sum(tokens) or 1.0
    mean = sum(n * s["opd_reverse_kl"] for n, s in zip(tokens, steps, strict=True)) / total
    variance = sum(
        (n * s["opd_reverse_kl_stderr"]) ** 2 for n, s in zip(tokens, steps, strict=True)
    )
    return mean, variance**0.5 / total


def _pass_at(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    last = {
        name.removeprefix(PASS_AT): value
        for record in metrics
        for name, value in record.items()
        if name.startswith(PASS_AT) and name.removeprefix(PASS_AT).isdecimal()
    }
    return dict(sorted(last.items(), key=lambda item: int(item[0])))


def _counts(metrics: Sequence[Mapping[str, float]], prefix: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for step in metrics:
        for name, value in step.items():
            if name.startswith(prefix):
                key = name.removeprefix(prefix)
                counts[key] = counts.get(key, 0) + int(value)
    return counts
