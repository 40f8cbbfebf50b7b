"""What must happen around the stages, however the run ends: a supervisor, tracking, the ending.

What this process cannot write any more, the supervisor has written by ``tasks.settle``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prefect._internal.concurrency.cancellation import CancelledError

from opd_core.errors import OPDError
from opd_core.lifecycle.handle import Supervisor
from opd_core.lifecycle.leases import DeviceLease
from opd_core.lifecycle.receipt_text import left_over
from opd_core.lifecycle.registry import Registry
from opd_core.preflight import PreflightReport
from opd_core.serving.kept.users import KeptUse
from opd_core.serving.servers import run_servers
from tasks.ending import Ended, end_experiment
from tasks.environment import RunRecord
from tasks.guard import Guard, TimedOut
from tasks.kept_use import use_kept_teachers
from tasks.live import LiveView
from tasks.secrets import find_secrets, resolve_key
from tasks.session import Session, as_serving_error
from tasks.settle import settle_command
from tasks.signals import postponed, undisturbed
from tasks.tracking import Tracker


class TeardownError(OPDError):
    """Something of the run is left; the message says what."""


@contextmanager
def experiment(
    run: RunRecord, checked: PreflightReport, guard: Guard, lease: DeviceLease | None = None
) -> Iterator[Session]:
    """A session around the stages of ``run``, which has the devices of ``lease`` until its end.
    ``guard`` watches until the end begins.

    Raises :class:`TeardownError` after an otherwise good run if something of it is left.
    """
    started = time.perf_counter()
    opd = run.config.opd
    keys = {t.name: key for t in (opd.teachers if opd else ()) if (key := resolve_key(t))}
    secrets = find_secrets(run_servers(run.config))
    uses = KeptUse()
    session: Session | None = None
    tracker: Tracker | None = None
    view: LiveView | None = None
    error: BaseException | None = None
    try:
        with postponed():
            supervisor = _start_supervisor(run, lease)
            guard.end_run = supervisor.end
            session = Session(run, checked, supervisor, keys, secrets=secrets)
            session.seconds["checks"] = checked.seconds
        tracker = Tracker.start(run)
        session.shipping = tracker.report
        view = LiveView.start(session, tracker.place)
        uses = use_kept_teachers(run)
        yield session
    except BaseException as raised:  # also Prefect's termination signal and Ctrl-C
        error = raised
        if isinstance(raised, CancelledError):
            error = TimedOut(
                "Prefect ended the flow run: its time (timeout_seconds) is over, or its "
                "concurrency slot could not be renewed (docs/sharing.md)"
            )
        raise
    finally:
        with undisturbed():
            guard.stop()
            if session is not None:
                how = Ended(guard.cause_of(error), error, started)
                if view is not None:
                    view.quiet()
                receipt = end_experiment(session, how, tracker, lease)
                if view is not None:
                    view.finish(session.summary)
            uses.release()
    if not receipt.clean:
        raise TeardownError(left_over(receipt))


def _start_supervisor(run: RunRecord, lease: DeviceLease | None) -> Supervisor:
    with as_serving_error():
        return Supervisor.start(
            run_dir=run.directory,
            run_id=run.run_id,
            teardown_s=run.config.run.teardown_s,
            deadline_s=run.config.run.deadline_s,
            lease=lease,
            settle=settle_command(run.directory),
            registry=Registry.of_user(),
        )
