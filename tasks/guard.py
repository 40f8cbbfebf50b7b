"""Ends a flow that nobody else would end: its worker is gone, or nobody carries out a cancellation.

A worker or a served runner starts a flow as its child, and ends it when it is cancelled. One
that was killed does neither: the flow would run on for hours, and "Cancel" would do nothing. So
a flow looks after itself, in threads of its own, and if need be sends itself the SIGTERM that
Prefect turns into an exception in the main thread: the run then ends as it always does. In any
other thread the signal would end the whole program: there the supervisor ends the run, and the
flow sees that it is gone.
"""

from __future__ import annotations

import contextvars
import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from prefect._internal.control_listener import get_intent
from prefect.client.schemas.objects import TERMINAL_STATES, StateType
from prefect.runtime import deployment, flow_run

from opd_core.errors import OPDError
from opd_core.lifecycle.process import executable_name, read_stat
from tasks.console import warn
from tasks.flow_state import CANCELLED, ApiStates, api_states

WORKER_GONE = "worker gone"
ENDED_IN_PREFECT = "ended in Prefect"
TIMED_OUT = "timed out"
LAUNCHERS_EVERY_S = 1.0
STATE_EVERY_S = 5.0
API_TIMEOUT_S = 5.0
WORKER_PATIENCE_S = 20.0
"""So long a worker has to carry out a cancellation; where there is none, a second look suffices."""
RUNNER_MARK = "PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS"
"""Whoever starts a flow run's process and sees to its cancellation sets this to ``false``."""

Launchers = tuple[int, ...]


class TimedOut(OPDError):
    """The flow run's time in Prefect (``timeout_seconds``) is over."""


class Guard:
    """Watches over the flow in this process between ``with`` and :meth:`stop`.

    ``launched`` says that a worker or a runner started it. :attr:`cause` is why the guard ended the
    flow, empty if it did not. ``read_state`` returns None where the state is not known.

    ``close`` lets go of what ``read_state`` holds, in the thread that called it.

    Two things are told later, when they are known: :attr:`end_with_worker`, until then the flow
    outlives its worker; and :attr:`end_run`, which ends the run where ``end_flow`` is None because
    this process cannot be sent a signal.
    """

    def __init__(
        self,
        read_state: Callable[[], StateType | None],
        *,
        launched: bool,
        read_launchers: Callable[[], Launchers] | None = None,
        clock: Callable[[], float] = time.monotonic,
        end_flow: Callable[[str], None] | None,
        let_go: Callable[[], None] | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.cause = ""
        self.end_with_worker = False
        self.end_run: Callable[[str], object] | None = None
        self._read_state = read_state
        self._close = close
        self._read_launchers = read_launchers or launchers
        self._clock = clock
        self._end_flow = end_flow
        self._let_go = let_go or _let_go_of_pipes
        self._launched = launched
        self._patience_s = WORKER_PATIENCE_S if launched else 0.0
        self._launchers = self._read_launchers()
        self._cancelling_since: float | None = None
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        if self._launched:
            self._start(self.check_launchers, LAUNCHERS_EVERY_S)
        self._start(self.check_state, STATE_EVERY_S, self._close)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """From now on nothing is ended: call it before the teardown begins."""
        with self._lock:
            self._stopped.set()

    def check_launchers(self) -> None:
        """One look at who started this process."""
        if self._read_launchers() == self._launchers:
            return
        self._let_go()
        if self.end_with_worker:
            self._end(WORKER_GONE)

    def check_state(self) -> None:
        """One look at the flow run's state in Prefect."""
        state = self._read_state()
        if state is None:
            return
        if state in TERMINAL_STATES:
            self._end(CANCELLED if state is StateType.CANCELLED else ENDED_IN_PREFECT)
        elif state is not StateType.CANCELLING:
            self._cancelling_since = None
        elif self._cancelling_since is None:
            self._cancelling_since = self._clock()
        elif self._clock() - self._cancelling_since >= self._patience_s:
            self._end(CANCELLED)

    def cause_of(self, error: BaseException | None) -> str:
        """Why the run ends, for its receipt; ``error`` is what left the flow's stages."""
        if error is None:
            return "completed"
        if isinstance(error, TimedOut):
            return TIMED_OUT
        if isinstance(error, Exception):
            return type(error).__name__
        cancelled = CANCELLED if get_intent() == "cancel" else ""
        return self.cause or cancelled or type(error).__name__

    def _start(
        self, check: Callable[[], None], every_s: float, at_end: Callable[[], None] = lambda: None
    ) -> None:
        def watch() -> None:
            try:
                while not self._stopped.wait(every_s):
                    check()
            finally:
                at_end()

        # Prefect keeps its API's address and its logger in context variables.
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(watch,), name="guard", daemon=True).start()

    def _end(self, cause: str) -> None:
        with self._lock:
            end = self._end_flow or self.end_run
            if self._stopped.is_set() or end is None:
                return
            self._stopped.set()
            self.cause = cause
            end(cause)
        warn(f"ending this run: {cause}")


def guard_flow() -> Guard:
    """The guard of the flow run that this is called in; outside of one it does nothing."""
    flow_run_id = str(flow_run.id or "")
    launched = bool(flow_run_id and deployment.id) and os.environ.get(RUNNER_MARK) == "false"
    in_prefect = _StateInPrefect(flow_run_id)
    return Guard(
        in_prefect.read,
        close=in_prefect.close,
        launched=launched,
        end_flow=terminate_this_process if _takes_signals() else None,
    )


def _takes_signals() -> bool:
    """Whether SIGTERM becomes an exception of this flow: Prefect sees to that in the main
    thread."""
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


def launchers() -> Launchers:
    """The parent of this process, and so on up from it while that is ``uv run``, which outlives the
    worker that it was started by. Another tuple means that one of them has gone."""
    found = [os.getppid()]
    while executable_name(found[-1]) == "uv" and (uv := read_stat(found[-1])) is not None:
        found.append(uv.parent)
    return tuple(found)


class _StateInPrefect:
    """The state of a flow run, asked for by one thread. Its client is kept while the API answers:
    making one costs thirty times what a look does."""

    def __init__(self, flow_run_id: str) -> None:
        self._id = flow_run_id
        self._open = ExitStack()
        self._states: ApiStates | None = None

    def read(self) -> StateType | None:
        """None where it is not known, and outside of a flow run."""
        if not self._id:
            return None
        try:
            if self._states is None:
                states = api_states(self._id, API_TIMEOUT_S, retries=0)
                self._states = self._open.enter_context(states)
            state = self._states.read()
        except Exception:  # the API is away for a while: the run goes on
            self.close()
            return None
        return state.type if state is not None else None

    def close(self) -> None:
        """Let the client go."""
        self._states = None
        self._open.close()


def terminate_this_process(cause: str) -> None:
    """End the flow in this process's main thread."""
    os.kill(os.getpid(), signal.SIGTERM)


def _let_go_of_pipes() -> None:
    """Nobody reads what a dead worker was to read, and the first line written to a broken pipe
    would end this process in the middle of its teardown. Prefect's API gets the log all the
    same."""
    with open(os.devnull, "wb") as nothing:
        for output in (1, 2):
            if stat.S_ISFIFO(os.fstat(output).st_mode):
                os.dup2(nothing.fileno(), output)
