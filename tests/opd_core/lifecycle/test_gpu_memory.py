"""What nvidia-smi tells of the GPUs, and waiting for their memory to be free again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from opd_core.lifecycle.gpu_memory import NOT_TOLD, Gpu, await_released, read_gpus, used_mib
from opd_core.lifecycle.records import DeviceState

Tell = Callable[..., None]


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tell:
    """A PATH with no program but an `nvidia-smi` that prints these lines; without any, with none.

    It counts how often it was asked in the file `asked`.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def write(*lines: str, then: str = "exit 0") -> None:
        program = folder / "nvidia-smi"
        echoed = "\n".join(f"echo '{line}'" for line in lines)
        program.write_text(f"#!/bin/sh\necho >> {tmp_path}/asked\n{echoed}\n{then}\n")
        program.chmod(0o755)

    return write


def wait_for_nothing(seconds: float) -> None:
    pytest.fail("there was nothing to wait for")


def test_the_gpus_are_told_with_their_memory_where_the_driver_says(tell: Tell) -> None:
    tell("0, GPU-aa, 4", "1, GPU-bb, [N/A]", "no line of a GPU")
    assert read_gpus() == (Gpu("0", "GPU-aa", 4), Gpu("1", "GPU-bb", None))


def test_memory_is_told_by_the_name_that_was_asked_for(tell: Tell) -> None:
    tell("0, GPU-aa, 4", "1, GPU-bb, 1024", "2, GPU-cc, [N/A]")
    asked = ("GPU-bb", "0", "2", "7", "MIG-dd", "cpu:0")
    assert used_mib(asked) == {"GPU-bb": 1024, "0": 4}


def test_without_a_driver_nothing_is_told(tell: Tell) -> None:
    assert used_mib(["0"]) == {}
    tell("0, GPU-aa, 4", then="exit 9")
    assert used_mib(["0"]) == {}


def test_a_driver_that_does_not_answer_is_not_waited_for(tell: Tell) -> None:
    tell("0, GPU-aa, 4", then="while :; do read line < /proc/self/stat; done")
    began = time.monotonic()
    assert read_gpus(limit_s=0.2) == ()
    assert 0.2 <= time.monotonic() - began < 5.0


def test_without_gpus_the_driver_is_not_asked(tell: Tell, tmp_path: Path) -> None:
    tell("0, GPU-aa, 4")
    assert used_mib(["cpu", "cpu:0"]) == {}
    assert await_released({}, 0, time.monotonic() + 60.0, wait_for_nothing) == ()
    assert not (tmp_path / "asked").exists()


def test_memory_that_is_free_at_once_is_not_waited_for(tell: Tell) -> None:
    tell("0, GPU-aa, 104", "1, GPU-bb, 0")
    states = await_released({"GPU-aa": 4, "1": 7}, 100, time.monotonic() + 60.0, wait_for_nothing)
    assert states == (DeviceState("GPU-aa", 4, 104, True), DeviceState("1", 7, 0, True))


def test_memory_is_waited_for_until_it_is_free(tell: Tell) -> None:
    tell("0, GPU-aa, 105", "1, GPU-bb, 7")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            tell("0, GPU-aa, 104", "1, GPU-bb, 7")

    states = await_released({"GPU-aa": 4, "GPU-bb": 7}, 100, time.monotonic() + 60.0, pause)
    assert [state.released for state in states] == [True, True]
    assert len(pauses) == 2
    assert all(0 < seconds <= 1 for seconds in pauses)


def test_memory_that_stays_in_use_is_told_after_the_deadline(tell: Tell, tmp_path: Path) -> None:
    tell("0, GPU-aa, 105", "1, GPU-bb, 7")
    states = await_released(
        {"GPU-aa": 4, "GPU-bb": 7}, 100, time.monotonic() - 1.0, wait_for_nothing
    )
    assert states == (DeviceState("GPU-aa", 4, 105, False), DeviceState("GPU-bb", 7, 7, True))
    assert (tmp_path / "asked").read_text() == "\n", "one look is taken in any case"


def test_what_the_driver_does_not_tell_any_more_is_not_released(tell: Tell) -> None:
    states = await_released({"GPU-aa": 4}, 100, time.monotonic() - 1.0, wait_for_nothing)
    assert states == (DeviceState("GPU-aa", 4, NOT_TOLD, False),)
