"""Real processes to be ended: one small program whose options make it easy or hard to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from opd_core.lifecycle.process import ProcessId, identify, is_running, kill_exactly
from opd_core.lifecycle.records import ChildSpec
from opd_core.lifecycle.sweep import find, markers

PATIENCE_S = 60.0

# Options: announce (file for its pid, written when it is ready), deaf (ignores TERM and INT),
# daemon (options of a double-forked process in a session of its own), bare (that one clears its
# environment), helper (options of a child in the same group), signals (file for the signal that
# came), stays (does not exit at that signal), port (to listen on), show (file for its
# environment), say and code (print and exit).
PROGRAM = """
import json, os, signal, socket, subprocess, sys

def start(options, detached, bare=False):
    command = [sys.executable, "-I", "-S", sys.argv[0], json.dumps(options)]
    if not detached:
        subprocess.Popen(command)
    elif os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(sys.executable, command, {} if bare else dict(os.environ))
        os._exit(0)
    else:
        os.wait()

def write(path, text):
    with open(path + ".tmp", "w") as file:
        file.write(text)
    os.rename(path + ".tmp", path)

def note_and_exit(number, frame):
    with open(options["signals"], "a") as file:
        file.write(options["name"] + " " + signal.Signals(number).name + "\\n")
    if not options.get("stays"):
        sys.exit(0)

options = json.loads(sys.argv[1])
for number in (signal.SIGTERM, signal.SIGINT):
    if "signals" in options:
        signal.signal(number, note_and_exit)
    else:
        signal.signal(number, signal.SIG_IGN if options.get("deaf") else signal.SIG_DFL)
if "daemon" in options:
    start(options["daemon"], detached=True, bare=options.get("bare", False))
if "helper" in options:
    start(options["helper"], detached=False)
if "port" in options:
    server = socket.create_server(("127.0.0.1", options["port"]))
if "show" in options:
    write(options["show"], json.dumps(dict(os.environ)))
if "announce" in options:
    write(options["announce"], str(os.getpid()))
if "say" in options:
    print(options["say"], flush=True)
if "code" in options:
    sys.exit(options["code"])
while True:
    signal.pause()
"""

# The owner of a run. argv: what to start, as JSON. Prints the supervisor's pid when all children
# run, then does what it reads: "end", "settled"; at the end of its input it exits.
OWNER = """
import json, pathlib, sys
from opd_core.lifecycle.handle import Supervisor
from opd_core.lifecycle.records import ChildSpec
from opd_core.lifecycle.registry import Registry

what = json.loads(sys.argv[1])
supervisor = Supervisor.start(
    run_dir=pathlib.Path(what["run_dir"]),
    run_id=what["run_id"],
    settle=tuple(what["settle"]),
    registry=Registry(pathlib.Path(what["registry"])),
)
for child in what["children"]:
    supervisor.spawn(ChildSpec.from_wire(child))
print(supervisor.pid, flush=True)
for line in sys.stdin:
    getattr(supervisor, line.strip())()
    print("done", flush=True)
"""


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """Wait for a condition, and fail with its description if it does not come true in time."""

    def wait(condition: Callable[[], bool], what: str) -> None:
        give_up_at = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > give_up_at:
                pytest.fail(f"waited {PATIENCE_S:g} s in vain for: {what}")
            time.sleep(0.01)

    return wait


@pytest.fixture
def run_id() -> Iterator[str]:
    """A run's name; whatever still carries it after the test is killed and fails the test."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    left = find(markers(name), root=None, spare=frozenset())
    for process in left:
        kill_exactly(process)
    assert not left, "the test left processes of its run"


@pytest.fixture
def order(tmp_path: Path) -> Callable[..., ChildSpec]:
    """Build an order for the program: its options, then the fields of the order that matter."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def build(name: str, options: dict[str, Any] | None = None, **fields: Any) -> ChildSpec:
        command = json.dumps({"name": name, "announce": str(tmp_path / name), **(options or {})})
        return ChildSpec(
            **{
                "name": name,
                "kind": "stub",
                "argv": (sys.executable, "-I", "-S", str(program), command),
                "cwd": tmp_path,
                "log": tmp_path / "logs" / f"{name}.log",
                "grace_s": PATIENCE_S,
                **fields,
            }
        )

    return build


@pytest.fixture
def announced(
    tmp_path: Path, wait_until: Callable[..., None]
) -> Iterator[Callable[[str], ProcessId]]:
    """Wait until a program has announced itself under this name; return which process it is.

    Each is killed after the test, so that a failed one leaves nothing either.
    """
    processes: list[ProcessId] = []

    def wait(name: str) -> ProcessId:
        path = tmp_path / name
        wait_until(path.exists, f"{name} to announce itself")
        process = identify(int(path.read_text()))
        assert process is not None, f"{name} ended at once"
        processes.append(process)
        return process

    yield wait
    for process in processes:
        kill_exactly(process)


@pytest.fixture
def gone(wait_until: Callable[..., None]) -> Callable[[ProcessId], None]:
    """Wait until exactly this process has ended."""

    def wait(process: ProcessId) -> None:
        wait_until(lambda: not is_running(process), f"process {process} to end")

    return wait


@pytest.fixture
def repository() -> Path:
    """The folder that holds the package, for programs that import it."""
    import opd_core.lifecycle.process as module

    return Path(os.path.abspath(module.__file__)).parents[2]


@pytest.fixture
def start_owner(
    tmp_path: Path, run_id: str, repository: Path
) -> Iterator[Callable[..., tuple[subprocess.Popen[str], ProcessId]]]:
    """Start an owner of a run in `tmp_path`/run, and these children; return it and its supervisor.

    Its run stands in the registry `tmp_path`/registry. Its own environment carries another run's
    marker.
    """
    owners: list[subprocess.Popen[str]] = []
    supervisors: list[ProcessId] = []
    program = tmp_path / "owner.py"
    program.write_text(OWNER)

    def start(
        settle: tuple[str, ...], *children: ChildSpec
    ) -> tuple[subprocess.Popen[str], ProcessId]:
        what = {
            "run_dir": str(tmp_path / "run"),
            "run_id": run_id,
            "settle": settle,
            "registry": str(tmp_path / "registry"),
            "children": [child.to_wire() for child in children],
        }
        marks = {"OPD_RUN_ID": "an-outer-run", "OPD_RUN_CHILD": "an-outer-child"}
        owner = subprocess.Popen(
            [sys.executable, str(program), json.dumps(what)],
            env={**os.environ, **marks, "PYTHONPATH": str(repository)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        owners.append(owner)
        assert owner.stdout is not None
        supervisor = identify(int(owner.stdout.readline()))
        assert supervisor is not None
        supervisors.append(supervisor)
        return owner, supervisor

    yield start
    for owner in owners:
        owner.kill()
        owner.communicate()
    for supervisor in supervisors:
        kill_exactly(supervisor)
