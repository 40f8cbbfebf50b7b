"""The journal as the training driver writes it and as others read it meanwhile."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opd_core.errors import DataError
from opd_core.tracking.journal import Journal, JournalReader, JournalRecord, read_all

WRITER = """
import sys
from pathlib import Path
from opd_core.tracking.journal import Journal
journal = Journal(Path(sys.argv[1]))
for step in range(int(sys.argv[2])):
    journal.append(step, {"a": step / 7, "padding/" + "x" * (step % 50) * 40: 1.0})
    print(step, flush=True)
"""
FULL_DISK = """
import resource, sys
from pathlib import Path
from opd_core.tracking.journal import Journal
journal = Journal(Path(sys.argv[1]))
journal.append(1, {"a": 1.0})
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
try:
    journal.append(2, {"long": 0.123, "name" * 20: 2.0})
except OSError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.append(3, {"a": 3.0})
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def steps(records: list[JournalRecord]) -> list[int]:
    return [record.train_step for record in records]


def test_a_record_comes_back_as_it_was_written(path: Path) -> None:
    before = time.time()
    with Journal(path) as journal:
        journal.append(3, {"opd_reverse_kl/math/中文 (a=b)": 0.1, "response_tokens": 7})
    (record,) = JournalReader(path).read()
    assert record.train_step == 3
    assert record.metrics == {"opd_reverse_kl/math/中文 (a=b)": 0.1, "response_tokens": 7.0}
    assert before <= record.time_s <= time.time()


def test_one_line_of_json_per_record(path: Path) -> None:
    with Journal(path) as journal:
        journal.append(1, {"a": 0.5})
        journal.append(2, {"line\nbreak": 1.0})
    first, second = path.read_text().splitlines()
    assert json.loads(first).keys() == {"train_step", "time", "metrics"}
    assert json.loads(second)["metrics"] == {"line\nbreak": 1.0}


def test_values_that_are_not_finite_are_kept(path: Path) -> None:
    with Journal(path) as journal:
        journal.append(1, {"nan": math.nan, "inf": math.inf, "minus": -math.inf})
    (record,) = JournalReader(path).read()
    assert math.isnan(record.metrics["nan"])
    assert (record.metrics["inf"], record.metrics["minus"]) == (math.inf, -math.inf)


def test_each_read_gives_only_what_was_added(path: Path) -> None:
    reader = JournalReader(path)
    with Journal(path) as journal:
        journal.append(1, {})
        journal.append(2, {})
        assert steps(reader.read()) == [1, 2]
        assert reader.read() == []
        journal.append(3, {})
        assert steps(reader.read()) == [3]


def test_a_missing_file_is_an_empty_journal_until_it_appears(path: Path) -> None:
    reader = JournalReader(path)
    assert reader.read() == []
    with Journal(path) as journal:
        journal.append(1, {})
    assert steps(reader.read()) == [1]


def test_a_torn_last_line_is_left_for_the_next_call(path: Path) -> None:
    whole = b'{"train_step":1,"time":1.0,"metrics":{"a":1.0}}\n'
    path.write_bytes(whole + whole[:20])
    reader = JournalReader(path)
    assert steps(reader.read()) == [1]
    assert reader.read() == []
    path.write_bytes(whole + whole)
    assert steps(reader.read()) == [1]


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "",
        "[1, 2]",
        "3",
        '{"time": 1.0, "metrics": {}}',
        '{"train_step": 1.5, "time": 1.0, "metrics": {}}',
        '{"train_step": true, "time": 1.0, "metrics": {}}',
        '{"train_step": 1, "time": NaN, "metrics": {}}',
        '{"train_step": 1, "time": 1.0, "metrics": [1.0]}',
        '{"train_step": 1, "time": 1.0, "metrics": {"a": "1.0"}}',
        '{"train_step": 1, "time": 1.0, "metrics": {"a": 1' + "0" * 400 + "}}",
    ],
)
def test_a_malformed_whole_line_is_an_error_that_names_file_and_line(path: Path, line: str) -> None:
    good = '{"train_step":7,"time":1.0,"metrics":{}}\n'
    path.write_text(good + good + line + "\n" + good)
    reader = JournalReader(path)
    assert steps(reader.read()) == [7, 7]  # what came before it is not lost
    for _ in range(2):
        with pytest.raises(DataError, match=r"metrics\.jsonl, line 3: .*remove or mend"):
            reader.read()


def test_a_whole_journal_is_read_to_its_end_or_to_an_error(path: Path) -> None:
    good = '{"train_step":7,"time":1.0,"metrics":{}}\n'
    assert list(read_all(path)) == []
    path.write_text(good + good)
    assert steps(list(read_all(path))) == [7, 7]
    path.write_text(good + "nonsense\n" + good)
    records = read_all(path)
    assert next(records).train_step == 7
    with pytest.raises(DataError, match="line 2"):
        next(records)


def test_a_journal_that_lost_what_was_read_is_an_error(path: Path) -> None:
    with Journal(path) as journal:
        journal.append(1, {})
    reader = JournalReader(path)
    reader.read()
    path.write_bytes(b"")
    with pytest.raises(DataError, match="cut or replaced"):
        reader.read()


@pytest.mark.parametrize("torn", [b'{"train_step":2,"ti', b"x" * 200_000])
def test_the_next_writer_cuts_off_what_a_killed_one_left_half_written(
    path: Path, torn: bytes
) -> None:
    with Journal(path) as journal:
        journal.append(1, {})
    reader = JournalReader(path)
    path.write_bytes(path.read_bytes() + torn)
    assert steps(reader.read()) == [1]
    with Journal(path) as journal:
        journal.append(2, {})
    assert steps(reader.read()) == [2]
    assert steps(JournalReader(path).read()) == [1, 2]


def test_a_file_of_one_torn_line_becomes_an_empty_journal(path: Path) -> None:
    path.write_bytes(b'{"train_step":2,"ti')
    with Journal(path) as journal:
        journal.append(1, {})
    assert steps(JournalReader(path).read()) == [1]


def test_a_record_that_does_not_fit_on_the_disk_leaves_the_journal_readable(path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True
    )
    assert "make room on the disk" in child.stdout
    assert steps(JournalReader(path).read()) == [1, 3]


def test_a_reader_beside_the_writing_process_sees_every_record_once_and_whole(path: Path) -> None:
    reader, seen = JournalReader(path), list[JournalRecord]()
    command = [sys.executable, "-c", WRITER, str(path), "400"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as writer:
        while writer.poll() is None:
            seen += reader.read()
    assert writer.returncode == 0
    seen += reader.read()
    assert steps(seen) == list(range(400))
    assert [record.metrics["a"] for record in seen] == [step / 7 for step in range(400)]


def test_what_was_appended_survives_the_killing_of_the_writer(path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(path), "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(20):
            acknowledged = int(writer.stdout.readline())
        writer.kill()
    found = steps(JournalReader(path).read())
    assert found == list(range(len(found)))
    assert len(found) > acknowledged
