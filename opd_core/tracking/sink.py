"""What a sink is, and how the end of a run is told to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from opd_core.tracking.journal import JournalRecord

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file or directory to keep with the run, under ``folder`` (empty is the top)."""

    path: Path
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """How the run ended, and what is to be kept with it, in this order: artifacts, tags, status.
    ``at_s`` is when, in unix time; None is when it is told. ``complete`` says that the whole
    journal was sent before."""

    status: RunStatus
    tags: Mapping[str, str] = field(default_factory=dict)
    artifacts: tuple[Artifact, ...] = ()
    at_s: float | None = None
    complete: bool = True


class Sink(Protocol):
    """A copy of the journal elsewhere. Created, used and closed by one thread.

    A method that raises is called again with the same arguments; what it had already brought to its
    place must not appear there twice.
    """

    @property
    def reference(self) -> str:
        """Where to find the copy: an MLflow run id, a directory."""

    @property
    def dropped(self) -> int:
        """Values that were left out because they are not finite."""

    def log(self, records: Sequence[JournalRecord]) -> None:
        """Bring these records, in order."""

    def finish(self, ending: Ending) -> tuple[str, ...]:
        """Record the ending; the answer names what was left out for good (a missing file)."""

    def close(self) -> None:
        """Let go of files and connections."""
