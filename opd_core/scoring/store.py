"""Scores that were paid for once: kept on disk for a resumed run, an ablation or another loss.

A teacher is frozen, so the scores of a sequence depend on nothing but its ids. They are kept per
fingerprint, which must therefore name everything else that changes the numbers. A store may cost
time, never a run: whatever is wrong with its file, scores are simply asked for again.

Key: SHA-256 of the start and the ids as 64-bit integers, which no other pair of start and ids
writes in the same way. Among n sequences two share a key with a probability below n² / 2^257: for
a million million of them 10^-53. (It would be noticed unless their lengths were the same, too.)
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Self, TypeVar
from urllib.parse import quote

BUSY_LIMIT_S = 10.0
DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
"""The last one means that the table is not ours."""
TABLE = """
CREATE TABLE IF NOT EXISTS scores
(key BLOB PRIMARY KEY, count INTEGER, checksum INTEGER, logprobs BLOB)
"""
SELECT = "SELECT count, checksum, logprobs FROM scores WHERE key = ?"
INSERT = "INSERT OR IGNORE INTO scores VALUES (?, ?, ?, ?)"
DELETE = "DELETE FROM scores WHERE key = ?"

Entry = tuple[int, int, bytes]
T = TypeVar("T")

logger = logging.getLogger(__name__)


class ScoreStore:
    """The scores of one teacher, exact to the last bit. Use as a context manager, in one thread.

    Several processes of one host may share a folder on a local disk, and any may be killed at any
    time: a transaction is there whole or not at all. The first score of a sequence stays. Raises
    ValueError for an empty fingerprint: scores of unknown models must not meet.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        if not fingerprint:
            raise ValueError(
                "a score store needs the fingerprint of its teacher, and it is not known: leave "
                "opd.score_store empty for a teacher whose model files cannot be read"
            )
        self._folder = folder
        self._name = quote(fingerprint, safe="")
        self._pending: dict[bytes, Entry] = {}
        self.hits = 0
        self.misses = 0
        self.rejected = 0
        """Entries that did not fit what was asked for; each was a miss as well."""
        self._path = folder
        self._db = self._opened()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, token_ids: Sequence[int], start: int) -> tuple[float, ...] | None:
        """The N - S - 1 logprobs of ``token_ids[start + 1:]``, or None; pending ones count."""
        key = _key(token_ids, start)
        entry: Entry | None = self._pending.get(key) or self._tried(
            lambda db: db.execute(SELECT, (key,)).fetchone()
        )
        if entry is not None and not _fits(entry, key, len(token_ids) - start - 1):
            self.rejected += 1
            self._tried(lambda db: db.execute(DELETE, (key,)))
            entry = None
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        return struct.unpack(f"<{entry[0]}d", entry[2])

    def put(self, token_ids: Sequence[int], start: int, logprobs: Sequence[float]) -> None:
        """Keep N - S - 1 scores in memory until :meth:`flush`. Raises ValueError for another
        number."""
        expected = len(token_ids) - start - 1
        if len(logprobs) != expected:
            raise ValueError(
                f"{len(token_ids)} tokens from {start} have {expected} logprobs, "
                f"got {len(logprobs)}"
            )
        key = _key(token_ids, start)
        blob = struct.pack(f"<{expected}d", *logprobs)
        self._pending[key] = (expected, _checksum(key, blob), blob)

    def flush(self) -> None:
        """Write all that is pending in one transaction: the teacher was proven to be itself."""
        rows = [(key, *entry) for key, entry in self._pending.items()]
        self.discard()
        if rows:
            self._tried(lambda db: _insert(db, rows))

    def discard(self) -> None:
        """Drop all that is pending: it may come from a teacher that was not itself."""
        self._pending.clear()

    def close(self) -> None:
        """Drop what is pending and close the file; nothing is found or kept any more."""
        self.discard()
        if self._db is not None:
            self._db.close()
            self._db = None

    def _opened(self) -> sqlite3.Connection | None:
        """The first file that is not set aside; None, with a warning, if there can be none."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            files = (self._folder / f"{self._name}.{n}.sqlite" for n in count())
            self._path = next(file for file in files if not _mark(file).exists())
            return _connected(self._path)
        except (OSError, sqlite3.Error) as error:
            return self._after(error)

    def _tried(self, action: Callable[[sqlite3.Connection], T]) -> T | None:
        if self._db is None:
            return None
        try:
            return action(self._db)
        except sqlite3.Error as error:
            self._db.close()
            self._db = self._after(error)
            return None

    def _after(self, error: OSError | sqlite3.Error) -> sqlite3.Connection | None:
        """The next file after a damaged one. It stays where it is, with a mark beside it: others
        may have it open, and SQLite's side files follow the name."""
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGE:
            with suppress(OSError):
                _mark(self._path).write_text(f"{error}\n")
                logger.warning(
                    "%s is damaged (%s): it is left aside, and a new file begun",
                    *(self._path, error),
                )
                return self._opened()
        logger.warning(
            "no scores are kept or found in this run from now on: %s: %s", self._path, error
        )
        return None


def _connected(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_LIMIT_S, isolation_level=None)
    try:
        db.text_factory = bytes  # a damaged text must not raise in decoding
        with suppress(sqlite3.OperationalError):  # where it cannot be had, the old journal is safe
            db.execute("PRAGMA journal_mode = WAL").fetchone()
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(TABLE)
        db.execute(SELECT, (b"",)).fetchone()
    except sqlite3.Error:
        db.close()
        raise
    return db


def _insert(db: sqlite3.Connection, rows: list[tuple[bytes, int, int, bytes]]) -> None:
    with db:  # commits, or rolls back
        db.execute("BEGIN IMMEDIATE")
        db.executemany(INSERT, rows)


def _mark(file: Path) -> Path:
    return file.with_name(file.name + ".damaged")


def _key(token_ids: Sequence[int], start: int) -> bytes:
    return hashlib.sha256(struct.pack(f"<{1 + len(token_ids)}q", start, *token_ids)).digest()


def _checksum(key: bytes, blob: bytes) -> int:
    return zlib.crc32(blob, zlib.crc32(key))


def _fits(entry: Entry, key: bytes, expected: int) -> bool:
    stored, checksum, blob = entry
    return (
        stored == expected
        and isinstance(blob, bytes)
        and len(blob) == 8 * expected
        and checksum == _checksum(key, blob)
    )
