"""The GPUs of this host and the memory in use on them, as nvidia-smi tells."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from .records import DeviceState

NOT_TOLD = -1
"""Stands for `after_mib` where the driver does not answer any more."""
_GPU_FIELDS = "index,uuid,memory.used"
_LIMIT_S = 10.0
_LEAST_S = 1.0
_SLICE_S = 0.25


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; `used_mib` is None where the driver does not say."""

    index: str
    uuid: str
    used_mib: int | None


def read_gpus(limit_s: float = 30.0) -> tuple[Gpu, ...]:
    """Return the GPUs of this host; none if nvidia-smi is missing, fails, or takes too long."""
    gpus = []
    for fields in ask_driver(_GPU_FIELDS, limit_s):
        if len(fields) == 3:
            index, uuid, mib = fields
            gpus.append(Gpu(index, uuid, int(mib) if mib.isdecimal() else None))
    return tuple(gpus)


def ask_driver(names: str, limit_s: float) -> tuple[tuple[str, ...], ...]:
    """Return these fields of each GPU (names as `nvidia-smi --help-query-gpu` lists them, with
    commas), in nvidia-smi's own units; none if it is missing, fails, or takes too long."""
    lines = _ask(names, limit_s).splitlines()
    return tuple(tuple(part.strip() for part in line.split(",")) for line in lines)


def used_mib(devices: Sequence[str]) -> dict[str, int]:
    """Return the MiB in use on each of these GPUs (indices or UUIDs), by the name given here.

    Left out is what the driver says nothing of: CPU slots, slices of a GPU (MIG), unknown names;
    without a driver that is everything. Takes 10 seconds at most.
    """
    return _used(devices, _LIMIT_S)


def await_released(
    before: Mapping[str, int], slack_mib: int, deadline: float, pause: Callable[[float], None]
) -> tuple[DeviceState, ...]:
    """Look until no device has more than `slack_mib` in use above `before`, or the deadline passes.

    SIGKILL returns before the driver has freed the memory of who was killed. `deadline` is a
    `time.monotonic()` value; after it there is still one look, of a second at most. A device that
    the driver does not tell of any more counts as not released (`after_mib` is NOT_TOLD).
    """
    while True:
        left_s = deadline - time.monotonic()
        states = _states(before, slack_mib, limit_s=min(_LIMIT_S, max(_LEAST_S, left_s)))
        if all(state.released for state in states) or time.monotonic() >= deadline:
            return states
        pause(_SLICE_S)


def _states(before: Mapping[str, int], slack_mib: int, limit_s: float) -> tuple[DeviceState, ...]:
    now = _used(tuple(before), limit_s)
    return tuple(
        DeviceState(
            device=device,
            before_mib=mib,
            after_mib=now.get(device, NOT_TOLD),
            released=device in now and now[device] <= mib + slack_mib,
        )
        for device, mib in before.items()
    )


def _used(devices: Sequence[str], limit_s: float) -> dict[str, int]:
    gpus = read_gpus(limit_s) if any(not name.startswith("cpu") for name in devices) else ()
    told = {name: gpu.used_mib for gpu in gpus for name in (gpu.index, gpu.uuid)}
    return {name: mib for name in devices if (mib := told.get(name)) is not None}


def _ask(names: str, limit_s: float) -> str:
    """Return what nvidia-smi prints, "" if it does not succeed in time."""
    try:
        process = subprocess.Popen(
            ("nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader,nounits"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
    except OSError:
        return ""
    assert process.stdout is not None
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # Not for ever: where a driver hangs, its processes cannot be killed.
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LEAST_S)
        process.stdout.close()
        return ""
    return output if process.returncode == 0 else ""
