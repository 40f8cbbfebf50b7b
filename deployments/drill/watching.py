"""A run seen from outside: its run directory, ``/proc`` and its ports; nothing is asked of it."""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd_core.lifecycle.ledger import LEDGER_FILE, LedgerRecord, read_ledger
from opd_core.lifecycle.ports import LOOPBACK, port_is_free
from opd_core.lifecycle.records import RECEIPT_FILE, RUN_MARKER, Receipt, read_receipt
from opd_core.training.files import JOURNAL_FILE, RUN_FILE, TEACHERS_FILE
from opd_core.training.phase import read_phase

FIRST_STEP = 3
"""The train step from which on there is a checkpoint to go on from."""


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What an independent look finds of a run; each named as a person would look for it."""

    processes: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    folders: tuple[str, ...] = ()

    @property
    def none(self) -> bool:
        return not (self.processes or self.ports or self.folders)


class RunView:
    """One run directory, read again at each question."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run_id = directory.name

    def ledger(self) -> tuple[LedgerRecord, ...]:
        """All records so far."""
        return read_ledger(self.directory / LEDGER_FILE)

    def events(self, event: str) -> list[LedgerRecord]:
        """The records of one kind."""
        return [record for record in self.ledger() if record.event == event]

    def started(self, kind: str) -> list[int]:
        """The pids of all children of a kind (``teacher``, ``ray``), in the order of start."""
        return [r.facts["pid"] for r in self.events("child_started") if r.facts["kind"] == kind]

    def owner(self) -> int:
        """The pid of the flow process."""
        return int(self.events("run_started")[-1].facts["owner_pid"])

    def supervisor(self) -> int:
        """The pid of the supervisor."""
        return int(self.events("run_started")[-1].facts["supervisor_pid"])

    def flow_run_id(self) -> str:
        """Prefect's id of the flow run."""
        history = json.loads((self.directory / RUN_FILE).read_text())
        return str(history["attempts"][-1]["flow_run_id"])

    def trained_steps(self) -> int:
        """Train steps in the journal."""
        path = self.directory / JOURNAL_FILE
        return path.read_text().count('"time/step_s"') if path.exists() else 0

    def receipt(self) -> Receipt | None:
        """The receipt, once it is written."""
        return read_receipt(self.directory) if (self.directory / RECEIPT_FILE).exists() else None

    def json_file(self, name: str) -> dict[str, Any]:
        """A JSON file of the run directory, {} if it is not there."""
        path = self.directory / name
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def processes(self) -> dict[int, str]:
        """The command lines of all living processes with the run's mark or its Ray folder."""
        return living(f"{RUN_MARKER}={self.run_id}", *self._folders("ray"))

    def leftovers(self) -> Leftovers:
        """What there is of the run now. The owner and the supervisor are no part of it."""
        starting = self.events("child_starting")
        ports = {port for record in starting for port in record.facts["ports"]}
        return Leftovers(
            tuple(f"{pid} {command}" for pid, command in self.processes().items()),
            tuple(sorted(port for port in ports if not port_is_free(port))),
            tuple(path for path in self._folders() if os.path.lexists(path)),
        )

    def _folders(self, kind: str = "") -> list[str]:
        """The scratch folders of its children (of a kind)."""
        starting = self.events("child_starting")
        told = [r.facts["scratch"] for r in starting if kind in ("", r.facts["kind"])]
        return [folder for folders in told for folder in folders]

    # --- moments

    def reached(self, moment: str) -> bool:
        """Whether the run is at this moment now."""
        if moment in ("before", "loading", "readiness"):
            return self._of_start(moment)
        if moment == "teardown":
            return bool(self.events("teardown_begun"))
        phase = read_phase(self.directory)
        return phase is not None and phase.phase == moment and phase.train_step >= FIRST_STEP

    def _of_start(self, moment: str) -> bool:
        ordered = [r.facts for r in self.events("child_starting") if r.facts["kind"] == "teacher"]
        if moment == "before":
            return bool(self.events("run_started")) and not ordered
        if not ordered or not self.started("teacher"):
            return False
        answers = answers_well(ordered[0]["ports"][0])
        proven = (self.directory / TEACHERS_FILE).exists()
        return not proven and answers == (moment == "readiness")


def run_in(root: Path) -> RunView | None:
    """The one run under a run root, once its directory is there."""
    found = next(iter(root.glob(f"*/{RUN_FILE}")), None)
    return None if found is None else RunView(found.parent)


def answers_well(port: int) -> bool:
    """Whether a server is healthy."""
    with socket.socket() as probe:
        if probe.connect_ex((LOOPBACK, port)):
            return False
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{LOOPBACK}:{port}/health", timeout=2) as answer:
            return int(answer.status) == 200
    except (urllib.error.URLError, OSError):
        return False


def living(mark: str, *folders: str) -> dict[int, str]:
    """The command lines, by pid, of processes that were started with ``mark`` in their environment
    or that name one of ``folders`` in their command line. A zombie shows neither."""
    me = os.getpid()
    return {
        pid: command
        for pid, environment, command in _processes()
        if pid != me
        and (mark.encode() in environment.split(b"\0") or any(f in command for f in folders))
    }


def _processes() -> Iterator[tuple[int, bytes, str]]:
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        folder = Path("/proc", entry)
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        yield int(entry), environment, b" ".join(words).decode("utf-8", "replace").strip()


def wait_for(
    condition: Callable[[], Any],
    limit_s: float,
    *,
    pause_s: float = 0.1,
    in_vain: Callable[[], bool] = lambda: False,
) -> Any:
    """The first truthy value of ``condition``; a falsy one after ``limit_s``, or once ``in_vain``
    is true."""
    give_up_at = time.monotonic() + limit_s
    while True:
        vain = in_vain()  # asked first: what it ends with counts
        found = condition()
        if found or vain or time.monotonic() > give_up_at:
            return found
        time.sleep(pause_s)
