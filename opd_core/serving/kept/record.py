"""What stands on disk of a kept teacher, in a folder of its own in this user's state.

The keeper holds a lock on ``keeper.lock`` from before its start until its death, however it dies:
that alone says whether it lives. ``order.json`` says what is kept, ``state.json`` is the keeper's
own word; ``lease.json`` and ``end.json`` are what commands ask of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from opd_core.config import OPDConfig, OPDTeacherConfig
from opd_core.errors import ConfigError, ServingError
from opd_core.lifecycle.locks import lock_now
from opd_core.lifecycle.records import RECEIPT_FILE
from opd_core.lifecycle.registry import state_folder
from opd_core.scoring.facts import TeacherFacts
from opd_core.serving.servers import Server, teacher_servers
from opd_core.whole_file import write_whole

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
HOUR_S = 3600.0
LOOK_S = 0.5
Phase = Literal["starting", "ready", "restarting", "ending", "ended", "failed"]


@dataclass(frozen=True, slots=True)
class KeptOrder:
    """What is kept: teacher number ``number`` of a recipe, ``only`` if there is no other. No key is
    in it, only where that is kept.

    ``facts`` are those of the model's files, ``sequences`` (token ids) those of the proof, whose
    numbers are of ``dtype``; ``locks`` name the devices, and are waited for ``wait_s`` seconds.
    """

    recipe: str
    number: int
    only: bool
    teacher: OPDTeacherConfig
    facts: TeacherFacts
    sequences: tuple[tuple[int, ...], ...]
    dtype: str
    locks: tuple[str, ...]
    wait_s: float
    teardown_s: float

    @property
    def servers(self) -> tuple[Server, ...]:
        """Its servers; a port of None is still to be found."""
        alone = OPDConfig(teachers=(self.teacher,), default_teacher=self.teacher.name)
        return teacher_servers(alone)


@dataclass(frozen=True, slots=True)
class KeptState:
    """How the teacher is, as its keeper says. Times are seconds since the epoch; ``until`` is when
    it ends if no run uses it meanwhile. ``said`` is why, where that is not plain."""

    phase: Phase
    said: str = ""
    pid: int = 0
    start_ticks: int = 0
    since: float = 0.0
    until: float = 0.0
    endpoints: tuple[str, ...] = ()
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """The teacher ends once no run has used it for ``hours``, counted from ``at`` at least."""

    hours: float
    at: float


@dataclass(frozen=True, slots=True)
class EndWish:
    """Somebody wants it ended, and why."""

    cause: str


_FILES: dict[str, TypeAdapter[Any]] = {
    "order.json": TypeAdapter(KeptOrder),
    "state.json": TypeAdapter(KeptState),
    "lease.json": TypeAdapter(Lease),
    "end.json": TypeAdapter(EndWish),
}


class KeptTeacher:
    """The folder of one kept teacher, whether it lives or not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name

    @classmethod
    def named(cls, name: str) -> KeptTeacher:
        """The one of that name. Raises :class:`ConfigError` for what can be no name."""
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"expected a name of letters, digits, '.', '_' and '-' (at most 64), got {name!r}"
            )
        return cls(kept_folder() / name)

    @property
    def run_id(self) -> str:
        """What its processes are marked with: no other folder's teacher has the same."""
        mark = hashlib.sha256(str(self.folder).encode()).hexdigest()[:8]
        return f"teacher-{self.name}-{mark}"

    def take(self) -> int | None:
        """Become its keeper, or hand that on: a descriptor that holds the lock; None if it has a
        keeper that lives. What an earlier keeper did and was to do is over then."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.gate():  # whoever finds the lock taken finds no word of an earlier life
            descriptor = self._take()
            if descriptor is not None:
                for of_the_last in (*_FILES, RECEIPT_FILE):
                    (self.folder / of_the_last).unlink(missing_ok=True)
        return descriptor

    def _take(self) -> int | None:
        descriptor = os.open(self.folder / "keeper.lock", os.O_RDWR | os.O_CREAT, 0o600)
        give_up_at = time.monotonic() + LOOK_S
        while not lock_now(descriptor):
            if time.monotonic() > give_up_at:  # else somebody may only be looking
                os.close(descriptor)
                return None
            time.sleep(LOOK_S / 10)
        return descriptor

    @property
    def alive(self) -> bool:
        """Whether its keeper lives."""
        try:
            descriptor = os.open(self.folder / "keeper.lock", os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            return not lock_now(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)

    @contextmanager
    def gate(self) -> Iterator[None]:
        """Between looking who uses it and deciding on its end, nobody begins to use it."""
        descriptor = os.open(self.folder / "gate.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def begin(self, order: KeptOrder, hours: float) -> None:
        """Write what its keeper is to do. A receipt is of an earlier one, whose supervisor or the
        reaper may have written it since the lock was taken."""
        (self.folder / RECEIPT_FILE).unlink(missing_ok=True)
        self._write("order.json", order)
        self.renew(hours)

    def renew(self, hours: float) -> None:
        """Its time begins anew."""
        self._write("lease.json", Lease(hours, time.time()))

    def ask_end(self, cause: str) -> None:
        """The keeper ends it at its next look."""
        self._write("end.json", EndWish(cause))

    def tell(self, state: KeptState) -> None:
        """Write how it is."""
        self._write("state.json", state)

    @property
    def order(self) -> KeptOrder | None:
        """What is kept, or was."""
        found: KeptOrder | None = self._read("order.json")
        return found

    @property
    def state(self) -> KeptState | None:
        """The keeper's last word."""
        found: KeptState | None = self._read("state.json")
        return found

    @property
    def lease(self) -> Lease | None:
        """For how long it is kept."""
        found: Lease | None = self._read("lease.json")
        return found

    @property
    def end_wish(self) -> EndWish | None:
        """Whether it is to be ended."""
        found: EndWish | None = self._read("end.json")
        return found

    def _write(self, name: str, content: object) -> None:
        write_whole(self.folder / name, _FILES[name].dump_json(content, indent=1))

    def _read(self, name: str) -> Any:
        file = self.folder / name
        try:
            return _FILES[name].validate_json(file.read_bytes(), context={"written": True})
        except FileNotFoundError:
            return None
        except ValidationError:
            raise ServingError(
                f"{file} cannot be read, it may be of another version of this project: end the "
                f"teacher (opd teacher down {self.name} --force) and remove {self.folder}"
            ) from None


def kept_folder() -> Path:
    """Where this user's kept teachers stand."""
    return state_folder() / "teachers"


def kept_teachers() -> tuple[KeptTeacher, ...]:
    """All that were ever kept here, by name."""
    return tuple(KeptTeacher(file.parent) for file in sorted(kept_folder().glob("*/keeper.lock")))
