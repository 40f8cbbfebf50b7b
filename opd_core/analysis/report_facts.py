"""What a run's report says in numbers and lines: from its data to words, nothing drawn."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import fmean, stdev
from typing import Any

from opd_core.analysis.charts import shown_number
from opd_core.analysis.detectors import RunFacts, detect
from opd_core.analysis.run_data import RunData
from opd_core.training.evaluation_records import EvaluationRecord, QuestionResult

TONES = {"completed": "good", "cancelled": "warn"}
PARTS = ("sampling", "scoring", "training", "weight_sync")
CLOSE = 1e-9
FINDING = ("name", "train_step", "level", "evidence", "cause", "cure")
MAX_FINDINGS = 50
MAX_SOURCES, OTHERS = 20, "all others"


@dataclass(frozen=True)
class Fact:
    """One tile of the head: ``note`` is small and below; ``wide`` takes two columns."""

    name: str
    value: str
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Share:
    """A part of the time, with its colour's number."""

    name: str
    seconds: float
    share: float
    colour: int


@dataclass(frozen=True)
class SourceChange:
    """Held-out questions of one data source, at the first and the last evaluation."""

    data_source: str
    questions: int
    before: str
    after: str
    better: int
    worse: int


def head_facts(run: RunData) -> list[Fact]:
    """The numbers that a reader looks for first; those that are not known are left out."""
    summary, last = run.summary, run.series.last
    seconds = _mapping(summary.get("seconds")).get("total")
    money = last("total/money")
    currency = _mapping(run.config.get("cost")).get("currency", "")
    facts = [
        _change("Held-out accuracy", summary.get("accuracy"), percent=True),
        _change("opd_reverse_kl", summary.get("opd_reverse_kl"), note="nats / token"),
        Fact("Train steps", str(summary["train_steps"]), str(summary.get("stopped", "")))
        if "train_steps" in summary
        else None,
        _total("Student tokens", _student_tokens(run), "trained on"),
        _total("Teacher tokens", last("total/teacher_tokens"), "scored"),
        _total("Device-seconds", last("total/device_seconds"), "of all devices held"),
        None if money is None else Fact("Cost", f"{money:,.2f} {currency}".strip()),
        None if seconds is None else Fact("Duration", duration(float(seconds))),
    ]
    return [fact for fact in facts if fact is not None]


def findings_of(run: RunData) -> list[dict[str, Any]] | None:
    """What was found in the run; looked for now where the summary does not say. None where there is
    nothing to look at."""
    found = run.summary.get("findings")
    if found is None:
        if not (run.config and run.series.names):
            return None
        found = map(asdict, detect(run.series, RunFacts.of(run.config)))
    return [dict.fromkeys(FINDING, "") | finding for finding in found][:MAX_FINDINGS]


