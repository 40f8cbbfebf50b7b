"""Five endings with the real SGLang as the teacher: `make test-teardown`.

It runs on a CPU from the environment that `opd prepare sglang` makes; without that the cells fail.
SGLang is a family: a main process, a scheduler, a detokenizer and Python's resource tracker.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from deployments.drill.catalogue import QUICK
from deployments.drill.striking import part_of
from deployments.drill.watching import RunView, answers_well
from opd_core.lifecycle.process import ProcessId, descendants, is_running, process_table
from opd_core.scoring.state import read_state
from opd_core.training.files import SCORING_FILE
from tests.servers.conftest import STARTUP_LIMIT_S, interpreter
from tests.teardown.playing import (
    COMPLETED,
    INTERRUPTED,
    KILLED,
    Cell,
    await_end,
    await_moment,
    play,
)
from tests.teardown.stage import Stage, wait_until
from tests.teardown.surfaces import CommandLine, Door

pytestmark = [pytest.mark.teardown, pytest.mark.timeout(2 * STARTUP_LIMIT_S)]

SCHEDULER = "sglang::scheduler"
PARTS = 4
HUNG_S = 30.0 + 5.0
"""An SGLang that hangs: the grace that it gets between SIGINT and SIGKILL, and 5 s."""


class SGLang(CommandLine):
    """``opd run`` of the tiny recipe with SGLang as its teacher."""

    name = "SGLang"

    def open(self, settings: Sequence[str], *arguments: str) -> None:
        teacher = {
            "backend": "sglang",
            "launch.python": interpreter("sglang"),
            "launch.startup_limit_s": STARTUP_LIMIT_S,
        }
        own = [f"opd.teachers.0.{key}={value}" for key, value in teacher.items()]
        super().open((*own, "training.prompts_per_step=32", *settings), *arguments)

    def await_run(self) -> RunView:
        """The run, once its server loads."""
        run = super().await_run()
        wait_until(lambda: run.started("teacher"), "the server's start", 60, pause_s=0.01)
        self.await_family(run)
        return run

    def await_family(self, run: RunView) -> None:
        """Wait until the server is complete; it loads, and its parts do not yet die with it."""

        def complete() -> bool:
            self.assert_lives()
            self.family = family_of(run)
            return len(self.family) == PARTS

        wait_until(complete, "all of the server", STARTUP_LIMIT_S, pause_s=0.01)


def family_of(run: RunView) -> frozenset[ProcessId]:
    """The server that was started last, by descent."""
    main = run.started("teacher")[-1]
    table = process_table()
    return frozenset(table[pid].identity for pid in (main, *descendants(main, table)))


def living(family: frozenset[ProcessId]) -> list[ProcessId]:
    """Those of them that run."""
    return [process for process in family if is_running(process)]


def teacher_ends(run: RunView) -> list[str]:
    """How each server of the run ended, as its receipt tells."""
    receipt = run.receipt()
    assert receipt is not None
    return [child.how for child in receipt.children if child.kind == "teacher"]


@pytest.fixture
def sglang(door: Callable[..., Any]) -> SGLang:
    made: SGLang = door(SGLang)
    return made


def test_a_run_that_ends_by_itself(stage: Stage, sglang: SGLang) -> None:
    settings = ("training.steps=4",)
    cell = Cell("normal", "completed", COMPLETED, comes=120, settings=settings, exits=0)
    run = play(stage, sglang, cell)
    assert not living(sglang.family)
    assert teacher_ends(run) == ["SIGINT"]


def test_the_flow_is_killed_while_the_server_loads(stage: Stage, sglang: SGLang) -> None:
    cell = Cell("kill-flow", "owner died", KILLED, "loading", exits=-signal.SIGKILL)
    play(stage, sglang, cell)
    assert not living(sglang.family)


def test_the_flow_is_killed_during_sampling(stage: Stage, sglang: SGLang) -> None:
    cell = Cell("kill-flow", "owner died", KILLED, exits=-signal.SIGKILL)
    run = play(stage, sglang, cell)
    assert not living(sglang.family)
    assert teacher_ends(run) == ["SIGINT"]


def test_the_server_loses_its_main_process_and_is_started_again(
    stage: Stage, sglang: SGLang
) -> None:
    """None of the old one is left when the new one starts: not of one that is ready, nor of one
    that loads, whose scheduler and detokenizer live on without it."""

    def killed(_: Door, run: RunView) -> None:
        for servers in (2, 3):
            os.kill(run.started("teacher")[-1], signal.SIGKILL)
            restarted = lambda: len(run.started("teacher")) == servers  # noqa: B023, E731
            wait_until(restarted, "another server", 60, pause_s=0.005)
            assert not living(sglang.family)
            sglang.await_family(run)
        port = run.events("child_starting")[-1].facts["ports"][0]
        wait_until(lambda: answers_well(port), "the server's health", STARTUP_LIMIT_S)

    cell = Cell(
        "kill-teacher", "KeyboardInterrupt", INTERRUPTED, act=killed, survived=True, exits=130
    )
    run = play(stage, sglang, cell)
    assert not living(sglang.family)
    assert teacher_ends(run) == ["exited", "exited", "SIGINT"]


def test_the_flow_is_told_to_end_while_the_server_hangs(stage: Stage, sglang: SGLang) -> None:
    cell = Cell(
        "stop-scheduler, then terminate",
        "TerminationSignal",
        INTERRUPTED,
        limit_s=HUNG_S,
        exits=-signal.SIGTERM,
    )
    sglang.open(QUICK)
    run = sglang.await_run()
    await_moment(sglang, run, cell.moment)
    os.kill(part_of(run, SCHEDULER), signal.SIGSTOP)
    await_unanswered(run)
    assert {process.pid for process in sglang.family} <= run.processes().keys()
    struck = time.monotonic()
    os.kill(run.owner(), signal.SIGTERM)
    await_end(stage, sglang, run, cell, struck)
    assert not living(sglang.family)


def await_unanswered(run: RunView) -> None:
    """Wait until the training job tells of requests that wait for an answer."""
    since = time.time()

    def unanswered() -> bool:
        told = read_state(run.directory / SCORING_FILE)["teacher"]
        return told.told_at > since and told.replicas[0].in_flight > 0

    wait_until(unanswered, "requests without an answer", 30)
