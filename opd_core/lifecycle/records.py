"""What crosses the boundary of the supervisor: the order for a child, and the receipt of a run."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from .errors import LifecycleError

RUN_MARKER = "OPD_RUN_ID"
CHILD_MARKER = "OPD_RUN_CHILD"
RECEIPT_FILE = "receipt.json"

JsonObject = dict[str, Any]
StopSignal = Literal["SIGINT", "SIGTERM"]
_STOP_SIGNALS = ("SIGINT", "SIGTERM")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(name: str, what: str) -> None:
    """Raise LifecycleError unless the name can stand in a file name and in an environment."""
    if not _NAME.fullmatch(name):
        raise LifecycleError(
            f"expected a {what} of letters, digits, '.', '_' and '-' (at most 128), got {name!r}; "
            "choose another one"
        )


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """An order to start one child.

    `kind` says what it is ("teacher", "ray"); `argv[0]` is looked up on the child's PATH.
    `env` is added to the supervisor's own environment; its values may be secret and are written
    nowhere. `ledger_argv` is the command line as the ledger may show it; left empty, the ledger
    shows the program's name alone. The child's output goes to the end of `log`, its input is empty.

    To end it, `stop_signal` goes to its main process, `grace_s` seconds later SIGKILL to its group;
    a lower `stop_order` is stopped earlier. `ports` must be free and the folders `scratch` are
    removed when the run has ended. `devices` says what it computes on, for the ledger.

    Raises LifecycleError for values with which no child could be started or ended.
    """

    name: str
    kind: str
    argv: tuple[str, ...] = field(repr=False)
    cwd: Path
    log: Path
    env: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    stop_signal: StopSignal = "SIGTERM"
    grace_s: float = 30.0
    stop_order: int = 0
    ports: tuple[int, ...] = ()
    scratch: tuple[Path, ...] = ()
    devices: tuple[str, ...] = ()
    ledger_argv: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name, "child name")
        if not self.argv:
            self._refuse("argv", "at least a program", "()")
        if self.stop_signal not in _STOP_SIGNALS:
            self._refuse("stop_signal", " or ".join(_STOP_SIGNALS), repr(self.stop_signal))
        if not (math.isfinite(self.grace_s) and self.grace_s >= 0):
            self._refuse("grace_s", "seconds, 0 or more", str(self.grace_s))
        for path in (self.cwd, self.log, *self.scratch):
            if not path.is_absolute() or ".." in path.parts:
                self._refuse("paths", "absolute paths without '..'", str(path))
        for port in self.ports:
            if not 0 < port < 65536:
                self._refuse("ports", "numbers from 1 to 65535", str(port))
        for marker in (RUN_MARKER, CHILD_MARKER):
            if marker in self.env:
                self._refuse("env", f"no {marker}, which the supervisor sets", marker)

    def _refuse(self, what: str, expected: str, came: str) -> None:
        raise LifecycleError(
            f"child {self.name!r}: expected {what} to be {expected}, got {came}; correct the order"
        )

    def to_wire(self) -> JsonObject:
        """Return the order as JSON. It holds the secrets of `env`: send it, never write it."""
        return {
            "name": self.name,
            "kind": self.kind,
            "argv": list(self.argv),
            "cwd": str(self.cwd),
            "log": str(self.log),
            "env": dict(self.env),
            "stop_signal": self.stop_signal,
            "grace_s": self.grace_s,
            "stop_order": self.stop_order,
            "ports": list(self.ports),
            "scratch": [str(path) for path in self.scratch],
            "devices": list(self.devices),
            "ledger_argv": list(self.ledger_argv),
        }

    @classmethod
    def from_wire(cls, wire: JsonObject) -> ChildSpec:
        """Read what `to_wire` wrote."""
        return cls(
            **{
                **wire,
                "argv": tuple(wire["argv"]),
                "cwd": Path(wire["cwd"]),
                "log": Path(wire["log"]),
                "ports": tuple(wire["ports"]),
                "scratch": tuple(Path(path) for path in wire["scratch"]),
                "devices": tuple(wire["devices"]),
                "ledger_argv": tuple(wire["ledger_argv"]),
            }
        )

    def to_ledger(self) -> JsonObject:
        """Return the order as the ledger may show it: no environment, no unvetted argument."""
        wire = self.to_wire()
        del wire["env"], wire["ledger_argv"]
        return {**wire, "argv": list(self.ledger_argv) or [os.path.basename(self.argv[0])]}


@dataclass(frozen=True)
class ChildEnd:
    """How one child ended. Times are seconds since the epoch.

    `how` is "exited" when it ended without the supervisor asking (also by a foreign signal, which
    then shows as a negative `returncode`), else the signal that was needed: "SIGINT", "SIGTERM",
    "SIGKILL". `returncode` and `ended_at` are None where nobody could see the end.
    """

    name: str
    kind: str
    pid: int
    started_at: float
    ended_at: float | None
    how: str
    returncode: int | None


@dataclass(frozen=True)
class Survivor:
    """A process of the run that outlived SIGKILL (it hangs in the kernel); its program's name."""

    pid: int
    executable: str


@dataclass(frozen=True)
class PortState:
    """Whether a port that a child used could be listened on after the end."""

    port: int
    free: bool


@dataclass(frozen=True)
class ScratchState:
    """Whether a scratch folder is no longer there after the end."""

    path: str
    removed: bool


@dataclass(frozen=True)
class DeviceState:
    """Memory in use on a device, in MiB, before the run's first process and after its last one."""

    device: str
    before_mib: int
    after_mib: int
    released: bool


@dataclass(frozen=True)
class Receipt:
    """The proof of a run's end: what was started, how it ended, what (if anything) is left.

    `clean` is True exactly when no survivor, no occupied port and no scratch folder is left, and
    the memory of every device is free again (`devices` is empty where no driver tells).
    `seconds` is the length of the teardown.
    """

    run_id: str
    cause: str
    clean: bool
    seconds: float
    children: tuple[ChildEnd, ...]
    survivors: tuple[Survivor, ...]
    ports: tuple[PortState, ...]
    scratch: tuple[ScratchState, ...]
    devices: tuple[DeviceState, ...] = ()

    def to_json(self) -> JsonObject:
        """Return the receipt as plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: JsonObject) -> Receipt:
        """Read what `to_json` wrote."""
        return cls(
            **{
                **data,
                "children": tuple(ChildEnd(**each) for each in data["children"]),
                "survivors": tuple(Survivor(**each) for each in data["survivors"]),
                "ports": tuple(PortState(**each) for each in data["ports"]),
                "scratch": tuple(ScratchState(**each) for each in data["scratch"]),
                "devices": tuple(DeviceState(**each) for each in data.get("devices", ())),
            }
        )


def write_receipt(run_dir: Path, receipt: Receipt) -> None:
    """Write `receipt.json`, whole or not at all."""
    write_json(run_dir / RECEIPT_FILE, receipt.to_json())


def read_receipt(run_dir: Path) -> Receipt | None:
    """Return the receipt of the run, or None if it has none (yet)."""
    try:
        text = (run_dir / RECEIPT_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return Receipt.from_json(json.loads(text))


def write_json(path: Path, data: JsonObject) -> None:
    """Write a file whole or not at all: temporary file, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(data, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make a file's new name in this folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
