"""What must happen around the stages, however the run ends.

Ending a run, in this order: the student's job on a cluster that is not ours, everything that
this run started (one teardown, with a receipt), the summary, and last the tracking with its
final status. A second Ctrl-C does not break it off: the supervisor has its deadline, and
tracking has one too. What this process cannot write any more, the supervisor has written by
``tasks.settle``.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from prefect.runtime import flow_run

from opd_core.config import OPDTeacherConfig
from opd_core.errors import OPDError, ServingError
from opd_core.lifecycle.errors import LifecycleError
from opd_core.lifecycle.handle import Supervisor
from opd_core.lifecycle.leases import DeviceLease
from opd_core.lifecycle.receipt_text import left_over
from opd_core.lifecycle.records import ChildSpec, Receipt
from opd_core.lifecycle.registry import Registry
from opd_core.preflight import PreflightReport
from opd_core.scoring.facts import TeacherFacts
from opd_core.serving.servers import Server
from opd_core.training.attempts import end_attempt
from opd_core.training.jobs import HTTP_ERRORS, STOP_S, StudentJob
from tasks.console import announce, warn
from tasks.environment import RunRecord, resolve_key
from tasks.guard import guard_flow
from tasks.hooks import UNSETTLED, Unsettled
from tasks.receipts import show_receipt
from tasks.temporary_server import lasting_api
from tasks.tracking import Tracker, build_summary, show_summary, write_model_card, write_summary


class TeardownError(OPDError):
    """Something of the run is left; the message says what."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where the Jobs API answers; ``owned`` is a head that this run started, with its temp dir."""

    address: str
    token: str | None = field(repr=False)
    owned: bool
    temp_dir: Path | None = None


@dataclass(slots=True)
class Session:
    """What the stages of one run share. It lives in the flow process and never leaves it.

    ``servers`` are those that the run started, with their present ports, by the name of their
    process. Of the student's, ``loading`` are those that were started again and not seen well
    since, ``given_up`` those that are not started again any more.
    """

    run: RunRecord
    checked: PreflightReport
    supervisor: Supervisor
    keys: dict[str, str] = field(repr=False)
    cluster: Cluster = Cluster("", None, owned=False)
    job: StudentJob | None = None
    servers: dict[str, Server] = field(default_factory=dict)
    teacher_facts: dict[str, TeacherFacts] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    loading: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)
    job_restarts: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def key_environment(self) -> dict[str, str]:
        """The teachers' keys as the student's job receives them from our own Ray head."""
        opd = self.run.config.opd
        teachers = opd.teachers if opd else ()
        return {t.key_variable: self.keys[t.name] for t in teachers if t.name in self.keys}

    @property
    def job_log(self) -> Path:
        """The log of the student's job; each job that was started again has its own."""
        number = self.job_restarts + 1
        return self.run.log("student" if number == 1 else f"student-job-{number}")

    def spawn(self, spec: ChildSpec) -> None:
        """Start a process under the supervisor. Raises :class:`ServingError`."""
        try:
            self.supervisor.spawn(spec)
        except LifecycleError as error:
            raise ServingError(str(error)) from None

    def note(self, event: str, **facts: Any) -> None:
        """Write a line into the run's ledger. Raises :class:`ServingError`."""
        try:
            self.supervisor.note(event, **facts)
        except LifecycleError as error:
            raise ServingError(str(error)) from None

    def still_alive(self, *children: str, but: Collection[str] = ()) -> None:
        """Raise :class:`ServingError`, with the log's tail, if one of these processes (all, if none
        is named) has died; those in ``but`` are looked after elsewhere."""
        try:
            self.supervisor.raise_if_dead(*children, but=but)
        except LifecycleError as error:
            raise ServingError(str(error)) from None

    def stop(self, child: str) -> None:
        """Stop one process of the run. Raises :class:`ServingError`."""
        try:
            self.supervisor.stop(child)
        except LifecycleError as error:
            raise ServingError(str(error)) from None

    def child_exit(self, child: str) -> int | None:
        """The return code of a process of the run; None while it lives."""
        return self.supervisor.child_exit(child)

    def teacher(self, server: Server) -> OPDTeacherConfig:
        """The teacher that a server serves."""
        opd = self.run.config.opd
        return next(t for t in (opd.teachers if opd else ()) if t.name == server.teacher)

    def replace_teachers(self, teachers: tuple[OPDTeacherConfig, ...]) -> None:
        """Take in where the teachers answer."""
        opd = self.run.config.opd
        assert opd is not None
        config = self.run.config.model_copy(
            update={"opd": opd.model_copy(update={"teachers": teachers})}
        )
        self.run = replace(self.run, config=config)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time one stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - started


