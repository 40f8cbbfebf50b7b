"""A process worker that ends in order: ``python -m deployments.worker WORKER-COMMAND…``.

Prefect's own worker, asked to stop, kills the flows it has started: they cannot say how they ended,
and stand in Prefect as running for ever. This process starts the worker and, asked to stop (SIGTERM
or Ctrl-C), halts it, so that it takes up nothing more; asks the flows to end (SIGTERM, which
Prefect turns into an exception in them); waits until nothing of them is left; and only then ends
the worker. How long that may take is for whoever asked. A worker that dies is followed by its flows
in the same way.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from opd_core.lifecycle.bond import bind_to
from opd_core.lifecycle.process import become_subreaper, process_table
from opd_core.lifecycle.signals import SignalPipe

LOOK_EVERY_S = 0.5
FLOW_RUN = b"PREFECT__FLOW_RUN_ID="


class Keeper:
    """The worker, and what came of it. One per process: it adopts every orphan."""

    def __init__(self, command: Sequence[str]) -> None:
        become_subreaper()
        self._news = SignalPipe(signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        self._worker = subprocess.Popen(
            command, start_new_session=True, preexec_fn=bind_to(os.getpid())
        )
        self._status: int | None = None

    def keep(self) -> int:
        """Wait for the end; return the exit status."""
        while self._status is None and not self._asked_to_stop():
            self._collect()
        if self._status is None:
            os.kill(self._worker.pid, signal.SIGSTOP)
            flow_runs = self._end_flows(parent=self._worker.pid)
            self._worker.kill()
            self._worker.wait()
        else:
            print(f"the worker has ended by itself, status {self._status}", flush=True)
            flow_runs = self._end_flows(parent=os.getpid())
        tell_of_crashed(flow_runs)
        return 0 if self._status is None else self._status or 1

    def _asked_to_stop(self) -> bool:
        select.select([self._news], [], [], LOOK_EVERY_S)
        return bool({signal.SIGTERM, signal.SIGINT} & set(self._news.read()))

    def _end_flows(self, parent: int) -> list[str]:
        """SIGTERM to each living child of ``parent``; return when all that came of it is gone: the
        ids of the flow runs."""
        flows = self._living(parent)
        flow_runs = [found for pid in flows if (found := flow_run_of(pid))]
        for pid in flows:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        while self._living(parent) or self._living(os.getpid()):
            select.select([self._news], [], [], LOOK_EVERY_S)
            self._news.read()
            self._collect()
        return flow_runs

    def _living(self, parent: int) -> list[int]:
        """The children of ``parent`` that run, without the worker."""
        return [
            stat.pid
            for stat in process_table().values()
            if stat.parent == parent and stat.running and stat.pid != self._worker.pid
        ]

    def _collect(self) -> None:
        """Reap what has ended: the worker, and adopted orphans."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] == self._worker.pid:
                    self._status = os.waitstatus_to_exitcode(ended[1])
                    self._worker.returncode = self._status


def flow_run_of(pid: int) -> str | None:
    """The id of the flow run that this process was started for."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    found = (entry.removeprefix(FLOW_RUN) for entry in entries if entry.startswith(FLOW_RUN))
    return next(found, b"").decode() or None


def tell_of_crashed(flow_runs: Sequence[str]) -> None:
    """A flow that was ended before it could hear of it has not told Prefect, where it would hold
    its deployment's slot."""
    if not flow_runs:
        return
    from prefect.states import Cancelled, Crashed

    from tasks.flow_state import api_states

    for flow_run in flow_runs:
        with api_states(flow_run, timeout_s=15, retries=2) as states:
            state = states.read()
            if state is None or state.is_final() or state.is_scheduled() or state.is_paused():
                continue
            due = Cancelled if state.is_cancelling() else Crashed
            states.write(due(message="It was ended together with its worker"))


if __name__ == "__main__":
    sys.exit(Keeper(sys.argv[1:]).keep())
