"""What a supervisor is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .process import ProcessId
from .records import JsonObject


@dataclass(frozen=True, kw_only=True)
class RunOrder:
    """One run, as its supervisor is to look after it. Nothing in it is secret.

    The run ends `deadline_s` after its start, if that is given. `devices` are those whose memory
    is watched; `lease_fds` are the open locks of the run's devices. `settle` is a command that
    writes what the owner left unwritten, `registry` the folder that the run is struck out of
    when nothing is left to write. `patience_s` is how long an owner that did not ask for the end
    of its run may take to do so afterwards, before the command is run in its place. `control_fd`
    is the supervisor's end of the control line.
    """

    run_id: str
    run_dir: Path
    teardown_s: float
    owner: ProcessId
    control_fd: int
    deadline_s: float | None = None
    devices: tuple[str, ...] = ()
    lease_fds: tuple[int, ...] = ()
    settle: tuple[str, ...] = ()
    registry: Path | None = None
    patience_s: float = 180.0

    def to_wire(self) -> JsonObject:
        """Return the order as JSON."""
        return {
            **vars(self),
            "run_dir": str(self.run_dir),
            "owner": [self.owner.pid, self.owner.start_ticks],
            "registry": str(self.registry) if self.registry else None,
        }

    @classmethod
    def from_wire(cls, wire: JsonObject) -> RunOrder:
        """Read what `to_wire` wrote."""
        return cls(
            **{
                **wire,
                "run_dir": Path(wire["run_dir"]),
                "owner": ProcessId(*wire["owner"]),
                "registry": Path(wire["registry"]) if wire["registry"] else None,
                **{key: tuple(wire[key]) for key in ("devices", "lease_fds", "settle")},
            }
        )
