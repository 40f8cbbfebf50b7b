"""A process worker that ends in order: ``python -m deployments.worker WORKER-COMMAND…``.

Prefect's own worker, asked to stop, kills the flows it has started: they cannot say how they
ended, and stand in Prefect as running for ever. This process starts the worker and, asked to
stop (SIGTERM or Ctrl-C), halts it, so that it takes up nothing more; asks the flows to end
(SIGTERM, which Prefect turns into an exception in them); waits until nothing of them is left;
and only then ends the worker. What the worker had taken up and not started yet is put back in
line. How long that may take is for whoever asked. A worker that dies is followed by its flows in
the same way.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from opd_core.lifecycle.bond import bind_to
from opd_core.lifecycle.process import become_subreaper, process_table
from opd_core.lifecycle.signals import SignalPipe

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

LOOK_EVERY_S = 0.5
FLOW_RUN = b"PREFECT__FLOW_RUN_ID="
WORKER_LABEL = "prefect.worker.name"
"""By which Prefect tells whose a flow run is."""


class Keeper:
    """The worker, and what came of it. One per process: it adopts every orphan."""

    def __init__(self, command: Sequence[str]) -> None:
        become_subreaper()
        self._news = SignalPipe(signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        self._worker = subprocess.Popen(
            command, start_new_session=True, preexec_fn=bind_to(os.getpid())
        )
        self._status: int | None = None
        self._pool = option_of(command, "--pool", "-p")
        self._name = option_of(command, "--name", "-n")

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
        self._tell_prefect(flow_runs)
        return 0 if self._status is None else self._status or 1

    def _tell_prefect(self, flow_runs: Sequence[str]) -> None:
        """Of what these flows could not tell, and of what was never started."""
        if not flow_runs and not self._pool:
            return
        from prefect.client.orchestration import get_client
        from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

        if not PREFECT_API_URL.value():
            return
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 2}),
            get_client({"timeout": 15}, sync_client=True) as client,
        ):
            tell_of_crashed(client, flow_runs)
            if self._pool:
                put_back(client, self._pool, self._name, flow_runs)

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


def option_of(command: Sequence[str], *spellings: str) -> str | None:
    """The value of an option of a command line, as ``--option value`` or ``--option=value``."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in spellings:
            return value if equals else following
    return None


def tell_of_crashed(client: SyncPrefectClient, flow_runs: Sequence[str]) -> None:
    """A flow that was ended before it could hear of it has not told Prefect, where it would hold
    its deployment's slot."""
    from prefect.states import Cancelled, Crashed

    from tasks.flow_state import ApiStates

    for flow_run in flow_runs:
        with _told_if_refused(flow_run):
            states = ApiStates(client, flow_run)
            state = states.read()
            if state is None or state.is_final() or state.is_scheduled() or state.is_paused():
                continue
            due = Cancelled if state.is_cancelling() else Crashed
            states.write(due(message="It was ended together with its worker"))


def put_back(
    client: SyncPrefectClient, pool: str, name: str | None, begun: Collection[str]
) -> None:
    """Schedule again what the worker ``name`` of ``pool`` had taken up and not started: workers
    take scheduled runs only, so it would be Pending for ever. ``begun``: runs that had a process.
    """
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
        WorkPoolFilter,
        WorkPoolFilterName,
    )
    from prefect.client.schemas.objects import StateType, WorkerStatus
    from prefect.states import Scheduled

    pending = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PENDING]))
    with _told_if_refused(f"pool {pool}"):
        workers = client.read_workers_for_work_pool(pool)
        alone = all(each.name == name or each.status != WorkerStatus.ONLINE for each in workers)
        for flow_run in client.read_flow_runs(
            flow_run_filter=FlowRunFilter(state=pending),
            work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
        ):
            # A worker names itself on a run some time after it has made it Pending.
            own = alone or flow_run.labels.get(WORKER_LABEL) == name
            if own and str(flow_run.id) not in begun:
                with _told_if_refused(str(flow_run.id)):
                    message = "Its worker ended before it was started"
                    client.set_flow_run_state(flow_run.id, Scheduled(message=message))


@contextmanager
def _told_if_refused(about: str) -> Iterator[None]:
    """One call that fails must not keep the next ones from being made."""
    try:
        yield
    except Exception as error:
        print(f"{about}: Prefect was not told of its end: {error}", flush=True)


if __name__ == "__main__":
    sys.exit(Keeper(sys.argv[1:]).keep())
