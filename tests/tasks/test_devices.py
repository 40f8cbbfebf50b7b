"""A run that waits for its devices says so, and for whom."""

from __future__ import annotations

from typing import Any

import pytest
from prefect.client.schemas.objects import State

from opd_core.lifecycle.leases import DeviceHolder
from tasks.devices import WAITING, WaitingLine


class Shown(list[State[Any]]):
    @property
    def lines(self) -> list[tuple[str | None, str | None]]:
        return [(state.name, state.message) for state in self]


@pytest.fixture
def shown() -> Shown:
    return Shown()


def test_the_state_names_the_device_and_its_holder(shown: Shown) -> None:
    line = WaitingLine(shown.append)
    line(0.0, DeviceHolder("cpu:0", "tiny-1", "/runs/tiny-1", 4711))
    said = "waiting for device cpu:0, held by run 'tiny-1' in /runs/tiny-1 (process 4711)"
    assert shown.lines == [(WAITING, said)]
    assert all(state.is_running() for state in shown)


def test_the_state_changes_with_the_holder_and_not_with_time(shown: Shown) -> None:
    line = WaitingLine(shown.append)
    for seconds in range(100):
        line(float(seconds), DeviceHolder("cpu:0", "tiny-1"))
    line(100.0, DeviceHolder("cpu:0", "tiny-2"))
    assert ["tiny-1" in str(message) for _, message in shown.lines] == [True, False]


def test_after_the_wait_the_run_is_running_again(shown: Shown) -> None:
    line = WaitingLine(shown.append)
    line(0.0, DeviceHolder("cpu:0", "tiny-1"))
    line.over("has cpu:0")
    assert shown.lines[-1] == ("Running", "has cpu:0")


def test_without_a_wait_nothing_is_shown(shown: Shown) -> None:
    WaitingLine(shown.append).over("has cpu:0")
    assert shown == []


def test_the_log_is_told_every_half_minute(shown: Shown, caplog: pytest.LogCaptureFixture) -> None:
    line = WaitingLine(shown.append)
    with caplog.at_level("INFO"):
        for seconds in range(61):
            line(float(seconds), DeviceHolder("cpu:0", "tiny-1"))
    assert [record.getMessage().rpartition("(")[2] for record in caplog.records] == [
        "0 s)",
        "30 s)",
        "60 s)",
    ]
