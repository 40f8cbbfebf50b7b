"""CPU seconds of a whole run between two of its train steps, over all of its processes.

A run's processes are the flow, its descendants, and whatever carries the run's mark. Those that
have ended meanwhile are in the sums of the parents that waited for them.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from opd_core.lifecycle.records import RUN_MARKER
from opd_core.tracking.journal import JournalReader, JournalRecord
from opd_core.training.files import JOURNAL_FILE

TICKS = os.sysconf("SC_CLK_TCK")
ROLES = {
    "sampling actor": "SamplingActor",
    "training actor": "TrainingActor",
    "driver": "opd_core.training.driver",
    "teacher": "opd_core.serving.embedded",
    "supervisor": "lifecycle.supervisor",
    "Prefect server": "prefect.server",
    "raylet": "raylet/raylet",
    "Ray's other daemons": "ray",
}
"""The first of these words in a command line says what a process is."""


@dataclass(frozen=True, slots=True)
class Watched:
    """The records of all steps, and CPU ticks by role after the first and after the last."""

    records: list[JournalRecord]
    before: Counter[str]
    after: Counter[str]


def watch(flow: subprocess.Popen[bytes], folder: Path, last: int) -> Watched | None:
    """CPU ticks by role when the first step and step ``last`` were recorded; None if the run ended
    before that."""
    records: list[JournalRecord] = []
    ticks: list[Counter[str]] = []
    reader = None
    while flow.poll() is None:
        time.sleep(0.02)
        if reader is None:
            found = list(folder.glob(f"*/{JOURNAL_FILE}"))
            reader = JournalReader(found[0]) if found else None
            continue
        for record in reader.read():
            if "time/step_s" in record.metrics:
                records.append(record)
                if record.train_step in (1, last):
                    ticks.append(cpu_ticks(flow.pid, reader.path.parent.name))
        if len(ticks) == 2:
            return Watched(records[:last], *ticks)
    return None


def cpu_ticks(flow: int, run_id: str) -> Counter[str]:
    """Ticks so far of all processes of the run, by role."""
    parents: dict[int, int] = {}
    ticks: Counter[str] = Counter()
    used: dict[int, int] = {}
    roles: dict[int, str] = {}
    members = {flow}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is somebody else's
            continue
        pid = int(folder.name)
        parents[pid], used[pid] = int(stat[1]), sum(map(int, stat[11:15]))
        roles[pid] = "flow" if pid == flow else role(command)
        if f"{RUN_MARKER}={run_id}".encode() in environment:
            members.add(pid)
    grown = True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in members}
        grown = not children <= members
        members |= children
    for pid in members:
        ticks[roles[pid]] += used[pid]
    return ticks


def role(command: str) -> str:
    """What a process is, by its command line."""
    return next((name for name, word in ROLES.items() if word in command), "other")
