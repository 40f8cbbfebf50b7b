"""Where rollouts wait for a teacher that is away: in memory as always, and on disk as well, so that
an end of the run does not cost their sampling."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Self

from opd_core.errors import DataError
from opd_core.rollout import RolloutState
from opd_core.rollout_json import rollout_from_json, rollout_to_json
from opd_core.whole_file import PARTIAL, write_whole

FILE_NAME = re.compile(r"\d+-\d+\.json")

logger = logging.getLogger(__name__)


class ParkingLot:
    """A folder with one file per parked rollout; one run at a time uses it.

    Files are written and removed in the caller's thread: parking is rare.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parked: set[Path] = set()

    @property
    def parked(self) -> int:
        """Rollouts that wait for their teacher now, those that were loaded included."""
        return len(self._parked)

    def spot(self, rollout: RolloutState) -> ParkingSpot:
        """The rollout's place, empty until :meth:`ParkingSpot.park`. Ids must not be used twice."""
        return ParkingSpot(self, rollout)

    def load(self) -> list[RolloutState]:
        """What an earlier end left, in the order of ids; it stays on disk until its spots are left.

        Raises :class:`DataError`, naming the file, for one that holds no rollout or another than
        its name says, and OSError for one that cannot be read. A file that was still being written
        when its process was killed was never parked and is ignored.
        """
        if not self._folder.is_dir():
            return []
        found = sorted(path for path in self._folder.iterdir() if path.suffix != PARTIAL)
        rollouts = [self._read(path) for path in found]
        self._parked.update(found)
        return sorted(rollouts, key=lambda rollout: (rollout.group_id, rollout.index))

    def path_of(self, rollout: RolloutState) -> Path:
        """Where the rollout is parked, if it is."""
        return self._folder / f"{rollout.group_id:08d}-{rollout.index:04d}.json"

    def add(self, rollout: RolloutState) -> None:
        """Park a rollout. If it cannot be written it waits in memory only, and a warning says
        so."""
        path = self.path_of(rollout)
        self._parked.add(path)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, rollout_to_json(rollout), durable=True)
        except (OSError, TypeError, ValueError) as error:
            logger.warning(
                "%s cannot be written (%s): rollout %d of group %d waits for its teacher in memory "
                "only, and an end of the run loses it",
                *(path, error, rollout.index, rollout.group_id),
            )

    def remove(self, rollout: RolloutState) -> None:
        """The rollout waits no longer. Nothing happens to one that was not parked."""
        path = self.path_of(rollout)
        if path not in self._parked:
            return
        self._parked.remove(path)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s is not needed any more and cannot be removed: %s", path, error)

    def _read(self, path: Path) -> RolloutState:
        try:
            if not FILE_NAME.fullmatch(path.name):
                raise DataError("expected <group_id>-<index>.json")
            rollout = rollout_from_json(path.read_bytes())
            if self.path_of(rollout) != path:
                raise DataError(f"holds rollout {rollout.index} of group {rollout.group_id}")
        except (DataError, TypeError, ValueError) as error:  # the latter from an odd id
            raise DataError(
                f"{path}: is not a parked rollout: {error}; move the file elsewhere (its rollout, "
                "if it was one, is then sampled anew)"
            ) from None
        return rollout


class ParkingSpot:
    """One rollout's place, as a context manager around all attempts to score it.

    Leaving the block normally frees the place: the rollout is scored, or failed for good. Leaving
    it by an exception (the teacher does not come back, cancellation, the end of the run) keeps the
    file; so an error that is final must be caught inside the block.
    """

    def __init__(self, lot: ParkingLot, rollout: RolloutState) -> None:
        self._lot = lot
        self._rollout = rollout
        self._parked = False

    def park(self) -> None:
        """Write the rollout, if it is not written yet: nobody answers at its teacher."""
        if not self._parked:
            self._parked = True
            self._lot.add(self._rollout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._lot.remove(self._rollout)
