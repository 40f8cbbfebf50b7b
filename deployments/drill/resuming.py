"""Whether a run that was ended can go on, found out on a copy of its directory."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from opd_core.errors import OPDError
from opd_core.training.attempts import COMPLETED, continue_run, read_history
from opd_core.training.checkpoint_folder import CheckpointFolder
from opd_core.training.files import CHECKPOINTS_FOLDER
from opd_core.training.forks import newest_checkpoint
from opd_core.training.lineage import plan_run

TEARDOWN_S = 20.0


def why_not_resumable(run_dir: Path) -> str:
    """The reason why ``opd run --resume`` would refuse this run; empty if it would not. Nothing of
    the run is touched. A run that has completed is taken to be asked for one more train step."""
    with tempfile.TemporaryDirectory(prefix="opd-drill-") as folder:
        copy = Path(folder) / run_dir.name
        shutil.copytree(run_dir, copy)
        try:
            history = read_history(copy)
            further = []
            if history.attempts[-1].status == COMPLETED:
                further = ["training.steps=1000000", "training.schedule=constant"]
            plan = plan_run(copy, further, resume=str(copy))
            checkpoint = newest_checkpoint(copy)
            if checkpoint is not None:
                CheckpointFolder(copy / CHECKPOINTS_FOLDER, keep=1, keep_every=0).facts(checkpoint)
            continue_run(
                copy, history.fingerprints, "", min(plan.config.run.teardown_s, TEARDOWN_S)
            )
        except OPDError as error:
            return str(error)
    return ""


def resumes_from(run_dir: Path) -> int:
    """The train step of the newest checkpoint, 0 if there is none."""
    checkpoint = newest_checkpoint(run_dir)
    return 0 if checkpoint is None else checkpoint.train_step
