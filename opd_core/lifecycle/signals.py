"""Signals as bytes in a pipe, so that one loop can wait for them together with everything else."""

from __future__ import annotations

import os
import signal
from types import FrameType


class SignalPipe:
    """Catches signals; `fileno()` becomes readable when one came, `read()` says which.

    Create it in the main thread, once per process. A handler, not SIG_IGN, is set for each: execve
    resets handlers, so that children start with the defaults even where the owner was started with
    SIGINT ignored, as a shell does for a job in the background.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for each in signals:
            signal.signal(each, _ignore)
        # The mask is inherited too, and a blocked SIGTERM would never arrive.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def fileno(self) -> int:
        return self._reader

    def read(self) -> tuple[signal.Signals, ...]:
        """Return the signals that came since the last read, oldest first."""
        try:
            return tuple(signal.Signals(number) for number in os.read(self._reader, 4096))
        except BlockingIOError:
            return ()


def _ignore(number: int, frame: FrameType | None) -> None:
    """The pipe has the signal already."""
