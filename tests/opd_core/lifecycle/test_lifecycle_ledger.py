"""The ledger on the disk: whole lines, torn lines, one writer."""

from __future__ import annotations

from pathlib import Path

import pytest

from opd_core.lifecycle.errors import LedgerBusy, LedgerDamaged
from opd_core.lifecycle.ledger import Ledger, read_ledger


def test_records_come_back_in_order_and_a_missing_ledger_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    assert read_ledger(path) == ()
    ledger = Ledger.open(path, "run-1")
    assert ledger.before == ()
    ledger.append("run_started", run_id="run-1")
    ledger.append("child_starting", name="teacher", ports=[30000])
    ledger.close()
    records = read_ledger(path)
    assert [record.event for record in records] == ["run_started", "child_starting"]
    assert records[1].facts == {"name": "teacher", "ports": [30000]}


def test_a_torn_last_line_is_left_out_and_the_next_writer_starts_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.open(path, "run-1")
    ledger.append("run_started", run_id="run-1")
    ledger.close()
    with path.open("ab") as file:
        file.write(b'{"event": "child_sta')
    assert [record.event for record in read_ledger(path)] == ["run_started"]
    continued = Ledger.open(path, "run-1")
    assert [record.event for record in continued.before] == ["run_started"]
    continued.append("run_started", run_id="run-1")
    continued.close()
    assert [record.event for record in read_ledger(path)] == ["run_started", "run_started"]


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"event": "run_started", "at": 1}\nrubbish\n{"event": "receipt", "at": 2}\n')
    with pytest.raises(LedgerDamaged, match="line 2"):
        read_ledger(path)


def test_only_one_writer_and_only_of_one_run(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.open(path, "run-1")
    ledger.append("run_started", run_id="run-1", supervisor_pid=4711)
    with pytest.raises(LedgerBusy, match="pid 4711"):
        Ledger.open(path, "run-1")
    ledger.close()
    with pytest.raises(LedgerDamaged, match=r"run-1.*expected 'run-2'"):
        Ledger.open(path, "run-2")
    Ledger.open(path, "run-1").close()
