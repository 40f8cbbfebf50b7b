"""The score store gives back what was paid for, exactly, and never costs a run."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd_core.scoring.store import ScoreStore, _key

IDS = (5, 6, 7, 8)
SCORES = (-0.1, -1e-300, -7.25)

WRITER = """
import sys
from pathlib import Path
from opd_core.scoring.store import ScoreStore
with ScoreStore(Path(sys.argv[1]), "teacher") as store:
    print("open", flush=True)
    sys.stdin.readline()
    for batch in range(int(sys.argv[2]), int(sys.argv[3])):
        for member in range(20):
            ids = [batch, member, *range(500)]
            store.put(ids, 0, [-0.5 - batch] * 501)
        store.flush()
        print(batch, flush=True)
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ScoreStore]:
    with ScoreStore(tmp_path, "teacher") as opened:
        yield opened


def file_of(folder: Path) -> Path:
    (file,) = folder.glob("*.sqlite")
    return file


def writer(folder: Path, first: int, last: int) -> subprocess.Popen[str]:
    """A process that has the store open, and begins to write when it is sent a line."""
    command = [sys.executable, "-c", WRITER, str(folder), str(first), str(last)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def begin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


# ------------------------------------------------------------------------------------ put and get


@settings(max_examples=25)
@given(
    scores=st.lists(st.floats(), min_size=1, max_size=20),
    first=st.lists(st.integers(0, 2**31), min_size=1, max_size=3),
)
def test_scores_come_back_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory, scores: list[float], first: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    ids, start = [*first, *range(len(scores))], len(first) - 1
    with ScoreStore(folder, "teacher") as store:
        store.put(ids, start, scores)
        store.flush()
    with ScoreStore(folder, "teacher") as store:
        back = store.get(ids, start)
        assert repr(back) == repr(tuple(scores))
        assert (store.hits, store.misses, store.rejected) == (1, 0, 0)


def test_nothing_is_on_disk_before_the_flush(tmp_path: Path, store: ScoreStore) -> None:
    store.put(IDS, 0, SCORES)
    with ScoreStore(tmp_path, "teacher") as other:
        assert other.get(IDS, 0) is None
        assert store.get(IDS, 0) == SCORES
        store.flush()
        assert other.get(IDS, 0) == SCORES
        assert (other.hits, other.misses) == (1, 1)


@pytest.mark.parametrize("drop", ["discard", "close"])
def test_scores_of_a_teacher_that_was_not_itself_are_dropped(
    tmp_path: Path, store: ScoreStore, drop: str
) -> None:
    store.put(IDS, 0, SCORES)
    getattr(store, drop)()
    assert store.get(IDS, 0) is None
    store.flush()
    with ScoreStore(tmp_path, "teacher") as other:
        assert other.get(IDS, 0) is None


def test_other_ids_another_start_and_another_teacher_are_misses(
    tmp_path: Path, store: ScoreStore
) -> None:
    store.put(IDS, 0, SCORES)
    store.put((0, *IDS), 1, (-1.0, -2.0, -3.0))
    store.flush()
    assert store.get(IDS, 1) is None
    assert store.get((*IDS[:-1], 9), 0) is None
    assert store.get((0, *IDS), 0) is None
    assert store.get((0, *IDS), 1) == (-1.0, -2.0, -3.0)
    with ScoreStore(tmp_path, "teacher/2") as other:
        assert other.get(IDS, 0) is None
    assert len(list(tmp_path.glob("*.sqlite"))) == 2


def test_the_first_score_of_a_sequence_stays(tmp_path: Path, store: ScoreStore) -> None:
    with ScoreStore(tmp_path, "teacher") as other:
        for writing, scores in ((store, SCORES), (other, (-9.0, -9.0, -9.0))):
            writing.put(IDS, 0, scores)
            writing.flush()
        assert other.get(IDS, 0) == SCORES


def test_a_wrong_number_of_scores_is_refused(store: ScoreStore) -> None:
    with pytest.raises(ValueError, match="4 tokens from 1 have 2 logprobs, got 3"):
        store.put(IDS, 1, SCORES)


def test_an_unknown_teacher_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fingerprint"):
        ScoreStore(tmp_path, "")


# ------------------------------------------------------------------------------------------ damage


@pytest.mark.parametrize(
    "change",
    [
        "count = 2",
        "logprobs = substr(logprobs, 1, 16)",
        "logprobs = zeroblob(24)",
        "logprobs = CAST(x'ff' AS TEXT)",
        "logprobs = NULL",
        "checksum = checksum + 1",
        "count = 'three'",
    ],
)
def test_an_entry_that_does_not_fit_is_ignored_and_deleted(
    tmp_path: Path, store: ScoreStore, change: str
) -> None:
    store.put(IDS, 0, SCORES)
    store.flush()
    with sqlite3.connect(file_of(tmp_path)) as db:
        db.execute(f"UPDATE scores SET {change}")
    db.close()
    assert store.get(IDS, 0) is None
    assert (store.hits, store.misses, store.rejected) == (0, 1, 1)
    store.put(IDS, 0, SCORES)
    store.flush()
    assert store.get(IDS, 0) == SCORES
    assert store.rejected == 1


def test_an_entry_under_the_key_of_another_is_rejected(tmp_path: Path, store: ScoreStore) -> None:
    store.put(IDS, 0, SCORES)
    store.flush()
    with sqlite3.connect(file_of(tmp_path)) as db:
        db.execute("UPDATE scores SET key = ?", (_key((1, 2, 3, 4), 0),))
    db.close()
    assert store.get((1, 2, 3, 4), 0) is None
    assert store.rejected == 1


def test_a_damaged_file_is_left_aside_and_a_new_one_begun(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ScoreStore(tmp_path, "teacher"):
        pass
    damaged = file_of(tmp_path)
    damaged.write_bytes(b"no database at all" * 1000)
    for known in (False, True):
        with ScoreStore(tmp_path, "teacher") as store:
            assert (store.get(IDS, 0) == SCORES) is known
            store.put(IDS, 0, SCORES)
            store.flush()
    (record,) = caplog.records
    assert f"{damaged} is damaged" in record.getMessage()
    assert damaged.read_bytes().startswith(b"no database at all")


def test_damage_that_shows_only_on_reading_costs_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ScoreStore(tmp_path, "teacher") as store:
        for number in range(300):
            store.put((number, *range(200)), 0, (-1.0,) * 200)
        store.flush()
    file = file_of(tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[:4096] + b"\xa5" * (len(content) - 4096))
    with ScoreStore(tmp_path, "teacher") as store:
        assert store.get((7, *range(200)), 0) is None
        store.put(IDS, 0, SCORES)
        store.flush()
        assert store.get(IDS, 0) == SCORES
    assert "is damaged" in caplog.text


def test_a_file_with_another_table_is_left_aside(tmp_path: Path, store: ScoreStore) -> None:
    file = file_of(tmp_path)
    store.close()
    with sqlite3.connect(file) as db:
        db.execute("DROP TABLE scores")
        db.execute("CREATE TABLE scores (words TEXT)")
    db.close()
    with ScoreStore(tmp_path, "teacher") as other:
        other.put(IDS, 0, SCORES)
        other.flush()
        assert other.get(IDS, 0) == SCORES
    assert len(list(tmp_path.glob("*.sqlite"))) == 2


def test_a_folder_that_cannot_be_used_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with ScoreStore(tmp_path / "file" / "store", "teacher") as store:
        store.put(IDS, 0, SCORES)
        store.flush()
        assert store.get(IDS, 0) is None
    assert "no scores are kept or found in this run" in caplog.text


def test_a_flush_that_fails_midway_leaves_nothing_and_costs_no_run(
    tmp_path: Path, store: ScoreStore, caplog: pytest.LogCaptureFixture
) -> None:
    with sqlite3.connect(file_of(tmp_path)) as db:
        db.execute(
            "CREATE TRIGGER full BEFORE INSERT ON scores WHEN NEW.count = 3 "
            "BEGIN SELECT RAISE(ABORT, 'no room'); END"
        )
    db.close()
    store.put(IDS[:3], 0, SCORES[:2])
    store.put(IDS, 0, SCORES)
    store.flush()
    with ScoreStore(tmp_path, "teacher") as other:
        assert other.get(IDS[:3], 0) is None
    assert store.get(IDS, 0) is None
    (record,) = caplog.records
    assert "no scores are kept or found in this run from now on" in record.getMessage()
    assert "no room" in record.getMessage()


# ---------------------------------------------------------------------------------------- processes


def test_a_killed_writer_leaves_whole_transactions(tmp_path: Path) -> None:
    done = -1
    for _ in range(6):
        process = writer(tmp_path, done + 1, 10_000)
        begin(process)
        assert process.stdout is not None
        for _ in range(3):
            done = int(process.stdout.readline())
        process.kill()  # in the midst of a later transaction
        rest = process.communicate()[0].split()
        done = max([done, *map(int, rest)])
        with ScoreStore(tmp_path, "teacher") as store:
            for batch in range(done + 1):
                assert store.get([batch, 19, *range(500)], 0) == (-0.5 - batch,) * 501
            found = [store.get([done + 1, m, *range(500)], 0) is not None for m in range(20)]
            assert all(found) or not any(found)
            assert store.rejected == 0
    db = sqlite3.connect(file_of(tmp_path))
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


def test_several_processes_write_into_one_store(tmp_path: Path) -> None:
    processes = [writer(tmp_path, 20 * n, 20 * n + 20) for n in range(3)]
    for process in processes:
        begin(process)
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    with ScoreStore(tmp_path, "teacher") as store:
        for batch in range(60):
            for member in range(20):
                assert store.get([batch, member, *range(500)], 0) == (-0.5 - batch,) * 501
        assert (store.hits, store.misses) == (60 * 20, 0)
