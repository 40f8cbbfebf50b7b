"""Runs that lost their owner and their supervisor: found, ended, settled; all others left alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from opd_core.lifecycle.ledger import Ledger, read_ledger
from opd_core.lifecycle.ports import reserve_ports
from opd_core.lifecycle.process import ProcessId, boot_id, identify, is_running, kill_exactly
from opd_core.lifecycle.reaper import forget, look, reap
from opd_core.lifecycle.records import ChildSpec, PortState, ScratchState, read_receipt
from opd_core.lifecycle.registry import RegisteredRun, Registry
from tests.opd_core.lifecycle.counted_settle import CountedSettle

Order = Callable[..., ChildSpec]
Announced = Callable[[str], ProcessId]
Gone = Callable[[ProcessId], None]
WaitUntil = Callable[..., None]
StartOwner = Callable[..., tuple[subprocess.Popen[str], ProcessId]]
Start = Callable[..., ProcessId]

CAUSE = "owner and supervisor died"

# argv: registry folder. Reaps when it reads a line; prints what became of each run.
REAPER = """
import json, pathlib, sys
from opd_core.lifecycle.reaper import reap
from opd_core.lifecycle.registry import Registry

print("ready", flush=True)
sys.stdin.readline()
reaped = reap(Registry(pathlib.Path(sys.argv[1])))
print(json.dumps([each.settled for each in reaped]))
"""


@dataclass(frozen=True, kw_only=True)
class DeadRun(CountedSettle):
    """A run of which nobody is left. The owner's pid is in use again, by the process that runs the
    tests."""

    run_id: str

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger.jsonl"

    def enter(self, **fields: Any) -> RegisteredRun:
        """Enter it in the registry."""
        me = identify(os.getpid())
        assert me is not None
        owner = ProcessId(me.pid, me.start_ticks - 1)
        run = RegisteredRun.here(self.run_id, self.folder, owner, self.settle, 2.0)
        self.registry.add(replace(run, **fields))
        return replace(run, **fields)

    def write_ledger(
        self,
        *children: ProcessId,
        boot: str | None = None,
        ports: tuple[int, ...] = (),
        scratch: tuple[Path, ...] = (),
    ) -> None:
        """Write what its supervisor had written when it died: these children ran."""
        self.folder.mkdir()
        ledger = Ledger.open(self.ledger, self.run_id)
        boot = boot or boot_id()
        ledger.append("run_started", run_id=self.run_id, boot_id=boot)
        for number, child in enumerate(children):
            spec = ChildSpec(
                name=f"child-{number}",
                kind="stub",
                argv=("stub",),
                cwd=self.folder,
                log=self.folder / "log",
                ports=ports,
                scratch=scratch,
            )
            ledger.append("child_starting", **spec.to_ledger())
            ledger.append(
                "child_started",
                name=spec.name,
                kind=spec.kind,
                pid=child.pid,
                start_ticks=child.start_ticks,
                pgid=child.pid,
                boot_id=boot,
            )
        ledger.close()

    def events(self) -> list[str]:
        return [record.event for record in read_ledger(self.ledger)]


@pytest.fixture
def dead(tmp_path: Path, run_id: str) -> DeadRun:
    folder = tmp_path.resolve()
    return DeadRun(
        run_id=run_id,
        folder=folder / "run",
        registry=Registry(folder / "registry"),
        record=folder / "record",
    )


@pytest.fixture
def start(order: Order, announced: Announced) -> Iterator[Start]:
    """Start a process with these entries in its environment; return which it is."""
    processes: list[subprocess.Popen[bytes]] = []

    def begin(name: str, **environment: str) -> ProcessId:
        processes.append(subprocess.Popen(order(name).argv, env={**os.environ, **environment}))
        return announced(name)

    yield begin
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def start_reaper(dead: DeadRun, repository: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Start a reaper that is ready and waits for a word."""
    reapers: list[subprocess.Popen[str]] = []

    def begin() -> subprocess.Popen[str]:
        reaper = subprocess.Popen(
            [sys.executable, "-c", REAPER, str(dead.registry.folder)],
            env={**os.environ, "PYTHONPATH": str(repository)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        reapers.append(reaper)
        assert reaper.stdout is not None
        assert reaper.stdout.readline() == "ready\n"
        return reaper

    yield begin
    for reaper in reapers:
        reaper.kill()
        reaper.communicate()


def let_go(reaper: subprocess.Popen[str]) -> None:
    assert reaper.stdin is not None
    print("go", file=reaper.stdin, flush=True)


def outcome(reaper: subprocess.Popen[str]) -> list[bool]:
    """Return what it says of each run that it took: whether it is settled."""
    assert reaper.stdout is not None
    settled: list[bool] = json.loads(reaper.stdout.readline())
    assert reaper.wait(60) == 0
    return settled


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file and folder below, with its time of change and content."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


# --- whole runs, with real owners and supervisors


def test_a_living_run_is_left_alone(
    dead: DeadRun, start_owner: StartOwner, order: Order, announced: Announced, gone: Gone
) -> None:
    owner, supervisor = start_owner(dead.settle, order("teacher"))
    teacher = announced("teacher")
    (finding,) = look(dead.registry)
    assert (finding.state, finding.run.run_id) == ("living", dead.run_id)
    assert reap(dead.registry) == ()
    assert is_running(teacher)
    os.kill(supervisor.pid, signal.SIGKILL)
    gone(supervisor)
    (finding,) = look(dead.registry)
    assert (finding.state, finding.leftovers) == ("living", ())
    assert f"pid {owner.pid}" in finding.why
    assert reap(dead.registry) == ()
    assert len(dead.registry.runs()) == 1
    assert not dead.record.exists()
    assert "receipt" not in dead.events()


def test_a_supervisor_at_work_after_its_owners_death_is_left_alone(
    tmp_path: Path,
    dead: DeadRun,
    start_owner: StartOwner,
    order: Order,
    announced: Announced,
    gone: Gone,
    wait_until: WaitUntil,
) -> None:
    signals = tmp_path / "signals"
    options = {"signals": str(signals), "stays": True}
    owner, supervisor = start_owner(dead.settle, order("slow", options, grace_s=1.5))
    slow = announced("slow")
    owner.kill()
    wait_until(signals.exists, "the child to be asked to stop")
    assert [finding.state for finding in look(dead.registry)] == ["living"]
    assert reap(dead.registry) == ()
    assert is_running(slow), "it has its grace"
    gone(supervisor)
    assert dead.record.read_text() == dead.settled_once
    assert look(dead.registry) == ()


def test_a_run_that_lost_both_is_found_then_ended_and_settled(
    tmp_path: Path,
    dead: DeadRun,
    start_owner: StartOwner,
    order: Order,
    announced: Announced,
    gone: Gone,
) -> None:
    def with_daemon(name: str) -> ChildSpec:
        daemon = {"announce": str(tmp_path / f"{name}-daemon"), "deaf": True}
        return order(name, {"daemon": daemon}, ports=ports, scratch=(scratch,))

    with reserve_ports(1) as reservation:
        ports = reservation.ports
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    owner, supervisor = start_owner(dead.settle, with_daemon("one"), with_daemon("two"))
    children = [announced("one"), announced("two")]
    daemons = [announced("one-daemon"), announced("two-daemon")]
    os.kill(supervisor.pid, signal.SIGKILL)
    owner.kill()
    owner.wait(60)
    for process in (*children, supervisor):
        gone(process)

    before = snapshot(tmp_path)
    (finding,) = look(dead.registry)
    assert finding.state == "dead"
    assert [left.pid for left in finding.leftovers] == sorted(each.pid for each in daemons)
    assert {left.executable for left in finding.leftovers} == {Path(sys.executable).resolve().name}
    assert snapshot(tmp_path) == before
    assert all(is_running(process) for process in daemons)

    (reaped,) = reap(dead.registry)
    assert (reaped.settled, reaped.said) == (True, "")
    assert reaped.finding.run == finding.run
    assert not any(is_running(process) for process in daemons)
    receipt = read_receipt(dead.folder)
    assert receipt is not None
    assert receipt == reaped.receipt
    assert (receipt.cause, receipt.clean, receipt.survivors) == (CAUSE, True, ())
    assert [(end.name, end.how, end.returncode) for end in receipt.children] == [
        ("one", "SIGKILL", None),
        ("two", "SIGKILL", None),
    ]
    assert receipt.ports == (PortState(ports[0], free=True),)
    assert receipt.scratch == (ScratchState(str(scratch), removed=True),)
    assert not scratch.exists()
    assert dead.events()[-2:] == ["receipt", "settled"]
    assert read_ledger(dead.ledger)[-1].facts == {"by": "reaper"}
    assert dead.record.read_text() == dead.settled_once
    assert look(dead.registry) == ()
    assert reap(dead.registry) == ()


def test_a_run_that_had_its_receipt_is_only_settled(
    dead: DeadRun, start_owner: StartOwner, gone: Gone
) -> None:
    owner, supervisor = start_owner(dead.settle)
    assert owner.stdin is not None
    assert owner.stdout is not None
    print("end", file=owner.stdin, flush=True)
    assert owner.stdout.readline() == "done\n"
    os.kill(supervisor.pid, signal.SIGKILL)
    owner.kill()
    owner.wait(60)
    gone(supervisor)
    proof = (dead.folder / "receipt.json").read_bytes()
    (reaped,) = reap(dead.registry)
    assert (reaped.receipt, reaped.settled) == (None, True)
    assert (dead.folder / "receipt.json").read_bytes() == proof
    assert dead.record.read_text() == dead.settled_once
    assert look(dead.registry) == ()


# --- what is killed, and what is not


def test_only_the_runs_own_processes_are_killed(dead: DeadRun, start: Start) -> None:
    unmarked_child = start("unmarked-child")
    reused = start("reused-pid")
    others = [
        start("same-program"),
        start("longer", OPD_RUN_ID=f"{dead.run_id}-2"),
        start("shorter", OPD_RUN_ID=dead.run_id[:-1]),
        start("mentions-it", NOTE=f"OPD_RUN_ID={dead.run_id}"),
        reused,
    ]
    marked = start("marked", OPD_RUN_ID=dead.run_id)
    earlier = ProcessId(reused.pid, reused.start_ticks - 1)
    dead.write_ledger(unmarked_child, earlier)
    dead.enter()
    (finding,) = look(dead.registry)
    assert [left.pid for left in finding.leftovers] == [marked.pid]
    (reaped,) = reap(dead.registry)
    assert reaped.settled
    assert not is_running(unmarked_child), "the ledger names it, start time and all"
    assert not is_running(marked)
    assert all(is_running(other) for other in others)


def test_a_leftover_that_got_the_dead_owners_pid_is_not_spared(dead: DeadRun, start: Start) -> None:
    marked = start("marked", OPD_RUN_ID=dead.run_id)
    dead.write_ledger()
    dead.enter(owner=ProcessId(marked.pid, marked.start_ticks - 1))
    (finding,) = look(dead.registry)
    assert [left.pid for left in finding.leftovers] == [marked.pid]
    (reaped,) = reap(dead.registry)
    assert reaped.receipt is not None
    assert reaped.receipt.clean
    assert not is_running(marked)


def test_after_a_new_boot_no_pid_of_the_ledger_is_believed(dead: DeadRun, start: Start) -> None:
    stranger, marked = start("stranger"), start("marked", OPD_RUN_ID=dead.run_id)
    dead.write_ledger(stranger, boot="another-boot")
    me = identify(os.getpid())
    assert me is not None
    dead.enter(boot_id="another-boot", owner=me)
    (finding,) = look(dead.registry)
    assert (finding.state, finding.why) == ("dead", "the machine was started anew")
    (reaped,) = reap(dead.registry)
    assert reaped.settled
    assert reaped.receipt is not None
    assert reaped.receipt.clean
    assert is_running(stranger)
    assert not is_running(marked)
    assert dead.record.read_text() == dead.settled_once
    assert look(dead.registry) == ()


def test_a_run_of_another_host_is_said_and_left_alone(dead: DeadRun, start: Start) -> None:
    marked = start("marked", OPD_RUN_ID=dead.run_id)
    dead.write_ledger()
    dead.enter(host="another-host", boot_id="another-boot")
    (finding,) = look(dead.registry)
    assert (finding.state, finding.leftovers) == ("elsewhere", ())
    assert "another-host" in finding.why
    assert reap(dead.registry) == ()
    assert is_running(marked)
    assert len(dead.registry.runs()) == 1
    assert not dead.record.exists()


# --- what can be missing or in the way


def test_a_run_whose_folder_was_removed_is_ended_by_its_marker(dead: DeadRun, start: Start) -> None:
    marked, stranger = start("marked", OPD_RUN_ID=dead.run_id), start("stranger")
    dead.enter()
    (reaped,) = reap(dead.registry)
    assert (reaped.settled, reaped.said) == (True, "")
    assert reaped.receipt is not None
    assert reaped.receipt.cause == CAUSE
    assert not is_running(marked)
    assert is_running(stranger)
    assert not dead.folder.exists()
    assert not dead.record.exists(), "there is nothing to write it from"
    assert dead.registry.runs() == ()


def test_a_run_without_a_ledger_is_ended_by_its_marker(dead: DeadRun, start: Start) -> None:
    marked = start("marked", OPD_RUN_ID=dead.run_id)
    dead.folder.mkdir()
    dead.enter()
    (reaped,) = reap(dead.registry, again=False)
    assert reaped.settled
    assert not is_running(marked)
    assert read_receipt(dead.folder) == reaped.receipt
    assert dead.record.read_text() == dead.settled_once


@pytest.mark.parametrize("damage", ["rubbish in the middle", "another run's"])
def test_a_damaged_ledger_is_said_after_the_marked_processes_are_killed(
    damage: str, dead: DeadRun, start: Start
) -> None:
    marked, listed = start("marked", OPD_RUN_ID=dead.run_id), start("listed")
    dead.write_ledger(listed)
    text = dead.ledger.read_text()
    first, _, rest = text.partition("\n")
    dead.ledger.write_text(
        f"{first}\nrubbish\n{rest}"
        if damage == "rubbish in the middle"
        else text.replace(dead.run_id, "another-run")
    )
    content = dead.ledger.read_bytes()
    dead.enter()
    (reaped,) = reap(dead.registry)
    assert not reaped.settled
    assert str(dead.ledger) in reaped.said
    assert reaped.receipt is not None
    assert not reaped.receipt.clean
    assert not is_running(marked)
    assert is_running(listed), "nothing that the ledger says is believed"
    assert dead.ledger.read_bytes() == content
    assert not dead.record.exists()
    assert len(dead.registry.runs()) == 1


def test_a_container_has_another_host_name_and_the_same_boot(dead: DeadRun, start: Start) -> None:
    marked = start("marked", OPD_RUN_ID=dead.run_id)
    dead.write_ledger()
    dead.enter(host="the-name-of-a-container")
    (reaped,) = reap(dead.registry)
    assert reaped.settled
    assert not is_running(marked)


def test_trouble_with_one_run_keeps_no_other_from_its_turn(dead: DeadRun, start: Start) -> None:
    bad = replace(dead, run_id=f"{dead.run_id}-a", folder=dead.folder.with_name("bad"))
    bad.ledger.mkdir(parents=True)
    bad.enter()
    marked = start("marked", OPD_RUN_ID=bad.run_id)
    good = replace(dead, run_id=f"{dead.run_id}-b")
    good.write_ledger()
    good.enter()
    first, second = reap(dead.registry, again=False)
    assert first.receipt is not None
    assert (first.settled, first.receipt.clean) == (False, False)
    assert "ledger.jsonl" in first.said
    assert not is_running(marked)
    assert second.settled
    assert [run.run_id for run in dead.registry.runs()] == [bad.run_id]


def test_a_record_without_its_facts_leaves_the_markers_to_find_the_processes(
    dead: DeadRun, start: Start
) -> None:
    marked = start("marked", OPD_RUN_ID=dead.run_id)
    dead.write_ledger()
    with dead.ledger.open("a") as ledger:
        ledger.write('{"event": "child_started", "at": 1.0, "name": "teacher"}\n')
    dead.enter()
    (reaped,) = reap(dead.registry)
    assert not is_running(marked)
    assert reaped.receipt is not None
    assert (reaped.settled, reaped.receipt.clean) == (True, False)
    assert "the ledger could not be read" in reaped.said


def test_a_torn_line_is_cut_off_and_nothing_is_written_after_it(dead: DeadRun) -> None:
    dead.write_ledger()
    with dead.ledger.open("a") as ledger:
        ledger.write('{"event": "child_star')
    dead.enter()
    (reaped,) = reap(dead.registry)
    assert reaped.settled
    assert dead.events() == ["run_started", "receipt", "settled"]


def test_a_receipt_that_the_full_disk_refused_is_written_again(dead: DeadRun) -> None:
    dead.write_ledger()
    dead.enter()
    reap(dead.registry, settle=False)
    proof = dead.folder / "receipt.json"
    content = proof.read_text()
    proof.unlink()
    (reaped,) = reap(dead.registry)
    assert (reaped.settled, reaped.receipt) == (True, None)
    assert proof.read_text() == content


def test_a_run_that_was_taken_up_again_meanwhile_is_left_alone(
    dead: DeadRun, tmp_path: Path, wait_until: WaitUntil
) -> None:
    gate, first = tmp_path / "gate", replace(dead, run_id="a-first", folder=tmp_path / "first")
    os.mkfifo(gate)
    first.write_ledger()
    first.enter(
        settle=("/bin/sh", "-c", 'touch "$0"; read line < "$1"', str(dead.record), str(gate))
    )
    dead.write_ledger()
    dead.enter()
    done: list[Any] = []
    reaping = threading.Thread(target=lambda: done.extend(reap(dead.registry)))
    reaping.start()
    wait_until(dead.record.exists, "the first run to be settled")
    me = identify(os.getpid())
    assert me is not None
    dead.registry.hand_over(dead.run_id, me)
    gate.write_text("go on\n")
    reaping.join()
    assert [each.settled for each in done] == [True, False]
    assert done[1].said == "somebody has taken it up"
    assert dead.events() == ["run_started"]


def test_only_a_dead_run_is_forgotten(dead: DeadRun, start: Start) -> None:
    assert forget(dead.registry, "nobody") == "no unsettled run 'nobody'; there is: none"
    dead.write_ledger()
    me = identify(os.getpid())
    assert me is not None
    dead.enter(owner=me)
    assert "lives" in forget(dead.registry, dead.run_id)
    dead.enter()
    marked = start("marked", OPD_RUN_ID=dead.run_id)
    assert "reap it first" in forget(dead.registry, dead.run_id)
    kill_exactly(marked)
    assert forget(dead.registry, dead.run_id) == ""
    assert dead.registry.runs() == ()


def test_a_port_in_foreign_hands_is_said_and_waited_for_by_nobody(dead: DeadRun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        dead.write_ledger(ProcessId(2**23, 1), ports=(port,))
        dead.enter(teardown_s=600.0)
        (reaped,) = reap(dead.registry)
    said = f"teardown of {dead.run_id} was not clean; left: port {port}"
    assert (reaped.settled, reaped.said) == (True, said)
    receipt = read_receipt(dead.folder)
    assert receipt is not None
    assert receipt.ports == (PortState(port, free=False),)
    assert not receipt.clean
    assert dead.record.read_text() == dead.settled_once
    assert dead.registry.runs() == ()


# --- settling, more than once


def test_a_run_that_could_not_be_settled_is_settled_by_the_next_reaper(dead: DeadRun) -> None:
    server = dead.folder / "server-is-up"
    script = '[ -e "$0" ] || { echo no server; exit 1; }; echo settled >> "$1"'
    settle = ("/bin/sh", "-c", script, str(server), str(dead.record))
    dead.write_ledger()
    dead.enter(settle=settle)
    (first,) = reap(dead.registry)
    assert (first.settled, first.said) == (False, "no server")
    assert first.receipt is not None
    assert first.receipt.clean
    assert dead.events()[-1] == "not_settled"
    proof = (dead.folder / "receipt.json").stat().st_mtime_ns
    assert reap(dead.registry, again=False) == ()
    assert dead.events().count("not_settled") == 1
    (second,) = reap(dead.registry)
    assert (second.settled, second.receipt, second.said) == (False, None, "no server")
    server.touch()
    (third,) = reap(dead.registry)
    assert (third.settled, third.receipt, third.said) == (True, None, "")
    assert dead.record.read_text() == "settled\n"
    assert (dead.folder / "receipt.json").stat().st_mtime_ns == proof
    assert dead.events().count("receipt") == 1
    assert dead.registry.runs() == ()


def test_a_run_can_be_ended_and_settled_later(dead: DeadRun, start: Start) -> None:
    marked = start("marked", OPD_RUN_ID=dead.run_id)
    dead.write_ledger()
    dead.enter()
    (ended,) = reap(dead.registry, settle=False)
    assert not ended.settled
    assert ended.said
    assert not is_running(marked)
    assert read_receipt(dead.folder) == ended.receipt
    assert not dead.record.exists()
    assert len(dead.registry.runs()) == 1
    (settled,) = reap(dead.registry)
    assert (settled.settled, settled.receipt) == (True, None)
    assert dead.record.read_text() == dead.settled_once
    assert dead.registry.runs() == ()


def test_a_run_without_a_settle_command_is_ended_and_struck_out(dead: DeadRun) -> None:
    dead.write_ledger()
    dead.enter(settle=())
    (reaped,) = reap(dead.registry)
    assert reaped.settled
    assert read_receipt(dead.folder) == reaped.receipt
    assert dead.registry.runs() == ()


def test_a_settled_run_that_was_not_struck_out_is_not_settled_again(dead: DeadRun) -> None:
    dead.write_ledger()
    run = dead.enter()
    reap(dead.registry)
    dead.registry.add(run)
    (reaped,) = reap(dead.registry)
    assert (reaped.settled, reaped.receipt) == (True, None)
    assert dead.record.read_text() == dead.settled_once
    assert dead.registry.runs() == ()


def test_reapers_at_the_same_time_settle_a_run_once(
    dead: DeadRun, start: Start, start_reaper: Callable[[], subprocess.Popen[str]]
) -> None:
    marked = start("marked", OPD_RUN_ID=dead.run_id)
    dead.write_ledger()
    dead.enter()
    reapers = [start_reaper() for _ in range(3)]
    for reaper in reapers:
        let_go(reaper)
    assert True in [settled for reaper in reapers for settled in outcome(reaper)]
    assert not is_running(marked)
    assert dead.record.read_text() == dead.settled_once
    assert dead.events().count("receipt") == dead.events().count("settled") == 1
    assert dead.registry.runs() == ()


def test_a_run_that_is_being_settled_is_left_to_its_reaper(
    tmp_path: Path,
    dead: DeadRun,
    start_reaper: Callable[[], subprocess.Popen[str]],
    wait_until: WaitUntil,
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = 'echo once >> "$0"; read line < "$1"'
    dead.write_ledger()
    dead.enter(settle=("/bin/sh", "-c", script, str(dead.record), str(gate)))
    reaper = start_reaper()
    let_go(reaper)
    wait_until(dead.record.exists, "the command to begin")
    try:
        assert [finding.state for finding in look(dead.registry)] == ["living"]
        assert reap(dead.registry) == ()
    finally:
        gate.write_text("go on\n")
    assert outcome(reaper) == [True]
    assert dead.record.read_text() == "once\n"
    assert dead.registry.runs() == ()


def test_a_stopped_supervisor_whose_owner_died_is_told_to_go_on(
    tmp_path: Path,
    start_owner: StartOwner,
    order: Order,
    announced: Announced,
    wait_until: WaitUntil,
) -> None:
    registry = Registry(tmp_path / "registry")
    owner, supervisor = start_owner(("/bin/true",), order("teacher"))
    teacher = announced("teacher")
    os.kill(supervisor.pid, signal.SIGSTOP)
    assert reap(registry) == ()
    assert is_running(teacher)  # its owner lives: nobody's business
    owner.kill()
    owner.wait()
    assert [finding.state for finding in look(registry)] == ["living"]
    assert is_running(teacher)
    assert reap(registry) == ()
    wait_until(lambda: registry.runs() == (), "the supervisor to end and settle its run")
    assert not is_running(teacher)
    receipt = read_receipt(tmp_path / "run")
    assert receipt is not None
    assert (receipt.cause, receipt.clean) == ("owner died", True)
