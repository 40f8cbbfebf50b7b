"""Runs that share a node, on a real server and worker: they wait in line, and none is stuck."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from uuid import UUID

import pytest
from prefect.states import Cancelling

from deployments.drill.watching import RunView
from opd_core.training.files import RUN_FILE
from tasks.devices import WAITING
from tests.operating.conftest import MakeLab
from tests.operating.lab import Lab
from tests.teardown.stage import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

FOR_LONG = 5000
START_LIMIT_S = 180.0
SLOT_LIMIT_S = 120.0
"""A run that waits for a slot is tried again about every 30 s."""
LEASE_S = 300.0
"""Prefect takes a slot back from one that has not said for so long that it lives."""
ENDING_LIMIT_S = 300.0
"""A flow tries for some minutes to tell its end to a server that is gone."""


def on_one_device(steps: int) -> dict[str, Any]:
    return {
        "recipe": "tiny",
        "steps": steps,
        "student_devices": "cpu:0",
        "overrides": ["training.prompts_per_step=8", "evaluation.every=0"],
    }


def run_of(lab: Lab, flow_run_id: str) -> RunView | None:
    """The run directory of a flow run, once its supervisor watches it."""
    for file in lab.root.glob(f"*/{RUN_FILE}"):
        run = RunView(file.parent)
        if run.flow_run_id() == flow_run_id and run.events("run_started"):
            return run
    return None


def begun(lab: Lab, flow_run_id: str) -> RunView:
    found = wait_until(lambda: run_of(lab, flow_run_id), "the run directory", START_LIMIT_S)
    assert found is not None
    return found


def pid_of(lab: Lab, child: str) -> int:
    """A server or the worker of ``opd up``."""
    started = RunView(lab.root / "opd-up").events("child_started")
    return int(next(r.facts["pid"] for r in reversed(started) if r.facts["name"] == child))


def kill_flow(run: RunView) -> None:
    os.kill(run.owner(), signal.SIGKILL)


def cancel(lab: Lab, flow_run_id: str) -> None:
    """As the button in the UI does."""
    with lab.client() as client:
        client.set_flow_run_state(UUID(flow_run_id), Cancelling())


def message(lab: Lab, flow_run_id: str) -> str:
    state = lab.run(flow_run_id).state
    return (state.message or "") if state is not None else ""


def assert_nothing_is_left(run: RunView) -> None:
    wait_until(run.receipt, "the receipt", 90.0)
    receipt = run.receipt()
    assert receipt is not None
    assert receipt.clean
    assert run.leftovers().none


def test_a_second_run_on_a_device_waits_and_gets_it_when_the_first_is_killed(
    make_lab: MakeLab,
) -> None:
    lab = make_lab("--at-once", "2")
    first = lab.start_run("distill", on_one_device(FOR_LONG))
    run = begun(lab, first)
    second = lab.start_run("distill", on_one_device(FOR_LONG))
    lab.wait_for(second, WAITING, within_s=START_LIMIT_S)
    assert f"device cpu:0, held by run '{run.run_id}'" in message(lab, second)
    third = lab.start_run("distill", on_one_device(FOR_LONG))
    lab.wait_for(third, "AwaitingConcurrencySlot", within_s=START_LIMIT_S)

    kill_flow(run)
    lab.wait_for(second, "Running", within_s=START_LIMIT_S)
    lab.wait_for(first, "Crashed")
    assert_nothing_is_left(run)

    lab.wait_for(third, WAITING, within_s=SLOT_LIMIT_S + START_LIMIT_S)
    assert begun(lab, second).run_id in message(lab, third)
    cancel(lab, third)
    lab.wait_for(third, "Cancelled")
    assert run_of(lab, third) is None
    cancel(lab, second)
    lab.wait_for(second, "Cancelled")
    assert_nothing_is_left(begun(lab, second))


def test_the_only_slot_is_free_again_when_its_run_is_killed(lab: Lab) -> None:
    first = lab.start_run("distill", on_one_device(FOR_LONG))
    run = begun(lab, first)
    second = lab.start_run("distill", on_one_device(2))
    lab.wait_for(second, "AwaitingConcurrencySlot", within_s=START_LIMIT_S)
    killed_at = time.monotonic()
    kill_flow(run)
    lab.wait_for(second, WAITING, "Running", "Completed", within_s=SLOT_LIMIT_S)
    print(f"the slot was taken {time.monotonic() - killed_at:.0f} s after the kill")
    lab.wait_for(second, "Completed")
    lab.wait_for(first, "Crashed")
    assert_nothing_is_left(run)


@pytest.mark.timeout(1500)
def test_a_slot_is_not_lost_with_the_server_that_knew_who_has_it(make_lab: MakeLab) -> None:
    lab = make_lab()
    first = lab.start_run("distill", on_one_device(FOR_LONG))
    run = begun(lab, first)
    second = lab.start_run("distill", on_one_device(2))
    lab.wait_for(second, "AwaitingConcurrencySlot", within_s=START_LIMIT_S)
    os.kill(pid_of(lab, "prefect-server"), signal.SIGKILL)
    assert lab.process is not None
    assert lab.process.wait(ENDING_LIMIT_S) != 0
    assert_nothing_is_left(run)

    lab.stop()
    lab.start()
    lab.wait_for(second, WAITING, "Running", "Completed", within_s=LEASE_S + SLOT_LIMIT_S)
    lab.wait_for(second, "Completed")
    lab.wait_for(lab.start_run("janitor"), "Completed")
    lab.wait_for(first, "Crashed")
