"""Plays a flow: it owns a supervisor, goes from moment to moment, stops at one and does as told.

argv: `Part` as JSON. Started as `python -S -m tests.teardown.standins.flow` in the project's root.
All talk goes through files in the scene's folder, so that neither a killed worker nor a closed
terminal takes the line away: `at` (the moment is reached), `order` (what to do there), `result`
(the receipt, as the flow saw it). Nothing here is shielded from signals, not even the end.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from opd_core.lifecycle.errors import ChildNotStarted
from opd_core.lifecycle.handle import Supervisor
from opd_core.lifecycle.leases import DeviceLease
from opd_core.lifecycle.records import ChildSpec
from opd_core.lifecycle.registry import Registry
from tests.teardown.standins import servers
from tests.teardown.standins.matrix import (
    BEFORE,
    CHECKPOINT,
    EVALUATION,
    GRACE_S,
    LOADS,
    MOMENTS,
    READINESS,
    SAMPLING,
    SYNC,
    TEARDOWN,
    TRAINING,
)
from tests.teardown.standins.servers import POLL_S, Family

PATIENCE_S = 60.0
SETTLED = "settled by the command"
DEVICES = ("cpu:0", "cpu:1")


@dataclass(frozen=True)
class Part:
    """What this flow is to play. `ports`: Ray's, the teacher's two, the evaluation server's."""

    folder: str
    run_id: str
    moment: str
    ports: tuple[int, ...]
    teardown_s: float
    margin_s: float
    deadline_s: float | None
    handles_sigterm: bool


class StageFailed(Exception):
    """The flow's own code failed."""


class TaskFailed(Exception):
    """A task failed."""


class ActorDied(Exception):
    """What Ray raises when an actor is gone."""


class TeacherSilent(Exception):
    """A request to the teacher was not answered in time."""


_ERRORS = {each.__name__: each for each in (StageFailed, ActorDied, TeacherSilent)}


class TimedOut(Exception):
    """What a time-out of the flow raises, from a signal handler."""


class Cancelled(BaseException):
    """What SIGTERM becomes in a flow that an engine runs."""


class Flow:
    """One flow and its files."""

    def __init__(self, part: Part, supervisor: Supervisor) -> None:
        self.part = part
        self.folder = Path(part.folder)
        self.supervisor = supervisor
        self.open = ExitStack()

    def go(self) -> None:
        """Live through the moments up to the part's, and hold there."""
        stages: dict[str, Callable[[], object]] = {
            BEFORE: self._start_ray,
            LOADS: self._start_teacher,
            READINESS: self._await_teacher,
            SAMPLING: self._sample,
            TRAINING: lambda: self._await_born("rank"),
            SYNC: self._sync,
            CHECKPOINT: self._write_checkpoint,
            EVALUATION: self._evaluate,
            TEARDOWN: lambda: self.supervisor.stop("evaluation"),
        }
        for moment in MOMENTS:
            (self.folder / moment).touch()
            stages[moment]()
            if moment == self.part.moment:
                break
        self._write("at", moment)
        if moment != TEARDOWN:
            self._hold()

    def _hold(self) -> None:
        """Do as told: "leave" the run, raise an error, or "spawn" in vain and wait for more."""
        while (order := self._order()) != "leave":
            if order == "spawn":
                self._spawn_in_vain()
            elif order == "TaskFailed":
                _task()
            elif order:
                raise _ERRORS[order]
            self.supervisor.raise_if_dead()
            time.sleep(POLL_S)

    def _order(self) -> str:
        try:
            order = (self.folder / "order").read_text()
        except FileNotFoundError:
            return ""
        (self.folder / "order").unlink()
        return order

    # --- the moments

    def _start_ray(self) -> None:
        bare = ("bare",) if (self.folder / servers.BARE).exists() else ()
        self._spawn("ray", self.part.ports[:1], grace_s=10.0)
        self._await_born("ray", "gcs", "raylet", "actor", *bare)

    def _start_teacher(self) -> None:
        self._spawn("teacher", self.part.ports[1:3], grace_s=GRACE_S, stop_order=1)
        self._await_born("teacher", "scheduler-0", "scheduler-1", "detokenizer")

    def _await_teacher(self) -> None:
        self._connect(self.part.ports[1])

    def _sample(self) -> None:
        self._connect(self.part.ports[1]).sendall(b"POST /generate HTTP/1.1\r\n\r\n")

    def _sync(self) -> None:
        self._connect(self.part.ports[2])
        (self.folder / "scratch-teacher" / "weights").write_bytes(bytes(1 << 20))

    def _write_checkpoint(self) -> None:
        file = self.open.enter_context((self.supervisor.run_dir / "checkpoint.tmp").open("wb"))
        file.write(bytes(1 << 20))
        self._await_born("writer")

    def _evaluate(self) -> None:
        self._spawn("evaluation", self.part.ports[3:], grace_s=10.0)
        self._await_born("evaluation", "grader")

    # --- tools

    def _spawn(
        self, role: str, ports: tuple[int, ...], *, grace_s: float, stop_order: int = 0
    ) -> None:
        scratch = self.folder / f"scratch-{role}"
        (scratch / "deep").mkdir(parents=True)
        self.supervisor.spawn(
            ChildSpec(
                name=role,
                kind=role,
                argv=server_command(role, self.folder, ports),
                cwd=self.folder,
                log=self.supervisor.run_dir / "logs" / f"{role}.log",
                grace_s=grace_s,
                stop_order=stop_order,
                ports=ports,
                scratch=(scratch,),
            )
        )

    def _spawn_in_vain(self) -> None:
        try:
            self._spawn("late", (), grace_s=10.0)
        except ChildNotStarted as refusal:
            # The supervisor never heard of the folder, so it is the flow's to remove.
            shutil.rmtree(self.folder / "scratch-late")
            self._write("refusal", str(refusal))
        else:
            raise AssertionError("a child was started that the ledger cannot name")

    def _connect(self, port: int) -> socket.socket:
        give_up_at = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self.open.enter_context(socket.create_connection(("127.0.0.1", port)))
            except ConnectionRefusedError:
                assert time.monotonic() < give_up_at, f"nobody listens at {port}"
                time.sleep(POLL_S)

    def _await_born(self, *names: str) -> None:
        give_up_at = time.monotonic() + PATIENCE_S
        while set(names) - {line.split()[0] for line in born(self.folder)}:
            assert time.monotonic() < give_up_at, f"{names} were not born"
            self.supervisor.raise_if_dead()
            time.sleep(POLL_S)

    def _write(self, name: str, text: str) -> None:
        _write(self.folder / name, text)


