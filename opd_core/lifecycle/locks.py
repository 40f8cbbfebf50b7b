"""An advisory lock on an open file, which the kernel takes back from whoever dies."""

from __future__ import annotations

import fcntl


def lock_now(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock the file without waiting; return False if another process holds it. Raises OSError."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
