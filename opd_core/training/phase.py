"""What the training job does right now, told to whoever looks from outside: ``phase.json``.

A train step of a small model lasts half a second and tells of itself when it is over. A rehearsal
that ends a run in the middle of a weight sync has to see the sync begin.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import orjson

from opd_core.training.files import PHASE_FILE
from opd_core.whole_file import write_whole

Phase = Literal["sampling", "training", "weight sync", "checkpoint", "evaluation"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, slots=True)
class PhaseState:
    """The phase that began at ``since`` (seconds since the epoch), in or after a train step."""

    phase: str
    train_step: int
    since: float


def tell_phase(run_dir: Path, phase: Phase, train_step: int) -> None:
    """Write down that a phase begins. It costs a tenth of a millisecond and never raises: nobody's
    training depends on it."""
    state = PhaseState(phase, train_step, time.time())
    with contextlib.suppress(OSError):
        write_whole(run_dir / PHASE_FILE, orjson.dumps(asdict(state)))


def read_phase(run_dir: Path) -> PhaseState | None:
    """The phase that began last, None before the first."""
    try:
        return PhaseState(**orjson.loads((run_dir / PHASE_FILE).read_bytes()))
    except FileNotFoundError:
        return None
