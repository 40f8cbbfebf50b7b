"""What each train step trains on, recorded before anything of its training is on the disk: a
resumed run repeats it from here.

Records are JSON in which numbers are exact. 64 rollouts of 16k tokens are 49 MB and take about two
seconds.
"""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd_core.agent_loop.survivors import Survivors
from opd_core.errors import TrainingError
from opd_core.rollout import Group
from opd_core.rollout_json import (
    from_json,
    from_plain,
    group_from_plain,
    group_to_plain,
    refused_as,
    to_json,
)
from opd_core.training.step_files import path_of, step_files
from opd_core.whole_file import write_whole

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The groups that a train step trains on, what became of all groups that it started, and the
    collector's state after it. Prompts come back from a file without their ``extra``."""

    train_step: int
    groups: tuple[Group, ...]
    survivors: Survivors
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Content:
    """What a file holds."""

    train_step: int
    groups: tuple[Any, ...]
    survivors: dict[str, Any]
    state: dict[str, Any]


class StepRecords:
    """A folder with one file per train step; files of other names are left alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path_of(self, train_step: int) -> Path:
        """Where the step's record is, if there is one."""
        return path_of(self._folder, train_step)

    def write(self, record: StepRecord) -> None:
        """Record a step, durably; raises :class:`TrainingError` if that fails."""
        path = self.path_of(record.train_step)
        content = {
            "train_step": record.train_step,
            "groups": [group_to_plain(group) for group in record.groups],
            "survivors": record.survivors.state(),
            "state": record.state,
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, to_json(content), durable=True)
        except OSError as error:
            said = "the disk is full: free space" if error.errno in FULL else "see to the folder"
            raise TrainingError(
                f"{path}: the groups of train step {record.train_step} cannot be recorded "
                f"({error.strerror}), so the run stops; {said} and resume it"
            ) from None

    def read(self, train_step: int) -> StepRecord | None:
        """The step's record, if there is one. Raises :class:`TrainingError`, naming the file, for
        what is no such record."""
        path = self.path_of(train_step)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise TrainingError(f"{path}: cannot be read ({error.strerror})") from None
        with refused_as(
            f"{path} is not the record of train step {train_step} (put it back as it was, or begin "
            "a new run from the newest checkpoint: opd run --fork)"
        ):
            content: Content = from_plain(Content, from_json(data))
            if content.train_step != train_step:
                raise TrainingError(f"it is of train step {content.train_step}")
            groups = tuple(group_from_plain(group) for group in content.groups)
            survivors = Survivors.restore(content.survivors)
        return StepRecord(train_step, groups, survivors, content.state)

    def steps(self) -> list[int]:
        """The train steps that are recorded, in their order."""
        return list(step_files(self._folder))

    def prune(self, through: int) -> None:
        """Remove the records of train steps up to ``through``; one that cannot be removed only
        costs its space, and a warning says so."""
        try:
            for step in self.steps():
                if step <= through:
                    self.path_of(step).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("an old step record cannot be removed: %s", error)
