"""A new run that begins where another one stands: from its newest checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from pydantic.dataclasses import dataclass

from opd_core.agent_loop.collect import asked_again
from opd_core.config import RunConfig
from opd_core.errors import ConfigError
from opd_core.training.checkpoint_folder import FACTS, Checkpoint, CheckpointFolder
from opd_core.training.files import (
    CHECKPOINTS_FOLDER,
    EVALUATIONS_FOLDER,
    JOURNAL_FILE,
    TOKEN_KL_FOLDER,
)
from opd_core.training.step_files import step_files
from opd_core.whole_file import write_whole


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """The run, and the checkpoint of it by its train step, from which another run began."""

    run_id: str
    train_step: int


def name_of(run_dir: Path) -> str:
    """The run as the command line finds it: by its id under the default run root."""
    return run_dir.name if run_dir.parent == RunConfig().root_dir else str(run_dir)


def newest_checkpoint(run_dir: Path) -> Checkpoint | None:
    """The run's newest whole checkpoint."""
    return CheckpointFolder(run_dir / CHECKPOINTS_FOLDER, keep=1, keep_every=0).newest()


def checkpoint_to_fork(run_dir: Path) -> Checkpoint:
    """The newest checkpoint. Raises :class:`ConfigError` where there is none."""
    checkpoint = newest_checkpoint(run_dir)
    if checkpoint is None:
        raise ConfigError(
            f"{run_dir} holds no checkpoint to begin a new run from (training.checkpoint_every): "
            f"start a new run from its recipe, or continue it: opd run --resume {name_of(run_dir)}"
        )
    return checkpoint


def fork_run(source: Path, target: Path) -> ForkPoint:
    """Give the new run ``target`` the newest checkpoint of ``source``, and journal, evaluations
    and token KL up to it.

    The files are linked, not copied, where the file system can. Raises :class:`ConfigError`.
    """
    checkpoint = checkpoint_to_fork(source)
    try:
        place = target / CHECKPOINTS_FOLDER / checkpoint.path.name
        shutil.copytree(checkpoint.path, place, copy_function=_link_or_copy)
        _ask_again(place / FACTS)
        for folder in (EVALUATIONS_FOLDER, TOKEN_KL_FOLDER):
            _take_files(source / folder, target / folder, checkpoint.train_step)
        lines = (source / JOURNAL_FILE).read_bytes().splitlines(keepends=True)
    except (OSError, shutil.Error) as error:  # a living run may have pruned it meanwhile
        raise ConfigError(f"{checkpoint.path} cannot be taken over ({error}); try again") from None
    whole = [line for line in lines if line.endswith(b"\n")]
    kept = [line for line in whole if json.loads(line)["train_step"] <= checkpoint.train_step]
    write_whole(target / JOURNAL_FILE, b"".join(kept))
    return ForkPoint(source.name, checkpoint.train_step)


def _take_files(source: Path, target: Path, train_step: int) -> None:
    """Those of the train steps up to ``train_step``; a run may have none."""
    for step, file in step_files(source).items():
        if step <= train_step:
            target.mkdir(exist_ok=True)
            _link_or_copy(str(file), str(target / file.name))


def _ask_again(file: Path) -> None:
    """Groups that wait in a checkpoint were sampled, judged and scored by other settings."""
    facts = json.loads(file.read_bytes())
    facts["loop"] = asked_again(facts["loop"])
    write_whole(file, json.dumps(facts))


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
