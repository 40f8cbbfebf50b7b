"""The end of a log file, for error messages."""

from __future__ import annotations

import os
from pathlib import Path

_MOST_BYTES = 64 * 1024


def log_tail(path: Path, lines: int = 40) -> str:
    """Return the last `lines` lines within the last 64 KiB of a log; "" if it has none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MOST_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
