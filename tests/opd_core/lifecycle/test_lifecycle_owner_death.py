"""What is left when the owner of a run dies, is told to end, or leaves without a word: nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from opd_core.lifecycle.handle import Supervisor
from opd_core.lifecycle.ledger import read_ledger
from opd_core.lifecycle.order import RunOrder
from opd_core.lifecycle.process import ProcessId, identify, is_running, kill_exactly
from opd_core.lifecycle.records import ChildSpec, Receipt, read_receipt

Order = Callable[..., ChildSpec]
Announced = Callable[[str], ProcessId]
Gone = Callable[[ProcessId], None]
WaitUntil = Callable[..., None]

# argv: run folder, run id, orders as JSON, what to do then. Prints the supervisor's pid when ready
# (then a forked copy's).
OWNER = """
import json, os, pathlib, signal, sys
from opd_core.lifecycle.handle import Supervisor
from opd_core.lifecycle.records import ChildSpec

run_dir, run_id, orders, then = sys.argv[1:]
if then == "handle TERM":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
with Supervisor.start(run_dir=pathlib.Path(run_dir), run_id=run_id) as supervisor:
    for order in json.loads(orders):
        supervisor.spawn(ChildSpec.from_wire(order))
    print(supervisor.pid, flush=True)
    if then == "fork" and os.fork() == 0:
        print(os.getpid(), flush=True)
        while True:
            signal.pause()
    if then == "leave":
        sys.stdin.readline()
        os._exit(0)
    while True:
        signal.pause()
"""

# A process that carries the run's marker and starts the owner without it.
MARKED_PARENT = """
import os, subprocess, sys
environment = {name: value for name, value in os.environ.items() if name != "OPD_RUN_ID"}
sys.exit(subprocess.call([sys.executable, *sys.argv[1:]], env=environment))
"""


@contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def owner_command(tmp_path: Path, run_id: str) -> Callable[..., list[str]]:
    program = tmp_path / "owner.py"
    program.write_text(OWNER)

    def build(then: str, *specs: ChildSpec) -> list[str]:
        orders = json.dumps([spec.to_wire() for spec in specs])
        return [str(program), str(tmp_path / "run"), run_id, orders, then]

    return build


@pytest.fixture
def environment(repository: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(repository)}


@pytest.fixture
def receipt(tmp_path: Path, wait_until: WaitUntil) -> Callable[[], Receipt]:
    """Wait for the receipt that the supervisor writes after its owner's death."""

    def wait() -> Receipt:
        wait_until((tmp_path / "run" / "receipt.json").exists, "the receipt to be written")
        found = read_receipt(tmp_path / "run")
        assert found is not None
        return found

    return wait


@pytest.mark.parametrize(
    ("kill", "how"),
    [(os.kill, signal.SIGKILL), (os.kill, signal.SIGTERM), (os.killpg, signal.SIGKILL)],
    ids=["SIGKILL", "SIGTERM", "SIGKILL to its group"],
)
def test_nothing_survives_the_death_of_the_owner(
    kill: Callable[[int, int], None],
    how: signal.Signals,
    tmp_path: Path,
    order: Order,
    announced: Announced,
    gone: Gone,
    owner_command: Callable[..., list[str]],
    environment: dict[str, str],
    receipt: Callable[[], Receipt],
) -> None:
    def daemon(name: str) -> dict[str, Any]:
        return {"announce": str(tmp_path / name), "deaf": True}

    specs = (
        order("plain"),
        order("deaf", {"deaf": True, "daemon": daemon("deaf-daemon")}, grace_s=0.3),
        order("bare", {"daemon": daemon("bare-daemon"), "bare": True}),
    )
    command = [sys.executable, *owner_command("wait", *specs)]
    with running(command, env=environment, start_new_session=True) as owner:
        names = ("plain", "deaf", "deaf-daemon", "bare", "bare-daemon")
        processes = [announced(name) for name in names]
        assert owner.stdout is not None
        assert owner.stdout.readline(), "the owner became ready"
        kill(owner.pid, how)
        assert owner.wait(60) == -how
        proof = receipt()
    for process in processes:
        gone(process)
    assert (proof.cause, proof.clean, proof.survivors) == ("owner died", True, ())
    assert {end.name: end.how for end in proof.children} == {
        "plain": "SIGTERM",
        "deaf": "SIGKILL",
        "bare": "SIGTERM",
    }


def test_an_owner_that_turns_sigterm_into_an_exception_ends_its_run(
    order: Order,
    announced: Announced,
    owner_command: Callable[..., list[str]],
    environment: dict[str, str],
    receipt: Callable[[], Receipt],
) -> None:
    command = [sys.executable, *owner_command("handle TERM", order("teacher"))]
    with running(command, env=environment) as owner:
        teacher = announced("teacher")
        assert owner.stdout is not None
        assert owner.stdout.readline(), "the owner became ready"
        owner.terminate()
        assert owner.wait(60) == 143
        assert not is_running(teacher), "the owner waited for the end"
    assert (receipt().cause, receipt().clean) == ("SystemExit", True)


