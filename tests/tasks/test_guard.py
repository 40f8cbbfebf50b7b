"""A flow that nobody else would end ends itself; any other is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prefect.client.schemas.objects import StateType

from opd_core.errors import TrainingError
from tasks.guard import (
    CANCELLED,
    ENDED_IN_PREFECT,
    TIMED_OUT,
    WORKER_GONE,
    WORKER_PATIENCE_S,
    Guard,
    TimedOut,
    guard_flow,
    launchers,
)

ROOT = Path(__file__).parents[2]


class World:
    """What a guard sees, and what it did."""

    def __init__(self) -> None:
        self.state: StateType | None = StateType.RUNNING
        self.parents = (100,)
        self.now = 0.0
        self.ended: list[str] = []
        self.let_go = 0

    def guard(
        self, *, launched: bool = True, end_with_worker: bool = True, signals: bool = True
    ) -> Guard:
        guard = Guard(
            lambda: self.state,
            launched=launched,
            read_launchers=lambda: self.parents,
            clock=lambda: self.now,
            end_flow=self.ended.append if signals else None,
            let_go=self.count_let_go,
        )
        guard.end_with_worker = end_with_worker
        return guard

    def count_let_go(self) -> None:
        self.let_go += 1


@pytest.fixture
def world() -> World:
    return World()


def test_what_the_looks_hold_is_let_go_by_the_thread_that_looked() -> None:
    closed: list[str] = []
    closing = threading.Event()

    def close() -> None:
        closed.append(threading.current_thread().name)
        closing.set()

    with Guard(lambda: None, launched=False, end_flow=None, close=close):
        assert not closed
    assert closing.wait(30)
    assert closed == ["guard"]


def test_a_flow_ends_when_its_worker_has_gone(world: World) -> None:
    guard = world.guard()
    guard.check_launchers()
    assert world.ended == []
    world.parents = (1,)
    guard.check_launchers()
    guard.check_launchers()
    assert world.ended == [WORKER_GONE]
    assert guard.cause_of(KeyboardInterrupt()) == WORKER_GONE


@pytest.mark.parametrize(("launched", "threads"), [(True, 2), (False, 1)])
def test_the_parent_counts_only_where_a_worker_started_the_flow(
    world: World, launched: bool, threads: int
) -> None:
    before = set(threading.enumerate())
    with world.guard(launched=launched):
        assert len(set(threading.enumerate()) - before) == threads


def test_a_flow_that_is_to_outlive_its_worker_only_lets_go_of_its_pipes(world: World) -> None:
    guard = world.guard(end_with_worker=False)
    guard.check_launchers()
    assert world.let_go == 0
    world.parents = (1,)
    guard.check_launchers()
    assert (world.let_go, world.ended) == (1, [])
    guard.end_with_worker = True  # the recipe was read only now
    guard.check_launchers()
    assert world.ended == [WORKER_GONE]


def test_where_no_signal_can_be_sent_the_run_is_ended_as_soon_as_there_is_one(
    world: World,
) -> None:
    guard = world.guard(signals=False)
    world.state = StateType.CANCELLED
    guard.check_state()
    assert guard.cause == ""
    guard.end_run = world.ended.append
    guard.check_state()
    assert world.ended == [CANCELLED]


def test_a_flow_outside_of_the_main_thread_is_sent_no_signal() -> None:
    """A signal would end the program that runs it."""
    guards: list[Guard] = []
    thread = threading.Thread(target=lambda: guards.append(guard_flow()))
    thread.start()
    thread.join()
    ended: list[str] = []
    guards[0].end_run = ended.append
    guards[0].end_with_worker = True
    guards[0]._launchers = ()
    guards[0].check_launchers()
    assert ended == [WORKER_GONE]


def test_a_time_out_is_told_as_what_it_is(world: World) -> None:
    assert world.guard().cause_of(TimedOut("no time")) == TIMED_OUT


def test_a_worker_has_its_time_to_carry_out_a_cancellation(world: World) -> None:
    guard = world.guard()
    world.state = StateType.CANCELLING
    for world.now in (0.0, 5.0, WORKER_PATIENCE_S - 1):
        guard.check_state()
    assert world.ended == []
    world.now = WORKER_PATIENCE_S
    guard.check_state()
    assert world.ended == [CANCELLED]


def test_without_a_worker_a_second_look_suffices(world: World) -> None:
    guard = world.guard(launched=False)
    world.state = StateType.CANCELLING
    guard.check_state()
    assert world.ended == []
    guard.check_state()
    assert world.ended == [CANCELLED]


def test_looks_that_nobody_answered_and_a_state_taken_back_do_not_count(world: World) -> None:
    guard = world.guard(launched=False)
    for state in (StateType.CANCELLING, StateType.RUNNING, StateType.CANCELLING, None, None):
        world.state = state
        guard.check_state()
    assert world.ended == []


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        (StateType.CANCELLED, CANCELLED),
        (StateType.CRASHED, ENDED_IN_PREFECT),
        (StateType.COMPLETED, ENDED_IN_PREFECT),
        (StateType.FAILED, ENDED_IN_PREFECT),
    ],
)
def test_a_flow_run_that_has_ended_in_prefect_ends_here_too(
    world: World, state: StateType, cause: str
) -> None:
    world.state = state
    world.guard().check_state()
    assert world.ended == [cause]


def test_nothing_is_ended_once_the_teardown_has_begun(world: World) -> None:
    guard = world.guard()
    guard.stop()
    world.parents, world.state = (1,), StateType.CANCELLED
    guard.check_launchers()
    guard.check_state()
    assert world.ended == []
    assert guard.cause == ""


def test_a_run_that_failed_by_itself_meanwhile_says_so(world: World) -> None:
    guard = world.guard()
    world.state = StateType.CANCELLED
    guard.check_state()
    assert guard.cause_of(TrainingError("no")) == "TrainingError"
    assert guard.cause_of(None) == "completed"
    assert world.guard().cause_of(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_the_launcher_is_the_parent() -> None:
    assert launchers()[0] == os.getppid()


CHILD = """
import signal, sys, time
from tasks.guard import Guard, terminate_this_process
from pathlib import Path
told = Path(sys.argv[1])
def terminated(number, frame):
    print("a line that nobody reads", flush=True)
    told.with_name("ended").write_text(guard.cause)
    sys.exit(0)
signal.signal(signal.SIGTERM, terminated)
with Guard(lambda: None, launched=True, end_flow=terminate_this_process) as guard:
    guard.end_with_worker = True
    told.touch()
    time.sleep(60)
"""
MIDDLE = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], stdout=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""


def until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.slow
def test_a_flow_whose_worker_was_killed_is_terminated_and_can_still_print(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MIDDLE, str(tmp_path / "ready"), CHILD]
    middle = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert middle.stdout is not None
    child = int(middle.stdout.readline())
    try:
        assert until((tmp_path / "ready").exists, 60)
        middle.kill()
        middle.wait()
        assert until((tmp_path / "ended").exists, 3)
        assert until(lambda: (tmp_path / "ended").read_text() == WORKER_GONE, 1)
    finally:
        middle.kill()
        middle.wait()
        middle.stdout.close()
        if Path(f"/proc/{child}").exists() and not (tmp_path / "ended").exists():
            os.kill(child, signal.SIGKILL)
