"""The runs that are not settled yet, as files: entered, replaced, struck out, by several at
once."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from opd_core.lifecycle.errors import LifecycleError
from opd_core.lifecycle.handle import Supervisor
from opd_core.lifecycle.ledger import is_held, read_ledger
from opd_core.lifecycle.process import ProcessId, identify, is_running
from opd_core.lifecycle.registry import RegisteredRun, Registry, state_folder

# argv: registry folder, first letter of the run ids. Starts when its input ends.
WRITER = """
import pathlib, sys
from opd_core.lifecycle.process import ProcessId
from opd_core.lifecycle.registry import RegisteredRun, Registry

registry, letter = Registry(pathlib.Path(sys.argv[1])), sys.argv[2]
sys.stdin.read()
for number in range(40):
    run_ids = [f"{letter}-{number}", "shared"]
    for run_id in run_ids:
        registry.add(RegisteredRun.here(run_id, registry.folder, ProcessId(1, 1), (letter,), 1.0))
    assert {run.run_id for run in registry.runs()} >= set(run_ids), "both, whole"
    if number % 2:
        registry.remove(run_ids[0])
"""


def entry(run_id: str, run_dir: Path, **fields: object) -> RegisteredRun:
    run = RegisteredRun.here(run_id, run_dir, ProcessId(4711, 880123), ("settle", "it"), 60.0)
    return replace(run, **fields)  # type: ignore[arg-type]


def test_a_run_is_entered_replaced_and_struck_out(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "state" / "runs")
    assert registry.runs() == ()
    registry.remove("never-there")
    one, two = entry("run-1", tmp_path / "one"), entry("run-2", tmp_path / "two")
    registry.add(two)
    registry.add(one)
    assert registry.runs() == (one, two)
    again = entry("run-1", tmp_path / "elsewhere", settle=(), teardown_s=5.0)
    registry.add(again)
    assert registry.runs() == (again, two)
    registry.remove("run-1")
    registry.remove("run-1")
    assert registry.runs() == (two,)


def test_an_entry_of_another_host_comes_back_as_it_was_entered(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    run = entry("run-1", tmp_path, host="another-host", boot_id="another-boot")
    registry.add(run)
    assert registry.runs() == (run,)


@pytest.mark.parametrize(
    "content",
    [b"", b'{"run_id": "dam', b"null", b"[1, 2]", b'{"run_id": "damaged"}', b"\xff\xfe\x00"],
)
def test_a_file_that_is_no_entry_is_left_alone(content: bytes, tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    run = entry("run-1", tmp_path)
    registry.add(run)
    damaged, foreign = tmp_path / "damaged.json", tmp_path / "notes.txt"
    for file in (damaged, foreign):
        file.write_bytes(content)
    assert registry.runs() == (run,)
    assert damaged.read_bytes() == foreign.read_bytes() == content


def test_two_processes_write_at_once_and_lose_nothing(tmp_path: Path, repository: Path) -> None:
    folder = tmp_path / "registry"
    command = [sys.executable, "-c", WRITER, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    writers = [
        subprocess.Popen([*command, letter], env=environment, stdin=subprocess.PIPE)
        for letter in "ab"
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.close()
    assert [writer.wait(60) for writer in writers] == [0, 0]
    kept = {f"{letter}-{number}" for letter in "ab" for number in range(0, 40, 2)}
    assert {run.run_id for run in Registry(folder).runs()} == {*kept, "shared"}
    assert {file.stem for file in folder.iterdir()} == {*kept, "shared"}, "nothing half-written"


def test_the_users_registry_lies_in_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert Registry.of_user().folder == tmp_path / "opd-lab" / "runs"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert state_folder() == tmp_path / "home" / ".local" / "state" / "opd-lab"


def test_a_run_stands_in_the_registry_until_it_is_settled(tmp_path: Path, run_id: str) -> None:
    registry = Registry(tmp_path / "registry")
    settle = (sys.executable, "-c", "")
    supervisor = Supervisor.start(
        run_dir=tmp_path / "run", run_id=run_id, teardown_s=7.0, settle=settle, registry=registry
    )
    me = identify(os.getpid())
    assert me is not None
    expected = RegisteredRun.here(run_id, tmp_path / "run", me, settle, 7.0)
    assert registry.runs() == (expected,)
    supervisor.end()
    assert registry.runs() == (expected,)
    supervisor.settled()
    assert registry.runs() == ()


def test_a_registry_that_cannot_be_written_starts_no_run(tmp_path: Path, run_id: str) -> None:
    in_the_way = tmp_path / "registry"
    in_the_way.write_text("a file")
    assert Registry(in_the_way).runs() == ()
    record = tmp_path / "settled"
    with pytest.raises(LifecycleError, match=r"registry.*XDG_STATE_HOME"):
        Supervisor.start(
            run_dir=tmp_path / "run",
            run_id=run_id,
            settle=("touch", str(record)),
            registry=Registry(in_the_way),
        )
    ledger = tmp_path / "run" / "ledger.jsonl"
    facts = read_ledger(ledger)[0].facts
    assert not is_running(ProcessId(facts["supervisor_pid"], facts["supervisor_start_ticks"]))
    assert not is_held(ledger)
    assert in_the_way.read_text() == "a file"
    assert not record.exists()