def test_an_owner_that_leaves_without_a_word_has_died(
    order: Order,
    announced: Announced,
    gone: Gone,
    owner_command: Callable[..., list[str]],
    environment: dict[str, str],
    receipt: Callable[[], Receipt],
) -> None:
    command = [sys.executable, *owner_command("leave", order("teacher"))]
    with running(command, env=environment) as owner:
        teacher = announced("teacher")
        owner.communicate("\n", timeout=60)
        assert owner.returncode == 0
        gone(teacher)
    assert (receipt().cause, receipt().clean) == ("owner died", True)


def test_a_forked_copy_that_holds_the_control_line_hides_no_death(
    order: Order,
    announced: Announced,
    gone: Gone,
    owner_command: Callable[..., list[str]],
    environment: dict[str, str],
    receipt: Callable[[], Receipt],
) -> None:
    command = [sys.executable, *owner_command("fork", order("teacher"))]
    with running(command, env=environment) as owner:
        teacher = announced("teacher")
        assert owner.stdout is not None
        _, copy_pid = int(owner.stdout.readline()), int(owner.stdout.readline())
        copy = identify(copy_pid)
        assert copy is not None
        owner.kill()
        try:
            gone(teacher)
            assert receipt().cause == "owner died"
            assert is_running(copy), "it is no part of the run"
        finally:
            kill_exactly(copy)


def test_a_later_process_with_the_owners_pid_is_not_taken_for_the_owner(
    tmp_path: Path, run_id: str, environment: dict[str, str]
) -> None:
    me = identify(os.getpid())
    assert me is not None
    code = (
        "import sys; from opd_core.lifecycle.supervisor import main; sys.exit(main(sys.argv[1:]))"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        order = RunOrder(
            run_id=run_id,
            run_dir=tmp_path,
            teardown_s=60.0,
            owner=ProcessId(me.pid, me.start_ticks - 1),
            control_fd=theirs.fileno(),
        )
        command = [sys.executable, "-c", code, json.dumps(order.to_wire())]
        subprocess.run(command, env=environment, pass_fds=[theirs.fileno()], timeout=60, check=True)
    found = read_receipt(tmp_path)
    assert found is not None
    assert found.cause == "owner died"


def test_the_owners_ancestors_survive_even_with_the_runs_marker(
    tmp_path: Path,
    run_id: str,
    order: Order,
    announced: Announced,
    owner_command: Callable[..., list[str]],
    environment: dict[str, str],
    receipt: Callable[[], Receipt],
) -> None:
    parent = tmp_path / "parent.py"
    parent.write_text(MARKED_PARENT)
    command = [sys.executable, str(parent), *owner_command("handle TERM", order("teacher"))]
    with running(command, env={**environment, "OPD_RUN_ID": run_id}) as marked:
        announced("teacher")
        assert marked.stdout is not None
        supervisor_pid = int(marked.stdout.readline())
        owner_pid = read_ledger(tmp_path / "run" / "ledger.jsonl")[0].facts["owner_pid"]
        os.kill(supervisor_pid, signal.SIGTERM)
        assert receipt().clean
        assert marked.poll() is None
        os.kill(owner_pid, signal.SIGTERM)
        assert marked.wait(60) == 143, "the owner's own exit code, passed on by a living parent"


def test_the_next_supervisor_ends_what_a_lost_owner_and_supervisor_left(
    tmp_path: Path,
    run_id: str,
    order: Order,
    announced: Announced,
    gone: Gone,
    owner_command: Callable[..., list[str]],
    environment: dict[str, str],
) -> None:
    daemon = {"announce": str(tmp_path / "daemon"), "deaf": True}
    spec = order("teacher", {"daemon": daemon})
    command = [sys.executable, *owner_command("wait", spec)]
    with running(command, env=environment) as owner:
        teacher, stray = announced("teacher"), announced("daemon")
        assert owner.stdout is not None
        supervisor_pid = int(owner.stdout.readline())
        os.kill(supervisor_pid, signal.SIGKILL)
        owner.kill()
        owner.wait(60)
    gone(teacher)
    assert is_running(stray), "nobody was left to find it"
    with Supervisor.start(run_dir=tmp_path / "run", run_id=run_id):
        assert not is_running(stray)
    events = [record.event for record in read_ledger(tmp_path / "run" / "ledger.jsonl")]
    assert events.count("run_started") == events.count("receipt") == 2
