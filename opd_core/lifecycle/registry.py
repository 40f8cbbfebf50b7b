"""The runs of this user that are not settled yet: one small file each, whatever their folder.

A run stands here from its supervisor's start until nothing of it is left to end or to write.
So a run that stands here, and whose owner and supervisor are gone, is dead and wants the reaper.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path

from .process import ProcessId, boot_id
from .records import JsonObject, write_json


@dataclass(frozen=True, kw_only=True)
class RegisteredRun:
    """What a reaper must know of a run. `settle` is the command that writes what is lacking."""

    run_id: str
    run_dir: Path
    owner: ProcessId
    settle: tuple[str, ...]
    teardown_s: float
    host: str
    boot_id: str

    @classmethod
    def here(
        cls,
        run_id: str,
        run_dir: Path,
        owner: ProcessId,
        settle: tuple[str, ...],
        teardown_s: float,
    ) -> RegisteredRun:
        """A run of this host and this boot."""
        return cls(
            run_id=run_id,
            run_dir=run_dir,
            owner=owner,
            settle=settle,
            teardown_s=teardown_s,
            host=platform.node(),
            boot_id=boot_id(),
        )

    def to_json(self) -> JsonObject:
        """Return it as plain JSON."""
        return {
            **vars(self),
            "run_dir": str(self.run_dir),
            "owner": [self.owner.pid, self.owner.start_ticks],
        }

    @classmethod
    def from_json(cls, data: JsonObject) -> RegisteredRun:
        """Read what `to_json` wrote."""
        return cls(
            **{
                **data,
                "run_dir": Path(data["run_dir"]),
                "owner": ProcessId(*data["owner"]),
                "settle": tuple(data["settle"]),
            }
        )


def state_folder() -> Path:
    """Where this user's state lies: `$XDG_STATE_HOME/opd-lab`, or `~/.local/state/opd-lab`."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser().absolute() / "opd-lab"


class Registry:
    """The files in `folder`, created when the first run is added. Several processes may use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_user(cls) -> Registry:
        """The one that all runs of this user share."""
        return cls(state_folder() / "runs")

    def add(self, run: RegisteredRun) -> None:
        """Enter a run; an earlier entry of the same id is replaced. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(self._file(run.run_id), run.to_json())

    def runs(self) -> tuple[RegisteredRun, ...]:
        """Every run that stands here, by name. A file that is no entry is left alone."""
        found = []
        for file in sorted(self.folder.glob("*.json")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found.append(RegisteredRun.from_json(json.loads(file.read_bytes())))
        return tuple(found)

    def find(self, run_id: str) -> RegisteredRun | None:
        """The run of that id, or None."""
        return next((run for run in self.runs() if run.run_id == run_id), None)

    def hand_over(self, run_id: str, owner: ProcessId) -> None:
        """A run that stands here has this owner from now on. Raises OSError."""
        if (run := self.find(run_id)) is not None:
            self.add(replace(run, owner=owner, host=platform.node(), boot_id=boot_id()))

    def remove(self, run_id: str) -> None:
        """Strike a run out; one that is not there is no error. Raises OSError."""
        self._file(run_id).unlink(missing_ok=True)

    def _file(self, run_id: str) -> Path:
        return self.folder / f"{run_id}.json"
