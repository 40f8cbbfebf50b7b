"""One lock per device of this host, so that no two runs take the same one.

A lock is an exclusive `flock` on a file that is named after the device. The kernel lets it go when
the last process that holds the descriptor has ended, however it ended; a stale lock cannot exist.
What stands in the file decides nothing: it tells others who holds the device.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from .errors import DevicesBusy, LifecycleError
from .process import boot_id, identify
from .records import JsonObject

_SHARED = "cpu"  # everybody's: a named slot ("cpu:0") can be locked, the CPU cannot
_POLL_S = 0.2
_WORD_S = 1.0


def lease_folder() -> Path:
    """Return the folder of the locks, one for all users of this host."""
    return Path(os.environ.get("OPD_LEASES") or "/tmp/opd-leases")


@dataclass(frozen=True)
class DeviceHolder:
    """Who holds a device, as it wrote itself; what it has not written is empty, or 0.

    `since` is seconds since the epoch. The process may have ended already: the supervisor of its
    run holds the device until everything of the run has ended.
    """

    device: str
    run_id: str = ""
    run_dir: str = ""
    pid: int = 0
    since: float = 0.0

    def __str__(self) -> str:
        """`run 'demo-1' in /runs/demo-1 (process 4711), since 2026-01-01 00:00:00`"""
        run = f"run {self.run_id!r}" if self.run_id else "a run that has not told its name"
        folder = f" in {self.run_dir}" if self.run_dir else ""
        process = f" (process {self.pid})" if self.pid else ""
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return run + folder + process + (f", since {clock}" if self.since else "")


class DeviceLease:
    """Devices that this process has for itself. Create with `DeviceLease.take`.

    A process that is handed `descriptors` (`pass_fds`) holds the devices too, until it ends. No
    other child does, except a copy of this process that was forked and runs no new program.
    """

    def __init__(self, owner: Mapping[str, str]) -> None:
        me = identify(os.getpid())
        assert me is not None, "/proc shows the process that reads it"
        self._facts: JsonObject = {
            **owner,
            "pid": me.pid,
            "start_ticks": me.start_ticks,
            "boot_id": boot_id(),
        }
        self._descriptors: dict[str, int] = {}

    @classmethod
    def take(
        cls,
        devices: Sequence[str],
        *,
        owner: Mapping[str, str],
        wait_s: float,
        folder: Path | None = None,
        waiting: Callable[[float, DeviceHolder], None] | None = None,
    ) -> DeviceLease:
        """Lock every device but plain "cpu", waiting up to `wait_s` seconds (`inf`: for ever).

        A device must always have the same name: UUIDs, not indices. `owner` is shown to whoever
        finds a device taken: `run_id`, `run_dir`, and what else may be seen by every user of the
        host. `waiting` is called about once a second with the seconds waited so far and the holder.

        Raises DevicesBusy if a device is still held then, LifecycleError if the locks cannot be
        used. Whatever is raised, also in the middle of waiting, nothing stays locked.
        """
        if not wait_s >= 0:
            raise LifecycleError(
                f"expected wait_s to be 0 seconds or more, got {wait_s}; 0 asks once"
            )
        folder = folder or lease_folder()
        began = time.monotonic()
        lease = cls(owner)
        try:
            # Everybody takes them in this order, so no two can wait for each other.
            for device in sorted(set(devices) - {_SHARED}):
                path = folder / f"{device.replace('/', '_')}.lock"
                lease._descriptors[device] = _wait_for(device, path, began, wait_s, waiting)
                lease._facts["since"] = round(time.time(), 3)
                lease.tell()
        except BaseException:
            lease.release()
            raise
        return lease

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that are locked, sorted."""
        return tuple(self._descriptors)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What holds the locks, in the order of `devices`; hand it over with `pass_fds` only."""
        return tuple(self._descriptors.values())

    def tell(self, **facts: str) -> None:
        """Add to what others are told of the holder: `run_id`, `run_dir` and the like."""
        self._facts.update(facts)
        line = json.dumps(self._facts).encode() + b"\n"
        for descriptor in self.descriptors:
            # The lock is what counts: a full disk must not end the run.
            with contextlib.suppress(OSError):
                os.pwrite(descriptor, line, 0)
                os.ftruncate(descriptor, len(line))

    def release(self) -> None:
        """Let the devices go, as far as this process is concerned. May be called again."""
        while self._descriptors:
            # Closed, not unlocked: that would take the lock from all who share the descriptor.
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> DeviceLease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def touch(descriptors: Sequence[int]) -> None:
    """Make the files look used; else one that clears away old files would remove a held lock."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.utime(descriptor)


def _wait_for(
    device: str,
    path: Path,
    began: float,
    wait_s: float,
    waiting: Callable[[float, DeviceHolder], None] | None,
) -> int:
    """Return a descriptor that holds the lock; raise DevicesBusy `wait_s` after `began`."""
    next_word = 0.0
    while (descriptor := _try_lock(device, path)) is None:
        waited = time.monotonic() - began
        holder = _read_holder(device, path)
        if waited >= wait_s:
            raise DevicesBusy(
                f"device {device} is held by {holder}; waited {waited:.0f} s for it: wait longer "
                "(--set devices.wait_s=3600), name other devices, end that run, or, if it is dead, "
                "have `opd reap` end what is left of it"
            )
        if waiting is not None and waited >= next_word:
            waiting(waited, holder)
            next_word = waited + _WORD_S
        time.sleep(min(_POLL_S, wait_s - waited))
    return descriptor


def _try_lock(device: str, path: Path) -> int | None:
    """Return a descriptor that holds the lock, or None if another process holds it."""
    try:
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A lock on a file that was removed meanwhile would keep nobody out.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None
    except BlockingIOError:
        return None
    except OSError as error:
        raise LifecycleError(
            f"device {device}: expected to lock {path}, got: {error}; all users of this host must "
            f"be able to write in {path.parent} (chmod 1777), or set OPD_LEASES to a folder where "
            "they can, the same for all runs"
        ) from None


def _open(path: Path) -> int:
    """Open the file of a lock; whoever comes first makes it, and its folder, for all users."""
    folder = path.parent
    if not folder.is_dir():
        _make_for_all(folder)
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        pass
    # Never O_CREAT on a file that is there: in such a folder the kernel refuses that for a file of
    # another user (fs.protected_regular in proc(5)).
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    os.fchmod(descriptor, 0o666)  # whatever the umask is
    return descriptor


def _make_for_all(folder: Path) -> None:
    """Make the folder, for all users from its first moment: its maker may be killed at any time."""
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        made.chmod(0o1777)
        made.rename(folder)
    except OSError:
        made.rmdir()
        if not folder.is_dir():  # somebody else made it meanwhile
            raise


def _read_holder(device: str, path: Path) -> DeviceHolder:
    """Read who holds the device. The first line counts: a longer one may just be overwritten."""
    try:
        facts = json.loads(path.read_bytes().partition(b"\n")[0])
        return DeviceHolder(
            device,
            run_id=str(facts.get("run_id", "")),
            run_dir=str(facts.get("run_dir", "")),
            pid=int(facts["pid"]),
            since=float(facts["since"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return DeviceHolder(device)
