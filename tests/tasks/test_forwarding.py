"""Warnings and errors of the processes' logs: at their level, few, and without keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from logging import ERROR, WARNING
from pathlib import Path

import pytest

from tasks.forwarding import AT_ONCE, LONGEST_LINE, MOST_BYTES, LogForwarder, level_of


@dataclass
class Logs:
    """A folder of logs, a clock, and what was told."""

    folder: Path
    now: float = 0.0
    told: list[tuple[int, str]] = field(default_factory=list)

    def write(self, text: str, name: str = "teacher") -> None:
        with (self.folder / f"{name}.log").open("a") as file:
            file.write(text)

    def forwarder(self, *secrets: str) -> LogForwarder:
        def tell(level: int, text: str) -> None:
            self.told.append((level, text))

        files: Callable[[], list[Path]] = lambda: sorted(self.folder.glob("*.log"))  # noqa: E731
        return LogForwarder(files, tell, secrets, lambda: self.now)


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path)


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("2026-11-30 05:19:45,442 WARNING going on from a checkpoint", WARNING),
        ("[2026-11-30 08:24:57] ERROR: the engine died", ERROR),
        ("2026-11-30 07:59:32,711 - lmdeploy - WARNING - engine.py:44 - slow", WARNING),
        ("ERROR:    Exception in ASGI application", ERROR),
        ("CRITICAL out of memory", ERROR),
        ("[2026-11-30 04:18:28,599 E 812 812] (raylet) node_manager.cc:1: a worker died", ERROR),
        ("[2026-11-30 04:18:28,599 W 812 812] (raylet) slow", None),
        ('INFO:     127.0.0.1:47716 - "GET /health HTTP/1.1" 200 OK', None),
        ("server_args=ServerArgs(log_level='error')", None),
        ("x" * 200 + " ERROR far behind the head of a line", None),
    ],
)
def test_the_level_stands_in_a_lines_head(line: str, level: int | None) -> None:
    assert level_of(line) == level


def test_complaints_come_at_their_level_with_their_process_and_the_rest_stays(logs: Logs) -> None:
    forwarder = logs.forwarder()
    logs.write("INFO fine\nWARNING slow\nERROR bro")
    forwarder.look()
    assert logs.told == [(WARNING, "teacher: WARNING slow")]  # half a line waits for its rest
    logs.write("ken\n")
    logs.write("\x1b[36m(Learner pid=12, ip=::1)\x1b[0m ERROR no room\n", "student")
    forwarder.look()
    forwarder.look()
    assert logs.told[1:] == [(ERROR, "student: ERROR no room"), (ERROR, "teacher: ERROR broken")]


def test_a_traceback_is_one_message_also_when_it_comes_in_pieces(logs: Logs) -> None:
    forwarder = logs.forwarder()
    logs.write("Traceback (most recent call last):\n  File 'a.py', line 1\n")
    forwarder.look()
    assert logs.told == []
    logs.write("    ERROR = f()\nValueError: no\nINFO on\n")
    forwarder.look()
    ((level, text),) = logs.told
    assert level == ERROR
    assert text.splitlines() == [
        "teacher: Traceback (most recent call last):",
        "  File 'a.py', line 1",
        "    ERROR = f()",
        "ValueError: no",
    ]


def test_repeats_are_told_at_growing_distances_and_counted_at_the_end(logs: Logs) -> None:
    forwarder = logs.forwarder()
    logs.write("".join(f"WARNING queue of {n} is long\n" for n in range(42)))
    forwarder.look()
    forwarder.close()
    assert logs.told == [
        (WARNING, "teacher: WARNING queue of 0 is long"),
        (WARNING, "teacher: WARNING queue of 9 is long (seen 10 times)"),
        (WARNING, "teacher: seen 42 times (# is any number): WARNING queue of # is long"),
    ]


def test_a_file_that_complains_without_end_has_a_budget_that_grows_with_time(logs: Logs) -> None:
    forwarder = logs.forwarder()
    logs.write("".join(f"WARNING of kind {'abcdefghijklmnopqrstuvwxyz'[n]}\n" for n in range(26)))
    logs.write("ERROR is not starved by them\n")
    forwarder.look()
    assert len(logs.told) == AT_ONCE + 1
    logs.now = 125.0
    logs.write("WARNING A\nWARNING B\nWARNING C\n")
    forwarder.close()
    *told, last = logs.told[AT_ONCE + 1 :]
    assert [text for _, text in told] == ["teacher: WARNING A", "teacher: WARNING B"]
    assert last[1].startswith("teacher: 12 more warning lines were not forwarded: ")


def test_no_key_comes_through(logs: Logs) -> None:
    forwarder = logs.forwarder("s3cr3t")
    logs.write("ERROR s3cr3t was refused\nERROR Authorization: Bearer abc.def is old\n")
    logs.write('ERROR api_key=\'sk-12\' and "token": "t0k" at http://me:pw@host/x\n')
    forwarder.look()
    assert [text for _, text in logs.told] == [
        "teacher: ERROR *** was refused",
        "teacher: ERROR Authorization: Bearer *** is old",
        'teacher: ERROR api_key=\'***\' and "token": "***" at http://host/x',
    ]


LONG_SECRET = "Planted4Secret9Value7" + "abcdefgh1" * 8


@pytest.mark.parametrize("before", range(LONGEST_LINE - 100, LONGEST_LINE, 20))
def test_no_part_of_a_secret_comes_through_where_a_line_is_cut(logs: Logs, before: int) -> None:
    forwarder = logs.forwarder(LONG_SECRET)
    line = f"{'x' * before} {LONG_SECRET}\n"
    logs.write(f"ERROR {line}Traceback (most recent call last):\n  f()\n{line}")
    logs.write(f"Traceback (most recent call last):\n  {line}")  # it is told at the end
    forwarder.close()
    assert len(logs.told) == 3
    assert not [text for _, text in logs.told if "Planted" in text]


def test_no_secret_comes_through_with_its_digits_folded(logs: Logs) -> None:
    forwarder = logs.forwarder(LONG_SECRET)
    logs.write("".join(f"WARNING refused {LONG_SECRET}, try {n}\n" for n in range(3)))
    forwarder.close()
    assert [text for _, text in logs.told] == [
        "teacher: WARNING refused ***, try 0",
        "teacher: seen 3 times (# is any number): WARNING refused ***, try #",
    ]


def test_no_part_of_a_secret_comes_through_where_reading_begins_late(logs: Logs) -> None:
    forwarder = logs.forwarder(LONG_SECRET)
    read = f"{LONG_SECRET[10:]} ERROR\nERROR last\n"
    logs.write(f"x {LONG_SECRET[:10]}{read}{'y' * (MOST_BYTES - len(read) - 1)}\n")
    forwarder.look()
    assert [text for _, text in logs.told] == ["teacher: ERROR last"]


def test_after_its_close_nothing_is_forwarded(logs: Logs) -> None:
    forwarder = logs.forwarder()
    forwarder.close()
    logs.write("ERROR told to end\n")
    forwarder.look()
    assert logs.told == []


def test_a_file_that_was_begun_anew_or_is_huge_or_gone_is_no_matter(logs: Logs) -> None:
    forwarder = logs.forwarder()
    logs.write("x" * (MOST_BYTES + 10) + "\nERROR last\n")
    (logs.folder / "gone.log").symlink_to(logs.folder / "nothing")
    forwarder.look()
    (logs.folder / "teacher.log").write_text("ERROR another file\n")
    forwarder.look()
    logs.write("ERROR later\n")
    forwarder.look()
    assert [text for _, text in logs.told] == [
        f"teacher: ERROR {what}" for what in ("last", "another file", "later")
    ]
