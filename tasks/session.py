"""What must happen around the stages, however the run ends.

Ending a run, in this order: the student's job on a cluster that is not ours, everything that
this run started (one teardown, with a receipt), the summary, and last the tracking with its
final status.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from opd_core.config import OPDTeacherConfig
from opd_core.errors import OPDError
from opd_core.lifecycle.handle import Supervisor
from opd_core.lifecycle.records import Receipt
from opd_core.preflight import PreflightReport
from opd_core.training.jobs import StudentJob
from tasks.console import announce, warn
from tasks.environment import RunRecord, resolve_key
from tasks.tracking import Tracker, build_summary, write_model_card, write_summary

JOB_STOP_S = 30.0


class TeardownError(OPDError):
    """Something of the run is left; the message says what."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where the Jobs API answers; ``owned`` is a head that this run started."""

    address: str
    token: str | None
    owned: bool


@dataclass(slots=True)
class Session:
    """What the stages of one run share. It lives in the flow process and never leaves it."""

    run: RunRecord
    checked: PreflightReport
    supervisor: Supervisor
    keys: dict[str, str]
    cluster: Cluster = Cluster("", None, owned=False)
    job: StudentJob | None = None
    teacher_info: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def key_environment(self) -> dict[str, str]:
        """The teachers' keys as the student's job receives them."""
        opd = self.run.config.opd
        teachers = opd.teachers if opd else ()
        return {t.key_variable: self.keys[t.name] for t in teachers if t.name in self.keys}

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
def experiment(run: RunRecord, checked: PreflightReport) -> Iterator[Session]:
    """A session around the stages of ``run``.

    Raises :class:`TeardownError` after an otherwise good run if something of it is left.
    """
    started = time.perf_counter()
    opd = run.config.opd
    keys = {t.name: key for t in (opd.teachers if opd else ()) if (key := resolve_key(t))}
    tracker = Tracker.start(run, checked)
    supervisor = Supervisor.start(
        run_dir=run.directory, run_id=run.run_id, teardown_s=run.config.run.teardown_s
    )
    session = Session(run, checked, supervisor, keys)
    error: BaseException | None = None
    try:
        yield session
    except BaseException as raised:  # also Prefect's termination signal and Ctrl-C
        error = raised
        raise
    finally:
        receipt = _end(session, error)
        session.seconds["total"] = time.perf_counter() - started
        summary = build_summary(session.run, receipt, session.seconds, error)
        write_model_card(session.run, checked, summary)
        write_summary(session.run, summary)  # before it is shipped, and again with MLflow's run id
        summary["mlflow_run_id"] = tracker.finish(summary)
        write_summary(session.run, summary)
        session.summary = summary
    if not receipt.clean:
        raise TeardownError(_left_over(receipt))


def _end(session: Session, error: BaseException | None) -> Receipt:
    announce("ending everything that this run started")
    with session.stage("teardown"):
        if session.job is not None and not session.cluster.owned:
            _stop_job(session.job)
        receipt = session.supervisor.end("completed" if error is None else type(error).__name__)
    if receipt.clean:
        announce(f"all ended: {len(receipt.children)} servers, ports free, nothing left")
    else:
        warn(_left_over(receipt))
    return receipt


def _stop_job(job: StudentJob) -> None:
    try:
        if not job.stop(JOB_STOP_S):
            warn(f"Ray job {job.job_id} did not end within {JOB_STOP_S:.0f} s; stop it by hand")
    except (RuntimeError, OSError) as error:
        warn(f"Ray job {job.job_id} could not be stopped: {error}")


def _left_over(receipt: Receipt) -> str:
    left = [f"process {s.pid} ({s.executable})" for s in receipt.survivors]
    left += [f"port {p.port}" for p in receipt.ports if not p.free]
    left += [s.path for s in receipt.scratch if not s.removed]
    return f"teardown of {receipt.run_id} was not clean; left: {', '.join(left) or 'unknown'}"
