"""Where the student's servers answer: a file of the run directory, written by the flow, again when
a server was started again, and read by the training job."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from opd_core.config import Backend
from opd_core.whole_file import write_whole


@dataclass(frozen=True, slots=True)
class Samplers:
    """The servers that sample the student, by their number."""

    backend: Backend
    endpoints: tuple[str, ...]


def write_samplers(file: Path, samplers: Samplers) -> None:
    """Write the file; it appears whole or not at all. Raises OSError."""
    write_whole(file, json.dumps(asdict(samplers), indent=2))


def read_samplers(file: Path) -> Samplers:
    """What the flow wrote last. Raises OSError or ValueError."""
    told = json.loads(file.read_text(encoding="utf-8"))
    return Samplers(told["backend"], tuple(told["endpoints"]))
