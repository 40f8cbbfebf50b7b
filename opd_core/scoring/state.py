"""How scoring goes, as the training job tells it to whoever keeps the teachers alive."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One server as its client sees it; see :class:`~opd_core.scoring.replicas.Replica`."""

    away: str = ""
    changed: int = 0
    in_flight: int = 0
    progress_at: float = 0.0


@dataclass(frozen=True, slots=True)
class ScoringState:
    """One teacher as it was at ``told_at``, in seconds since the epoch."""

    told_at: float
    replicas: tuple[ReplicaState, ...]


_ALL = TypeAdapter(dict[str, ScoringState])


def state_to_json(states: dict[str, ScoringState]) -> str:
    """All teachers of a run, by name."""
    return _ALL.dump_json(states).decode()


def read_state(path: Path) -> dict[str, ScoringState]:
    """The inverse of :func:`state_to_json`, from a file; {} if it is not there yet. Raises
    ValueError."""
    return _ALL.validate_json(path.read_bytes()) if path.exists() else {}