@contextmanager
def experiment(
    run: RunRecord, checked: PreflightReport, lease: DeviceLease | None = None
) -> Iterator[Session]:
    """A session around the stages of ``run``, which has the devices of ``lease`` until its end.

    Raises :class:`TeardownError` after an otherwise good run if something of it is left.
    """
    started = time.perf_counter()
    opd = run.config.opd
    keys = {t.name: key for t in (opd.teachers if opd else ()) if (key := resolve_key(t))}
    supervisor = _start_supervisor(run, lease)
    session = Session(run, checked, supervisor, keys, seconds={"checks": checked.seconds})
    guard = guard_flow(run.config.run.end_with_worker)
    tracker: Tracker | None = None
    error: BaseException | None = None
    try:
        with _hangup_as_termination(), guard:
            tracker = Tracker.start(run, checked)
            yield session
    except BaseException as raised:  # also Prefect's termination signal and Ctrl-C
        error = raised
        raise
    finally:
        with _undisturbed():
            cause = guard.cause_of(error)
            receipt = _end(session, cause, went_wrong=error is not None)
            if lease is not None:
                lease.release()
            session.seconds["total"] = time.perf_counter() - started
            tracked = _conclude(session, receipt, tracker, error)
            _leave(Unsettled(supervisor, tracked, cause))
    if not receipt.clean:
        raise TeardownError(left_over(receipt))


def _start_supervisor(run: RunRecord, lease: DeviceLease | None) -> Supervisor:
    try:
        return Supervisor.start(
            run_dir=run.directory,
            run_id=run.run_id,
            teardown_s=run.config.run.teardown_s,
            deadline_s=run.config.run.deadline_s,
            lease=lease,
            settle=(sys.executable, "-m", "tasks.settle", str(run.directory), lasting_api()),
            registry=Registry.of_user(),
        )
    except LifecycleError as error:
        raise ServingError(str(error)) from None


@contextmanager
def _hangup_as_termination() -> Iterator[None]:
    """A closed terminal ends the run as SIGTERM does, unless ``nohup`` or somebody else has said
    what it means."""

    def terminate(number: int, frame: FrameType | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGHUP, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave Ctrl-C, SIGTERM and a closed terminal aside while the run is being ended: it ends as
    fast as it can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    kept = {signum: signal.signal(signum, signal.SIG_IGN) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in kept.items():
            signal.signal(signum, handler)


def _end(session: Session, cause: str, *, went_wrong: bool) -> Receipt:
    announce("ending everything that this run started")
    with session.stage("teardown"):
        if session.job is not None and not session.cluster.owned:
            _stop_job(session.job)
        if went_wrong:
            _keep_ray_logs(session)
        receipt = session.supervisor.end(cause)
    show_receipt(receipt)
    return receipt


def _conclude(
    session: Session, receipt: Receipt, tracker: Tracker | None, error: BaseException | None
) -> bool:
    """Summary, model card, tracking, table: each in its own right, none may hide the run's
    error. True if the tracking has everything."""
    run = session.run
    summary = session.summary = build_summary(run, receipt, session.seconds, error)
    summary["server_restarts"] = session.restarts
    summary["job_restarts"] = session.job_restarts
    with _told("the summary"):
        write_summary(run, summary)
    with _told("the model card"):
        write_model_card(run, session.checked, summary)
    if tracker is not None:
        with _told("the end of tracking"):
            summary["mlflow_run_id"] = tracker.finish(summary)
            write_summary(run, summary)
    with _told("the end of the attempt"):
        end_attempt(run.directory, summary["status"])
    show_summary(summary)
    return tracker is not None and tracker.complete


def _leave(run: Unsettled) -> None:
    """Prefect's final state comes after this: a hook of the flow lets the supervisor go then."""
    if flow_run.id:
        UNSETTLED[str(flow_run.id)] = run
    elif run.tracked:
        run.supervisor.settled()


@contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        warn(f"{what} could not be written: {type(error).__name__}: {error}")


def _stop_job(job: StudentJob) -> None:
    try:
        if not job.stop(STOP_S):
            warn(f"Ray job {job.job_id} did not end within {STOP_S:.0f} s; stop it by hand")
    except HTTP_ERRORS as error:
        warn(f"Ray job {job.job_id} could not be stopped: {error}")


def _keep_ray_logs(session: Session) -> None:
    """A run that went wrong keeps Ray's own logs; the session folder is removed with the head."""
    if session.cluster.temp_dir is None:
        return
    for logs in session.cluster.temp_dir.glob("session_2*/logs"):
        with suppress(OSError, shutil.Error):
            shutil.copytree(logs, session.run.log("ray").with_suffix(""), dirs_exist_ok=True)
