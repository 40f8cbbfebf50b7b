"""Processes that the kernel kills when the thread that started them ends (PR_SET_PDEATHSIG).

Two ways to bind one, since what runs between fork and exec may wait for ever for a lock that
another thread of the parent held: `bind_to` where there is no other thread, else `bound`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .process import die_with_parent

# The package is found through the folder above it. That is appended, so that nothing in it can hide
# a module of the standard library, and the package around it is not imported.
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from lifecycle.{module} import main; sys.exit(main(sys.argv[2:]))"
)


def isolated(interpreter: str, module: str, *arguments: str) -> list[str]:
    """Return a command that calls `main` of a module of this package, which sees nothing but the
    standard library: no site packages, no environment variable of Python's, no working folder."""
    folder = str(Path(__file__).parent.parent)
    return [interpreter, "-I", "-S", "-c", _BOOT.format(module=module), folder, *arguments]


def bind_to(parent_pid: int) -> Callable[[], None]:
    """Return the `preexec_fn` of a child that a single-threaded parent binds to itself."""

    def bind() -> None:
        die_with_parent()
        # The parent may have died before the kernel knew of the bond.
        if os.getppid() != parent_pid:
            os._exit(1)

    return bind


def bound(command: Sequence[str]) -> list[str]:
    """Return a command that binds itself to the thread that starts it and becomes `command`.

    For `subprocess`, in any thread. A program that cannot be started is named on stderr, with exit
    status 1.
    """
    return isolated(sys.executable, "bond", str(os.getpid()), *command)


def main(arguments: list[str]) -> str:
    """Become the program, bound to the parent; return why that failed."""
    parent_pid, *command = arguments
    bind_to(int(parent_pid))()
    # What Python has set for itself; the program shall find the defaults, as after `subprocess`.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        return f"{command[0]} could not be started: {error}"
