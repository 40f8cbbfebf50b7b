"""What each held-out question came to, kept for every evaluation: two runs are compared question by
question.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from opd_core.errors import DataError
from opd_core.rollout_json import from_json, from_plain, to_json, to_plain
from opd_core.training.step_files import step_files
from opd_core.whole_file import write_whole


@dataclass(frozen=True, slots=True)
class QuestionResult:
    """A question's answers: index i of each tuple is sample i.

    ``key`` is a hash of data source, prompt and ground truth, by which two runs find the same
    question, whatever its ``row`` in either file. Rewards are the judge's; lengths are in response
    tokens.
    """

    key: str
    row: int
    data_source: str
    rewards: tuple[float, ...]
    response_tokens: tuple[int, ...]
    truncated: tuple[bool, ...]

    @property
    def mean(self) -> float:
        """Mean reward of its answers."""
        return sum(self.rewards) / len(self.rewards)


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """One evaluation: after ``train_step`` (0: before training), with ``samples`` answers a
    question."""

    train_step: int
    samples: int
    temperature: float
    seed: int
    questions: tuple[QuestionResult, ...]


def write_evaluation(path: Path, record: EvaluationRecord) -> None:
    """Write it durably; it appears whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_json(to_plain(record)), durable=True)


def read_evaluation(path: Path) -> EvaluationRecord:
    """The inverse of :func:`write_evaluation`. Raises :class:`DataError`, naming the file."""
    try:
        record: EvaluationRecord = from_plain(EvaluationRecord, from_json(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected an evaluation's record, got {error}") from None
    return record


def read_evaluations(folder: Path) -> tuple[EvaluationRecord, ...]:
    """All of a run, in the order of their train steps; none where there is no folder. Raises
    :class:`DataError`."""
    return tuple(read_evaluation(path) for path in step_files(folder).values())
