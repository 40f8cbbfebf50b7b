"""What the reaper found and did is told, and what is left is not hidden."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest
from rich.console import Console

from opd_core.lifecycle.process import ProcessId, boot_id, identify
from opd_core.lifecycle.registry import RegisteredRun, Registry
from tasks.reaping import NotReaped, ReapLine, ReapReport, reap_dead_runs

SETTLES = (sys.executable, "-c", "")
LACKS = (sys.executable, "-c", "import sys; sys.exit('MLflow is away')")


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "runs")


def register(
    registry: Registry,
    name: str,
    *,
    settle: tuple[str, ...] = SETTLES,
    owner: ProcessId | None = None,
    host: str = platform.node(),
) -> None:
    """A run whose owner never lived, unless one is given."""
    run_dir = registry.folder.parent / name
    run_dir.mkdir()
    registry.add(
        RegisteredRun(
            run_id=name,
            run_dir=run_dir,
            owner=owner or ProcessId(os.getpid(), 1),
            settle=settle,
            teardown_s=5.0,
            host=host,
            boot_id=boot_id() if host == platform.node() else "another",
        )
    )


def test_a_dead_run_is_ended_and_struck_out(registry: Registry) -> None:
    register(registry, "dead")
    report = reap_dead_runs(dry_run=False, registry=registry)
    (line,) = report.lines
    assert (line.run, line.state, line.done) == ("dead", "dead", "ended and settled")
    assert not report.left
    report.raise_left()
    assert reap_dead_runs(dry_run=False, registry=registry).lines == ()


def test_a_dry_run_only_says_what_there_is(registry: Registry) -> None:
    register(registry, "dead", settle=LACKS)
    for _ in range(2):
        (line,) = reap_dead_runs(dry_run=True, registry=registry).lines
        assert line.done == "would be ended"
        assert not line.left
    assert not (registry.folder.parent / "dead" / "receipt.json").exists()


def test_what_is_left_is_told_run_by_run(registry: Registry) -> None:
    register(registry, "lacks", settle=LACKS)
    register(registry, "settles")
    report = reap_dead_runs(dry_run=False, registry=registry)
    assert [line.run for line in report.left] == ["lacks"]
    assert "MLflow is away" in report.left[0].done
    report.raise_left()  # no process holds anything: a later try may do


def test_processes_that_cannot_be_ended_are_a_failure() -> None:
    line = ReapLine("tiny-1", "dead", "process 7", "it hangs", "/runs", left=True, lives=True)
    with pytest.raises(NotReaped, match="tiny-1: it hangs"):
        ReapReport((line,)).raise_left()


def test_runs_of_the_living_and_of_other_machines_are_shown_and_left(registry: Registry) -> None:
    register(registry, "living", owner=identify(os.getpid()))
    register(registry, "elsewhere", host="another")
    report = reap_dead_runs(dry_run=False, registry=registry)
    assert {line.run: line.state for line in report.lines} == {
        "living": "living",
        "elsewhere": "elsewhere",
    }
    assert not report.left
    assert len(registry.runs()) == 2


def test_a_report_can_be_shown_everywhere(registry: Registry) -> None:
    assert reap_dead_runs(dry_run=True, registry=registry).markdown() == "Every run is settled."
    register(registry, "lacks", settle=LACKS)
    report = reap_dead_runs(dry_run=False, registry=registry)
    *_, row = report.markdown().splitlines()
    assert "MLflow is away" in row
    console = Console(width=300)
    with console.capture() as shown:
        console.print(report.table())
    assert "MLflow is away" in shown.get()
    assert report.to_json()[0]["run"] == "lacks"
