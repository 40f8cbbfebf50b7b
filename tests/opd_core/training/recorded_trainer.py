"""A trainer in a process of its own, on recorded batches only; to be killed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch

from opd_core.config import ExperimentConfig
from tests.opd_core.training.whole_loop import train


def continue_run(resolved: dict[str, Any], run_dir: Path) -> None:
    """Go on from what the run directory holds, to the end."""
    torch.set_num_threads(1)
    asyncio.run(train(ExperimentConfig.model_validate(resolved), run_dir))
