"""The runs that use a kept teacher. Each holds a lock for as long as its flow's process lives, so
one that was killed is none any more."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from opd_core.errors import ServingError
from opd_core.lifecycle.locks import lock_now
from opd_core.serving.kept.record import KeptTeacher, kept_teachers

FOLDER = "users"


@dataclass(frozen=True, slots=True)
class KeptUser:
    """A run that uses a kept teacher, ``since`` seconds since the epoch; process 0 if its file
    cannot be read."""

    run_id: str
    run_dir: str
    pid: int
    since: float

    def __str__(self) -> str:
        """``run tiny-1 in /runs/tiny-1 (process 4711)``"""
        return f"run {self.run_id} in {self.run_dir} (process {self.pid})"


class KeptUse:
    """The uses of one run, until they are released or its process ends."""

    def __init__(self) -> None:
        self.teachers: list[KeptTeacher] = []
        self._held: list[tuple[Path, int]] = []

    def add(self, kept: KeptTeacher, user: KeptUser) -> None:
        """Use a teacher; call it within its gate. Raises :class:`ServingError` if a run of the same
        id uses it."""
        file = kept.folder / FOLDER / f"{user.run_id}.json"
        file.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        if not lock_now(descriptor):
            first = _read(file, descriptor)
            os.close(descriptor)
            raise ServingError(
                f"the kept teacher {kept.name!r} is used by {first} already: wait until that has "
                "ended, or use another run directory"
            )
        self._held.append((file, descriptor))
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(asdict(user)).encode())
        self.teachers.append(kept)

    def release(self) -> None:
        """They may be ended, as far as this run is concerned. May be called again."""
        while self._held:
            file, descriptor = self._held.pop()
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
            os.close(descriptor)


def use_kept(endpoints: Iterable[str], run_id: str, run_dir: Path) -> KeptUse:
    """Use every kept teacher of this user that answers at one of these endpoints, however they name
    this host's loopback.

    Raises :class:`ServingError` for one that is being ended, or is used by a run of the same id.
    """
    wanted, use = set(map(_address, endpoints)), KeptUse()
    try:
        for kept in kept_teachers() if wanted else ():
            with kept.gate():
                state = kept.state if kept.alive else None
                if state is None or wanted.isdisjoint(map(_address, state.endpoints)):
                    continue
                if kept.end_wish is not None or state.phase == "ending":
                    raise ServingError(
                        f"the kept teacher {kept.name!r} at {', '.join(state.endpoints)} is being "
                        "ended: start it again with `opd teacher up`, or let the run launch its own"
                    )
                use.add(kept, KeptUser(run_id, str(run_dir), os.getpid(), time.time()))
    except BaseException:
        use.release()
        raise
    return use


def users_of(kept: KeptTeacher) -> tuple[KeptUser, ...]:
    """The living runs that use it; call it within its gate. What dead ones left is removed."""
    found = []
    for file in sorted((kept.folder / FOLDER).glob("*.json")):
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except FileNotFoundError:  # released just now
            continue
        try:
            if lock_now(descriptor, fcntl.LOCK_SH):
                file.unlink(missing_ok=True)
            else:
                found.append(_read(file, descriptor))
        finally:
            os.close(descriptor)
    return tuple(found)


def _read(file: Path, descriptor: int) -> KeptUser:
    try:
        return KeptUser(**json.loads(os.pread(descriptor, 1 << 16, 0)))
    except (ValueError, TypeError):  # it was written on a full disk
        return KeptUser(file.stem, f"? ({file} cannot be read)", 0, 0.0)


def _address(endpoint: str) -> tuple[str, int]:
    """Host and port; every loopback host is 127.0.0.1."""
    parts = urlsplit(endpoint)
    host = parts.hostname or ""
    try:
        here = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        here = False
    return "127.0.0.1" if here else host, parts.port or (443 if parts.scheme == "https" else 80)
