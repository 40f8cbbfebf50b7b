"""Writing a file that appears whole or not at all."""

from __future__ import annotations

import os
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
    except OSError:
        partial.unlink(missing_ok=True)  # on a full disk, give the room back
        raise
