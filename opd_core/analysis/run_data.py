"""A run directory as numbers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from opd_core.errors import DataError
from opd_core.tracking.journal import JournalRecord, read_all
from opd_core.training.attempts import read_history
from opd_core.training.evaluation_records import EvaluationRecord, read_evaluations
from opd_core.training.files import (
    CONFIG_FILE,
    EVALUATIONS_FOLDER,
    JOURNAL_FILE,
    PROVENANCE_FILE,
    SUMMARY_FILE,
)

T = TypeVar("T")
Steps = NDArray[np.int64]
Values = NDArray[np.float64]


class Series:
    """Metrics by name and train step; of several records of a step the last one counts."""

    def __init__(self, values: Mapping[str, Mapping[int, float]]) -> None:
        self._values = values

    @classmethod
    def from_records(cls, records: Iterable[JournalRecord]) -> Self:
        """The journal's records as series."""
        values: defaultdict[str, dict[int, float]] = defaultdict(dict)
        for record in records:
            for name, value in record.metrics.items():
                values[name][record.train_step] = value
        return cls(dict(values))

    @property
    def names(self) -> tuple[str, ...]:
        """All metrics, in the order of their first appearance."""
        return tuple(self._values)

    def of(self, name: str) -> tuple[Steps, Values]:
        """Train steps, ascending, and the metric's values there; both empty without it."""
        points = sorted(self._values.get(name, {}).items())
        steps = np.array([step for step, _ in points], dtype=np.int64)
        return steps, np.array([value for _, value in points], dtype=np.float64)

    def at(self, name: str, train_step: int) -> float | None:
        """The metric at a train step; None without it."""
        return self._values.get(name, {}).get(train_step)

    def last(self, name: str) -> float | None:
        """The metric at its last train step; None without it."""
        points = self._values.get(name, {})
        return points[max(points)] if points else None


@dataclass(frozen=True, slots=True)
class RunData:
    """One run. ``config`` and ``summary`` are plain data as they stand in their files: runs of
    earlier versions lack newer keys, and a run without its last word has an empty summary."""

    run_id: str
    directory: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    series: Series
    evaluations: tuple[EvaluationRecord, ...]
    provenance: dict[str, Any]
    fingerprints: dict[str, str]
    forked_from: str = ""
    """The run and the train step from which it began, ``RUN@STEP``; empty for one that began
    anew."""

    @property
    def name(self) -> str:
        """The recipe's name."""
        return str(self.config.get("name", self.run_id))

    @property
    def seed(self) -> int:
        """The recipe's seed."""
        return int(self.config.get("seed", 0))


def load_run_data(directory: Path, unreadable: dict[str, str] | None = None) -> RunData:
    """Read a run directory, of a run at any point of its life.

    Raises :class:`~opd_core.errors.ConfigError` for what is no run directory,
    :class:`~opd_core.errors.DataError` for a file that cannot be read. With ``unreadable`` such a
    file counts as one that is not there, and that takes down why, by the file's name.
    """

    def read(name: str, reader: Callable[[Path], T], missing: T) -> T:
        try:
            return reader(directory / name)
        except DataError as error:
            if unreadable is None:
                raise
            unreadable[name] = str(error)
            return missing

    history = read_history(directory)
    fork = history.forked_from
    return RunData(
        run_id=history.run_id,
        directory=directory,
        config=read(CONFIG_FILE, _config, {}),
        summary=read(SUMMARY_FILE, _json, {}),
        series=Series.from_records(read(JOURNAL_FILE, _records, [])),
        evaluations=read(EVALUATIONS_FOLDER, read_evaluations, ()),
        provenance=read(PROVENANCE_FILE, _json, {}),
        fingerprints=dict(history.fingerprints),
        forked_from=f"{fork.run_id}@{fork.train_step}" if fork else "",
    )


def _records(path: Path) -> list[JournalRecord]:
    try:
        return list(read_all(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _config(path: Path) -> dict[str, Any]:
    config = _json(path)
    if type(seed := config.get("seed", 0)) is not int:
        raise DataError(f"{path}: expected an integer as seed, got {seed!r}")
    return config


def _json(path: Path) -> dict[str, Any]:
    """What the file holds; empty where there is none."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected JSON, got {error}") from None
    if not isinstance(data, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data
