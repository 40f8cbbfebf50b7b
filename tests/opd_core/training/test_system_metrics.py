"""The load of the host, as a thread sees it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from opd_core.training.system_metrics import SystemMetrics


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def seen(disk: Path) -> dict[str, float]:
    """What is told of a run that takes long enough to be looked at."""
    with SystemMetrics(disk, every_s=0.01) as system:
        ends = time.monotonic() + 60
        while not (found := system.take()):
            assert time.monotonic() < ends, "nothing was seen"
            time.sleep(0.01)
    return found


def test_a_host_without_gpus_tells_of_processor_memory_and_disk(path: Path) -> None:
    found = seen(path)
    assert set(found) == {
        "system/cpu_utilization_percentage",
        "system/system_memory_usage_megabytes",
        "system/system_memory_usage_percentage",
        "system/disk_usage_percentage",
        "system/disk_usage_megabytes",
        "system/disk_available_megabytes",
    }
    assert 0 < found["system/system_memory_usage_percentage"] <= 100
    assert found["system/disk_available_megabytes"] > 0


def test_gpus_are_told_as_far_as_the_driver_does(path: Path) -> None:
    program = path / "nvidia-smi"
    lines = ["0, 50, 1000, 4000, 70.5", "1, [N/A], [N/A], [N/A], 10", "some warning"]
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)
    found = {name: value for name, value in seen(path).items() if "/gpu_" in name}
    assert found == {
        "system/gpu_0_utilization_percentage": 50.0,
        "system/gpu_0_memory_usage_megabytes": pytest.approx(1048.576),
        "system/gpu_0_memory_usage_percentage": 25.0,
        "system/gpu_0_power_usage_watts": 70.5,
        "system/gpu_1_power_usage_watts": 10.0,
    }


def test_what_is_told_is_the_mean_since_the_last_time(path: Path) -> None:
    system = SystemMetrics(path)
    system.samples += [{"a": 1.0, "b": 5.0}, {"a": 3.0}]
    assert system.take() == {"system/a": 2.0, "system/b": 5.0}
    assert system.take() == {}


def test_looking_ends_with_its_run(path: Path) -> None:
    before = set(threading.enumerate())
    seen(path)
    assert set(threading.enumerate()) == before


def test_what_fails_ends_the_looking_and_not_the_run(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SystemMetrics(path / "no such disk", every_s=0.001) as system:
        ends = time.monotonic() + 60
        while "no further system metrics" not in caplog.text:
            assert time.monotonic() < ends
            time.sleep(0.01)
        assert system.take() == {}