def server_command(role: str, folder: Path, ports: tuple[int, ...]) -> tuple[str, ...]:
    """Return the command line of a stand-in server."""
    python = (sys.executable, "-I", "-S", str(Path(servers.__file__).absolute()))
    return (*python, role, str(folder), *map(str, ports))


def _task() -> None:
    """A task inside a task, each with something to clean up."""
    with ExitStack() as cleanup:
        cleanup.callback(lambda: None)
        try:
            raise ZeroDivisionError
        except ZeroDivisionError as error:
            raise TaskFailed from error


def born(folder: Path) -> list[str]:
    """Return the entries of all processes that the run has had so far."""
    try:
        return (folder / "born").read_text().splitlines()
    except FileNotFoundError:
        return []


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(path)


def _time_out(number: int, frame: FrameType | None) -> None:
    raise TimedOut


def _cancel(number: int, frame: FrameType | None) -> None:
    raise Cancelled


def main(part: Part) -> None:
    """Play the part; the flow's error leaves it as from any program."""
    folder = Path(part.folder)
    signal.signal(signal.SIGALRM, _time_out)
    if part.handles_sigterm:
        signal.signal(signal.SIGTERM, _cancel)
    Family(folder).enter("flow")
    lease = DeviceLease.take(DEVICES, owner={"run_id": part.run_id}, wait_s=0.0)
    settle = f"with open({str(folder / SETTLED)!r}, 'w') as file: file.write('Crashed')"
    _write(folder / "began", repr(time.monotonic()))
    supervisor = Supervisor.start(
        run_dir=folder / "run",
        run_id=part.run_id,
        teardown_s=part.teardown_s,
        margin_s=part.margin_s,
        deadline_s=part.deadline_s,
        lease=lease,
        settle=(sys.executable, "-I", "-S", "-c", settle),
        registry=Registry.of_user(),
    )
    flow = Flow(part, supervisor)
    try:
        with flow.open, supervisor:
            flow.go()
    finally:
        if supervisor.receipt is not None:
            _write(folder / "result", json.dumps(supervisor.receipt.to_json()))
        supervisor.settled()
        lease.release()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(Part(**{**given, "ports": tuple(given["ports"])}))