def groups_of(summary: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Groups by status, and those that were lost by cause; empty where they were not counted."""
    counted, lost = summary.get("groups") or {}, summary.get("lost") or {}
    return (
        {str(status): int(count) for status, count in counted.items()},
        {str(cause): int(count) for cause, count in lost.items()},
    )


def sinks_of(summary: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What became of the records in each sink, by its name."""
    return {str(name): dict(sink) for name, sink in (summary.get("tracking") or {}).items()}


def duration(seconds: float) -> str:
    """``57.9 s``, ``12 min 3 s``, ``4 h 12 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def time_shares(run: RunData) -> list[Share]:
    """Where the time of the train steps went, over the whole run; empty where it is not known."""
    whole = float(run.series.of("time/step_s")[1].sum())
    if not whole > 0:
        return []
    parts = {name: float(run.series.of(f"time/{name}_s")[1].sum()) for name in PARTS}
    parts["other"] = max(whole - sum(parts.values()), 0.0)
    return [
        Share(name.replace("_", " "), seconds, seconds / max(whole, sum(parts.values())), number)
        for number, (name, seconds) in enumerate(parts.items())
        if seconds > 0
    ]


def stage_seconds(run: RunData) -> list[tuple[str, str]]:
    """The stages of the experiment and how long each took."""
    seconds = _mapping(run.summary.get("seconds"))
    return [(name.replace("_", " "), duration(float(value))) for name, value in seconds.items()]


def tracking_said(run: RunData) -> str:
    """What tracking cost the train loop, in a sentence."""
    shares = run.series.of("time/tracking_share")[1]
    shares = shares[[math.isfinite(value) for value in shares.tolist()]] if shares.size else shares
    if not shares.size:
        return ""
    return (
        f"The train loop spent {shares.mean():.2%} of its step time inside tracking calls "
        f"(at most {shares.max():.2%} in one step)."
    ).replace("%", " %")


def held_out(records: Sequence[EvaluationRecord]) -> list[SourceChange]:
    """The first against the last evaluation, question by question; small data sources together."""
    if not records:
        return []
    asked = Counter(question.data_source for question in records[-1].questions)
    shown = {source for source, _ in asked.most_common(MAX_SOURCES)}
    first, last = (_by_source(record.questions, shown) for record in (records[0], records[-1]))
    changes = []
    for source in (*sorted(shown), OTHERS):
        early, late = first[source], last[source]
        if not early and not late:
            continue
        before = {question.key: question.mean for question in early}
        moved = [q.mean - before[q.key] for q in late if q.key in before]
        changes.append(
            SourceChange(
                source,
                max(len(early), len(late)),
                _mean_said(early),
                _mean_said(late),
                sum(change > CLOSE for change in moved),
                sum(change < -CLOSE for change in moved),
            )
        )
    return changes


def attempts_said(provenance: Mapping[str, Any]) -> list[dict[str, str]]:
    """Each attempt's code and machine as pairs of words; what is not known is left out."""
    said = []
    for attempt in provenance.get("attempts") or []:
        changes = attempt.get("git_changes")
        pairs = {
            "started": _when(attempt.get("started_at")),
            "code": str(attempt.get("git_commit") or ""),
            "uncommitted changes": f"yes, hash {changes}" if changes else "none",
            "Python": str(attempt.get("python") or ""),
            "platform": str(attempt.get("platform") or ""),
            "host": str(attempt.get("host") or ""),
            "CPU": str(attempt.get("cpu") or ""),
            "GPUs": ", ".join(map(str, attempt.get("gpus") or ())) or "none",
            "packages": ", ".join(
                f"{name} {version}" for name, version in _mapping(attempt.get("packages")).items()
            ),
        }
        said.append({name: value for name, value in pairs.items() if value})
    return said


def _change(name: str, numbers: Any, *, percent: bool = False, note: str = "") -> Fact | None:
    """``before → after``, with their standard errors below."""
    told = _mapping(numbers)
    sides = [
        (float(value), told.get(f"{side}_stderr"))
        for side in ("before", "after")
        if (value := told.get(side)) is not None
    ]
    if not sides:
        return None
    values = " → ".join(shown_number(value, percent) for value, _ in sides)
    errors = " and ".join(
        f"± {shown_number(error, percent)}" for _, error in sides if error is not None
    )
    return Fact(name, values, ", ".join(part for part in (errors, note) if part), wide=True)


def _total(name: str, value: float | None, note: str) -> Fact | None:
    return Fact(name, f"{value:,.0f}", note) if value else None


def _student_tokens(run: RunData) -> float | None:
    if (total := run.series.last("total/student_tokens")) is not None:
        return total
    tokens = run.series.of("response_tokens")[1]
    return float(tokens.sum()) if tokens.size else None


def _by_source(
    questions: Sequence[QuestionResult], shown: Collection[str]
) -> defaultdict[str, list[QuestionResult]]:
    found: defaultdict[str, list[QuestionResult]] = defaultdict(list)
    for question in questions:
        if question.rewards:
            source = question.data_source
            found[source if source in shown else OTHERS].append(question)
    return found


def _mean_said(questions: Sequence[QuestionResult]) -> str:
    if not questions:
        return ""
    means = [question.mean for question in questions]
    if len(means) < 2:
        return shown_number(means[0], percent=True)
    stderr = stdev(means) / math.sqrt(len(means))
    return f"{shown_number(fmean(means), True)} ± {shown_number(stderr, True)}"


def _when(started_at: Any) -> str:
    if not isinstance(started_at, int | float):
        return str(started_at or "")
    return f"{datetime.fromtimestamp(started_at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
