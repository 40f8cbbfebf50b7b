"""Writing a file or a folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"
"""Ending of a file that is still being written; one that stays was never whole."""


def write_whole(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write ``path`` beside its place and move it there. Raises OSError.

    ``durable`` waits for the disk, so that a power cut cannot take it either.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
        if durable:
            _to_disk(path.parent)  # the name too
    except OSError:
        partial.unlink(missing_ok=True)  # on a full disk, give the room back
        raise


@contextmanager
def whole_folder(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """An empty folder to fill; it takes the place of ``path`` once all of it is on the disk, so
    that even after a power cut ``path`` is never half there. Without ``durable`` nothing waits for
    the disk, and only a power cut can leave half of it."""
    partial = path.with_name(path.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    if durable:
        tree_to_disk(partial)
    if path.exists():
        shutil.rmtree(path)
    os.replace(partial, path)
    if durable:
        _to_disk(path.parent)


def rename_whole(source: Path, target: Path) -> None:
    """Give a folder another name beside it, and wait until the disk knows it."""
    os.replace(source, target)
    _to_disk(target.parent)


def tree_to_disk(folder: Path) -> None:
    """Wait until every file and folder in ``folder``, and it itself, are on the disk."""
    for written in (*folder.rglob("*"), folder):
        _to_disk(written)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
