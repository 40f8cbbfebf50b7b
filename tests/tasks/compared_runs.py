"""Run directories to compare: arms that differ in their learning rate, runs that differ in seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from opd_core.training.files import CONFIG_FILE, RUN_FILE
from tests.opd_core.analysis.run_builder import RunBuilder

FAST, SLOW = "tiny", "tiny-slow"


def write_run(root: Path, run_id: str, *, seed: int = 1, name: str = FAST, **tracking: Any) -> Path:
    """A run directory under ``root``; ``tracking`` are settings of its recipe."""
    fast = name == FAST
    made = RunBuilder(steps=4, questions=24, seed=seed if fast else 100 + seed, rollouts_kept=0)
    directory = made.write(root / run_id)
    training = {"steps": 4, "learning_rate": 1e-3 if fast else 1e-4}
    _change(directory / CONFIG_FILE, name=name, seed=seed, tracking=tracking, training=training)
    _change(directory / RUN_FILE, run_id=run_id)
    return directory


def write_arms(root: Path, **tracking: Any) -> list[str]:
    """Two arms of two seeds; returns the run ids."""
    return [
        write_run(root, f"{name}-{seed}", seed=seed, name=name, **tracking).name
        for name in (FAST, SLOW)
        for seed in (1, 2)
    ]


def _change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_bytes()) | fields))
