"""The load of the driver's host while a run trains, looked at every few seconds by a thread.

The names are those of MLflow's own system metrics, so that it shows them as such.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from opd_core.lifecycle.gpu_memory import ask_driver

EVERY_S = 5.0
DRIVER_LIMIT_S = 10.0
MB, MIB = 1e6, 2**20
GPU_FIELDS = "index,utilization.gpu,memory.used,memory.total,power.draw"

logger = logging.getLogger(__name__)


class SystemMetrics:
    """Looks until it is closed; whatever fails ends the looking, never the run. ``disk`` is any
    path on the disk that is told of."""

    def __init__(self, disk: Path, every_s: float = EVERY_S) -> None:
        self._disk = disk
        self._every_s = every_s
        self.samples: list[Mapping[str, float]] = []
        self._has_gpus = shutil.which("nvidia-smi") is not None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="system metrics", daemon=True)

    def take(self) -> dict[str, float]:
        """Means of what was seen since the last call; empty if nothing was."""
        taken, self.samples = self.samples, []
        values: dict[str, list[float]] = {}
        for sample in taken:
            for name, value in sample.items():
                values.setdefault(f"system/{name}", []).append(value)
        return {name: sum(found) / len(found) for name, found in values.items()}

    def _look(self) -> None:
        try:
            psutil.cpu_percent()  # of the time since the call before
            while not self._closed.wait(self._every_s):
                self.samples.append(self._sample())
        except Exception as error:  # whatever a platform's counters may do
            logger.warning("no further system metrics: %s: %s", type(error).__name__, error)

    def _sample(self) -> dict[str, float]:
        memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(self._disk))
        return {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / MB,
            "system_memory_usage_percentage": 100 * memory.used / memory.total,
            "disk_usage_percentage": disk.percent,
            "disk_usage_megabytes": disk.used / MB,
            "disk_available_megabytes": disk.free / MB,
        } | self._gpus()

    def _gpus(self) -> dict[str, float]:
        rows = ask_driver(GPU_FIELDS, DRIVER_LIMIT_S) if self._has_gpus else ()
        whole = (row for row in rows if len(row) == len(GPU_FIELDS.split(",")))
        return {name: value for row in whole for name, value in _gpu(*row).items()}

    def __enter__(self) -> SystemMetrics:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._closed.set()
        self._thread.join(DRIVER_LIMIT_S)


def _gpu(index: str, busy: str, used: str, total: str, power: str) -> dict[str, float]:
    """What the driver tells of a GPU; of some it does not tell everything (``[N/A]``)."""
    found = {
        "utilization_percentage": _number(busy),
        "memory_usage_megabytes": _number(used, MIB / MB),
        "memory_usage_percentage": _number(used, 100 / (_number(total) or 1.0)),
        "power_usage_watts": _number(power),
    }
    return {f"gpu_{index}_{name}": value for name, value in found.items() if value is not None}


def _number(text: str, unit: float = 1.0) -> float | None:
    try:
        return float(text) * unit
    except ValueError:
        return None
