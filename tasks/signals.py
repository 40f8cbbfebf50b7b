"""What a run makes of signals, and of Prefect's alarm for a flow's time-out."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from prefect._internal.concurrency.cancellation import shield

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def hangup_as_termination() -> Iterator[None]:
    """A closed terminal ends the run as SIGTERM does, unless ``nohup`` or somebody else has said
    what it means."""

    def terminate(number: int, frame: FrameType | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    if not _in_main() or signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGHUP, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextmanager
def postponed() -> Iterator[None]:
    """Every signal that has a handler is handled when this is over: an exception in the middle of
    it would leave a half that nobody ends."""
    if not _in_main():
        yield
        return
    came: list[int] = []
    handlers = {each: signal.getsignal(each) for each in signal.valid_signals()}
    handled = {signum: handler for signum, handler in handlers.items() if callable(handler)}
    for signum in handled:
        signal.signal(signum, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for signum, handler in handled.items():
            signal.signal(signum, handler)
        for number in dict.fromkeys(came):
            os.kill(os.getpid(), number)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leave Ctrl-C, SIGTERM, a closed terminal and a flow's time-out aside while the run is being
    ended: it ends as fast as it can. The time-out's clock stands still meanwhile, and any other
    signal that has a handler is postponed."""
    if not _in_main():
        with shield():  # there Prefect's time-out is an exception from another thread
            yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    with postponed():
        try:
            left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
            kept = {signum: signal.signal(signum, signal.SIG_IGN) for signum in ENDING}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            yield
        finally:
            for signum, handler in kept.items():
                if handler is not None:  # None was installed by C code, and cannot be put back
                    signal.signal(signum, handler)
            signal.setitimer(signal.ITIMER_REAL, left, interval)


def _in_main() -> bool:
    return threading.current_thread() is threading.main_thread()
