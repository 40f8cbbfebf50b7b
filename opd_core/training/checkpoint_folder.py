"""Checkpoints on disk: which are whole, which is the newest, which may go.

``step-000020.partial/`` is being written (or was, by a run that is dead) and counts for nothing.
``step-000020/`` is whole: everything in it was on the disk before the name appeared. One driver
writes into a folder at a time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd_core.errors import TrainingError
from opd_core.whole_file import PARTIAL, rename_whole, tree_to_disk, write_whole

FACTS = "loop.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint after ``train_step`` train steps; its folder may hold more than is named
    here."""

    train_step: int
    path: Path

    @property
    def state(self) -> Path:
        """Shards of the learner's state, from all ranks."""
        return self.path / "state"

    @property
    def student(self) -> Path:
        """The student in Hugging Face format, where it was exported."""
        return self.path / "student"


class CheckpointFolder:
    """The checkpoints of one run.

    Kept are the ``keep`` newest (at least one) and, for ever, those whose step is a multiple of
    ``keep_every`` (0: none).
    """

    def __init__(self, folder: Path, *, keep: int, keep_every: int) -> None:
        self._folder = folder
        self._keep = keep
        self._keep_every = keep_every

    def begin(self, train_step: int) -> Checkpoint:
        """An empty folder to write into, in place of what a dead run left of the same step.

        Raises :class:`TrainingError` if that step has a whole checkpoint already.
        """
        if self._path(train_step).exists():
            raise TrainingError(
                f"{self._path(train_step)} exists already: a run goes on after its newest "
                "checkpoint; move this one away if it is not of this run"
            )
        partial = self._partial(train_step)
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        return Checkpoint(train_step, partial)

    def commit(self, checkpoint: Checkpoint, facts: Mapping[str, Any]) -> Checkpoint:
        """Make a written checkpoint whole, then remove those that are kept no longer.

        ``facts`` must fit JSON. Raises OSError; the checkpoint is then still partial.
        """
        told = {**facts, "train_step": checkpoint.train_step}
        write_whole(checkpoint.path / FACTS, json.dumps(told, indent=1))
        tree_to_disk(checkpoint.path)
        whole = Checkpoint(checkpoint.train_step, self._path(checkpoint.train_step))
        rename_whole(checkpoint.path, whole.path)
        self._prune()
        return whole

    def newest(self) -> Checkpoint | None:
        """The whole checkpoint of the latest step."""
        whole = self._whole()
        return whole[-1] if whole else None

    def oldest_kept(self) -> int | None:
        """Step of the oldest of the ``keep`` newest: a run that goes on begins no earlier."""
        whole = self._whole()[-self._keep :]
        return whole[0].train_step if whole else None

    def facts(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """What was committed with it, and ``train_step``.

        Raises :class:`TrainingError` if that cannot be read.
        """
        path = checkpoint.path / FACTS
        try:
            facts = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise TrainingError(_unreadable(path, str(error))) from error
        if not isinstance(facts, dict) or facts.get("train_step") != checkpoint.train_step:
            raise TrainingError(_unreadable(path, f"no facts of step {checkpoint.train_step}"))
        return facts

    def clean(self) -> None:
        """Remove what a killed run left half written or half removed."""
        for partial in self._folder.glob("step-*" + PARTIAL):
            shutil.rmtree(partial)

    def _path(self, train_step: int) -> Path:
        return self._folder / f"step-{train_step:06d}"

    def _partial(self, train_step: int) -> Path:
        path = self._path(train_step)
        return path.with_name(path.name + PARTIAL)

    def _whole(self) -> list[Checkpoint]:
        """The oldest first."""
        found = []
        for path in self._folder.glob("step-*"):
            name = re.fullmatch(r"step-(\d{6,})", path.name)
            if name and (path / FACTS).is_file():
                found.append(Checkpoint(int(name[1]), path))
        return sorted(found, key=lambda c: c.train_step)

    def _prune(self) -> None:
        for old in self._whole()[: -self._keep]:
            if self._keep_every and old.train_step % self._keep_every == 0:
                continue
            partial = self._partial(old.train_step)
            os.rename(old.path, partial)  # else a kill in the middle leaves a whole name, half full
            shutil.rmtree(partial, ignore_errors=True)  # `clean` has another try


def _unreadable(path: Path, why: str) -> str:
    return f"{path} cannot be read ({why}): move {path.parent} away to resume from an older one"
