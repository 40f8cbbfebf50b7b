"""The end of a run is broken off by no signal, and a closed terminal is one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tasks.signals import ENDING, hangup_as_termination, postponed, undisturbed


class Disturbed(Exception):
    """What the handlers in these tests raise."""


@pytest.fixture
def disturbing() -> Iterator[None]:
    """Every ending signal and the alarm raise an exception."""

    def disturb(*_: object) -> None:
        raise Disturbed

    disturbing = (*ENDING, signal.SIGALRM, signal.SIGUSR1)
    kept = {signum: signal.signal(signum, disturb) for signum in disturbing}
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for signum, handler in kept.items():
        signal.signal(signum, handler)


@pytest.mark.usefixtures("disturbing")
def test_neither_signals_nor_a_time_out_break_off_an_ending() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with undisturbed():
        for signum in ENDING:
            os.kill(os.getpid(), signum)
        deadline = time.monotonic() + 0.4
        while time.monotonic() < deadline:
            pass
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    assert 0 < left <= 0.2, "the time-out's clock stood still"
    signal.setitimer(signal.ITIMER_REAL, 0)
    with pytest.raises(Disturbed):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


@pytest.mark.usefixtures("disturbing")
def test_any_other_signal_waits_for_the_end() -> None:
    reached = []

    def disturbed_ending() -> None:
        with undisturbed():
            os.kill(os.getpid(), signal.SIGUSR1)
            reached.append("the end")

    with pytest.raises(Disturbed):
        disturbed_ending()
    assert reached == ["the end"]


@pytest.mark.usefixtures("disturbing")
def test_a_signal_in_the_middle_is_handled_when_it_is_over() -> None:
    reached = []

    def disturbed_twice() -> None:
        with postponed():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append("the end")

    with pytest.raises(Disturbed):
        disturbed_twice()
    assert reached == ["the end"]
    with pytest.raises(Disturbed):
        os.kill(os.getpid(), signal.SIGTERM)
    with postponed():
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL  # left as it is


def test_a_closed_terminal_is_a_termination_unless_somebody_said_what_it_means() -> None:
    before = signal.getsignal(signal.SIGHUP)
    told: list[int] = []
    kept = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with hangup_as_termination():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with hangup_as_termination():
            os.kill(os.getpid(), signal.SIGHUP)
        assert told == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGTERM, kept)
