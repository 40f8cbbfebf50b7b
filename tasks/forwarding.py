"""Warnings and errors of a run's processes, from their log files into the Prefect run's log.

Everything else stays in the files. A server that complains without end costs the log a few lines:
repeats are counted, each file has a budget, and what was left out is told.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from opd_core.tracking.shipper import without_credentials

Tell = Callable[[int, str], None]
"""Takes a level of :mod:`logging` and a text."""

MOST_BYTES = 1 << 20
"""Of one file in one look; a file that grows faster is not read whole."""
LONGEST_LINE = 500
LONGEST_TRACEBACK = 20
"""Lines of it that are kept, the last ones."""
AT_ONCE, ANOTHER_AFTER_S = 15, 60.0
"""The budget of a file and a level: so many messages at once, then one for each so many seconds."""
TOLD_AGAIN = frozenset({10, 100, 1_000, 10_000, 100_000})
MOST_KINDS, MOST_REPEATED = 500, 5
"""Different messages of a file that are told apart; those whose number is told at the end."""

_COLOUR = re.compile(r"\x1b?\[[0-9;]*m")
_RAY_PREFIX = re.compile(r"^\([^()]*\bpid=\d+[^()]*\)\s?")
_LEVEL = re.compile(r"\b(CRITICAL|FATAL|ERROR|WARNING|WARN)\b")
_RAY_CORE = re.compile(r"^\[[^\]]* [EF] \d+ \d+\]")
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
_HEAD = 90
"""A line's level stands among its first characters."""
_TRACEBACK = "Traceback (most recent call last)"
_SECRET = re.compile(
    r"(?i)(bearer |(?:api[-_]?key|token|password|passwd|secret)[\"']?\s*[=:]\s*[\"']?)"
    r"[^\s\"',;&]+"
)


class LogForwarder:
    """Looks at log files: call :meth:`look` now and then, from any thread. ``files`` lists those
    that there are.

    ``secrets`` never reach ``tell``, nor does what looks like one.
    """

    def __init__(
        self,
        files: Callable[[], Iterable[Path]],
        tell: Tell,
        secrets: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._tell = tell
        self._secrets = sorted(filter(None, secrets), key=len, reverse=True)
        self._clock = clock
        self._sources: dict[Path, _Source] = {}
        self._lock = threading.Lock()
        self._closed = False

    def look(self) -> None:
        """Forward what was written since the last look. Raises nothing for a file that cannot be
        read."""
        with self._lock:
            if self._closed:
                return
            for path in self._files():
                source = self._sources.setdefault(path, _Source(path, self._clean, self._clock))
                for level, text in source.new():
                    self._tell(level, f"{path.stem}: {text}")

    def close(self) -> None:
        """Look once more, tell what was left out, and no more: what the processes say when
        they are told to end is of no interest."""
        self.look()
        with self._lock:
            self._closed = True
            for source in self._sources.values():
                for level, text in source.rest():
                    self._tell(level, f"{source.path.stem}: {text}")

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return without_credentials(_SECRET.sub(r"\1***", text))


@dataclass
class _Budget:
    clock: Callable[[], float]
    left: float = AT_ONCE
    at: float = field(init=False)
    left_out: int = 0

    def __post_init__(self) -> None:
        self.at = self.clock()

    def take(self) -> bool:
        now = self.clock()
        self.left = min(self.left + (now - self.at) / ANOTHER_AFTER_S, AT_ONCE)
        self.at = now
        if self.left < 1:
            self.left_out += 1
            return False
        self.left -= 1
        return True


class _Source:
    """One file: how far it was read, and what was told of it.

    A secret is looked for in whole lines: of one that was cut, or whose digits became ``#``, a part
    would come through.
    """

    def __init__(self, path: Path, clean: Callable[[str], str], clock: Callable[[], float]) -> None:
        self.path = path
        self._clean = clean
        self._offset = 0
        self._traceback: list[str] = []
        self._seen: Counter[tuple[int, str]] = Counter()
        self._budgets = {level: _Budget(clock) for level in (logging.WARNING, logging.ERROR)}

    def new(self) -> Iterator[tuple[int, str]]:
        """What is to be told of the lines that came."""
        for line in self._lines():
            for level, text in self._messages(line):
                yield from self._limited(level, text)

    def rest(self) -> Iterator[tuple[int, str]]:
        """What was begun, and what was left out."""
        if self._traceback:
            yield from self._limited(logging.ERROR, self._whole_traceback())
        for level, budget in self._budgets.items():
            if budget.left_out:
                name = logging.getLevelName(level).lower()
                yield level, f"{budget.left_out} more {name} lines were not forwarded: {self.path}"
        for (level, kind), count in self._seen.most_common(MOST_REPEATED):
            if count > 1 and count not in TOLD_AGAIN:
                yield level, f"seen {count} times (# is any number): {kind[:LONGEST_LINE]}"

    def _lines(self) -> Iterator[str]:
        """Whole lines, without colours and Ray's prefix."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                begin = self._offset if self._offset <= size else 0  # else it was begun anew
                start = max(begin, size - MOST_BYTES)
                file.seek(start)
                read = file.read(MOST_BYTES)
        except OSError:
            return
        whole = read[: read.rfind(b"\n") + 1]
        self._offset = start + len(whole)
        if start > begin:  # in the middle of a line
            whole = whole[whole.find(b"\n") + 1 :]
        for line in whole.decode("utf-8", "replace").splitlines():
            yield _RAY_PREFIX.sub("", _COLOUR.sub("", line))

    def _messages(self, line: str) -> Iterator[tuple[int, str]]:
        if self._traceback:
            self._traceback.append(line)
            if line and not line[0].isspace():
                yield logging.ERROR, self._whole_traceback()
        elif line.startswith(_TRACEBACK):
            self._traceback = [line]
        elif (level := level_of(line)) is not None:
            yield level, self._clean(line)[:LONGEST_LINE]

    def _whole_traceback(self) -> str:
        lines = self._clean("\n".join(self._traceback)).split("\n")
        self._traceback = []
        return "\n".join(line[:LONGEST_LINE] for line in lines[-LONGEST_TRACEBACK:])

    def _limited(self, level: int, text: str) -> Iterator[tuple[int, str]]:
        kind = level, _NUMBER.sub("#", text)
        if kind in self._seen or len(self._seen) < MOST_KINDS:
            self._seen[kind] += 1
        times = self._seen[kind]
        if times > 1 and times not in TOLD_AGAIN:
            return
        if self._budgets[level].take():
            yield level, text + (f" (seen {times} times)" if times > 1 else "")


def level_of(line: str) -> int | None:
    """``logging.ERROR`` or ``logging.WARNING`` where a line's head says so, in any of the ways of
    Python's logging, SGLang, LMDeploy, uvicorn and Ray; else None."""
    if _RAY_CORE.match(line):
        return logging.ERROR
    found = _LEVEL.search(line, 0, _HEAD)
    if found is None:
        return None
    return logging.WARNING if found[1].startswith("WARN") else logging.ERROR
