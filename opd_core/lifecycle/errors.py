"""Errors of the lifecycle. Each message says what came and what to do; each can be pickled.

LifecycleError
├── LedgerBusy            another supervisor of this run is alive
├── LedgerDamaged         the ledger cannot be read, or belongs to another run
├── DevicesBusy           another run of this host holds a device
├── SupervisorNotStarted  the supervisor did not report that it is ready
├── SupervisorGone        the supervisor died, ended, or does not answer
├── ChildNotStarted       a child could not be started
├── UnknownChild          no child of this name was started
└── ChildDied             a child that must live has exited
"""

from __future__ import annotations


class LifecycleError(RuntimeError):
    """Base of all errors of this package."""


class LedgerBusy(LifecycleError):
    """Another process holds the lock on this ledger."""


class LedgerDamaged(LifecycleError):
    """The ledger has an unreadable line in its middle, or names another run."""


class DevicesBusy(LifecycleError):
    """Another run of this host holds a device, and went on holding it for as long as was waited."""


class SupervisorNotStarted(LifecycleError):
    """The supervisor process could not be brought up."""


class SupervisorGone(LifecycleError):
    """The supervisor cannot serve this request any more."""


class ChildNotStarted(LifecycleError):
    """The supervisor refused a child, or the operating system did."""


class UnknownChild(LifecycleError):
    """A name was asked for that no child has."""


class ChildDied(LifecycleError):
    """A child that was expected to live has exited.

    `returncode` is negative for a signal (-9: SIGKILL), as in `subprocess`.
    """

    def __init__(self, name: str, returncode: int, log: str, tail: str) -> None:
        super().__init__(name, returncode, log, tail)
        self.name = name
        self.returncode = returncode
        self.log = log
        self.tail = tail

    def __str__(self) -> str:
        last_lines = f"Its last lines:\n{self.tail}" if self.tail else "It wrote nothing."
        return (
            f"child {self.name!r} was expected to live, but exited with code {self.returncode}. "
            f"Read {self.log}, mend the cause and start again. {last_lines}"
        )
