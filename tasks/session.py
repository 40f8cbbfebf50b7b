"""What the stages of one run share: its processes, its servers, where everything of it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opd_core.analysis.detectors import RunFacts
from opd_core.config import OPDTeacherConfig
from opd_core.errors import ServingError
from opd_core.lifecycle.errors import LifecycleError
from opd_core.lifecycle.handle import Supervisor
from opd_core.lifecycle.records import ChildSpec
from opd_core.preflight import PreflightReport
from opd_core.scoring.facts import TeacherFacts
from opd_core.serving.servers import Server
from opd_core.tracking.shipper import ShippingReport
from opd_core.training.jobs import StudentJob
from tasks.console import warn
from tasks.environment import RunRecord
from tasks.findings import LiveDetection


@contextmanager
def as_serving_error() -> Iterator[None]:
    """What the supervisor raises, as an error of the run."""
    try:
        yield
    except LifecycleError as error:
        raise ServingError(str(error)) from None


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
    since, ``given_up`` those that are not started again any more. ``secrets`` are what servers'
    environments refer to, by reference. ``shipping`` tells how far the journal has got.
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
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    seconds: dict[str, float] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    shipping: Callable[[], ShippingReport | None] = lambda: None
    detection: LiveDetection = field(init=False)

    def __post_init__(self) -> None:
        facts = RunFacts.of(self.run.config.resolved())
        self.detection = LiveDetection(facts, lambda finding: warn(str(finding)))

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
        with as_serving_error():
            self.supervisor.spawn(spec)

    def note(self, event: str, **facts: Any) -> None:
        """Write a line into the run's ledger. Raises :class:`ServingError`."""
        with as_serving_error():
            self.supervisor.note(event, **facts)

    def still_alive(self, *children: str, but: Collection[str] = ()) -> None:
        """Raise :class:`ServingError`, with the log's tail, if one of these processes (all, if none
        is named) has died; those in ``but`` are looked after elsewhere."""
        with as_serving_error():
            self.supervisor.raise_if_dead(*children, but=but)

    def stop(self, child: str) -> None:
        """Stop one process of the run. Raises :class:`ServingError`."""
        with as_serving_error():
            self.supervisor.stop(child)

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
        """Time one stage; one that is entered again adds to it."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
