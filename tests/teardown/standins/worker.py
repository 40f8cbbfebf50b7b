"""Stands in for a process worker: a flow in a session of its own, whose group Ctrl-C kills.

argv: file to put the worker's pid in, then the flow's command. Ends with the flow's exit status.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main(pid_file: str, command: list[str]) -> int:
    flow = os.fork()
    if flow == 0:
        os.setsid()
        os.execv(command[0], command)
    signal.signal(signal.SIGINT, lambda number, frame: os.killpg(flow, signal.SIGKILL))
    Path(pid_file).write_text(str(os.getpid()))
    _, status = os.waitpid(flow, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
