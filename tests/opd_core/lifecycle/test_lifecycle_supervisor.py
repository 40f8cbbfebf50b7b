"""A run from its owner's side, with real supervisors and real children."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from opd_core.lifecycle.conversation import Conversation
from opd_core.lifecycle.errors import (
    ChildDied,
    ChildNotStarted,
    LedgerBusy,
    LedgerDamaged,
    LifecycleError,
    SupervisorGone,
    SupervisorNotStarted,
    UnknownChild,
)
from opd_core.lifecycle.handle import Supervisor
from opd_core.lifecycle.launch import launch
from opd_core.lifecycle.ledger import read_ledger
from opd_core.lifecycle.order import RunOrder
from opd_core.lifecycle.ports import reserve_ports
from opd_core.lifecycle.process import (
    ProcessId,
    identify,
    is_running,
    open_pidfd,
    wait_pidfd,
)
from opd_core.lifecycle.records import (
    ChildSpec,
    PortState,
    Receipt,
    ScratchState,
    read_receipt,
)

Order = Callable[..., ChildSpec]
Announced = Callable[[str], ProcessId]
Gone = Callable[[ProcessId], None]
WaitUntil = Callable[..., None]


def test_a_normal_end_stops_the_children_and_proves_it(
    tmp_path: Path, run_id: str, order: Order, announced: Announced
) -> None:
    with reserve_ports(1) as reservation:
        (port,) = reservation.ports
    scratch = tmp_path / "scratch"
    (scratch / "deep").mkdir(parents=True)
    with Supervisor.start(run_dir=tmp_path, run_id=run_id) as supervisor:
        spec = order("teacher", {"port": port}, ports=(port,), scratch=(scratch,))
        child = supervisor.spawn(spec)
        teacher = announced("teacher")
        assert child.pid == teacher.pid
        assert supervisor.child_exit("teacher") is None
        supervisor.raise_if_dead()
    receipt = supervisor.receipt
    assert receipt is not None
    assert (receipt.run_id, receipt.cause, receipt.clean) == (run_id, "completed", True)
    assert [(end.name, end.how, end.returncode) for end in receipt.children] == [
        ("teacher", "SIGTERM", -signal.SIGTERM)
    ]
    assert receipt.survivors == ()
    assert receipt.ports == (PortState(port, free=True),)
    assert receipt.scratch == (ScratchState(str(scratch), removed=True),)
    assert not scratch.exists()
    assert not is_running(teacher)
    assert read_receipt(tmp_path) == receipt


def test_the_ledger_tells_the_run_in_order(
    tmp_path: Path, run_id: str, order: Order, announced: Announced
) -> None:
    with Supervisor.start(run_dir=tmp_path, run_id=run_id) as supervisor:
        child = supervisor.spawn(order("teacher", ports=(30123,)))
        announced("teacher")
    records = read_ledger(tmp_path / "ledger.jsonl")
    assert [record.event for record in records] == [
        "run_started",
        "child_starting",
        "child_started",
        "teardown_begun",
        "child_ended",
        "receipt",
    ]
    run, starting, started, _, ended, receipt = (record.facts for record in records)
    assert (run["run_id"], run["owner_pid"]) == (run_id, os.getpid())
    assert (starting["name"], starting["kind"], starting["ports"]) == ("teacher", "stub", [30123])
    assert started["pid"] == started["pgid"] == child.pid
    assert started["boot_id"] == run["boot_id"]
    assert ended["start_ticks"] == started["start_ticks"]
    assert Receipt.from_json(receipt) == supervisor.receipt


def test_an_exception_in_the_body_is_the_cause_and_end_can_be_called_again(
    tmp_path: Path, run_id: str, order: Order
) -> None:
    def train(supervisor: Supervisor) -> None:
        with supervisor:
            supervisor.spawn(order("teacher"))
            raise ZeroDivisionError

    supervisor = Supervisor.start(run_dir=tmp_path, run_id=run_id)
    with pytest.raises(ZeroDivisionError):
        train(supervisor)
    first = supervisor.receipt
    assert first is not None
    assert first.cause == "ZeroDivisionError"
    assert supervisor.end("again") is first
    with pytest.raises(SupervisorGone, match="ZeroDivisionError"):
        supervisor.spawn(order("late"))
    with pytest.raises(SupervisorGone):
        supervisor.raise_if_dead()


def test_a_childs_death_is_reported_with_its_code_and_last_words(
    tmp_path: Path, run_id: str, order: Order, wait_until: WaitUntil
) -> None:
    with Supervisor.start(run_dir=tmp_path, run_id=run_id) as supervisor:
        spec = order("teacher", {"say": "out of memory", "code": 7})
        child = supervisor.spawn(spec)
        wait_until(lambda: supervisor.child_exit("teacher") is not None, "the exit to be reported")
        with pytest.raises(ChildDied, match=r"'teacher'.*code 7(.|\n)*out of memory") as caught:
            supervisor.raise_if_dead("teacher")
        assert (caught.value.returncode, caught.value.log) == (7, str(spec.log))
        (event,) = supervisor.poll()
        assert (event.name, event.pid, event.returncode) == ("teacher", child.pid, 7)
        assert supervisor.poll() == ()
        (status,) = supervisor.status()
        assert (status.returncode, status.how) == (7, "exited")
    assert supervisor.receipt is not None
    assert [end.how for end in supervisor.receipt.children] == ["exited"]


def test_the_end_of_a_main_process_ends_its_process_group(
    tmp_path: Path, run_id: str, order: Order, announced: Announced, gone: Gone
) -> None:
    with Supervisor.start(run_dir=tmp_path, run_id=run_id) as supervisor:
        helper = {"announce": str(tmp_path / "engine"), "deaf": True}
        child = supervisor.spawn(order("teacher", {"helper": helper}))
        engine = announced("engine")
        os.kill(child.pid, signal.SIGKILL)
        gone(engine)


def test_a_program_that_cannot_be_started_is_named_and_the_run_goes_on(
    tmp_path: Path, run_id: str, order: Order, announced: Announced
) -> None:
    with Supervisor.start(run_dir=tmp_path, run_id=run_id) as supervisor:
        missing = str(tmp_path / "no-such-program")
        with pytest.raises(ChildNotStarted, match=r"'ghost'.*no-such-program.*No such file"):
            supervisor.spawn(order("ghost", argv=(missing,)))
        with pytest.raises(ChildNotStarted, match=r"no-such-folder"):
            supervisor.spawn(order("ghost", cwd=tmp_path / "no-such-folder"))
        with pytest.raises(UnknownChild, match="'ghost'"):
            supervisor.child_exit("ghost")
        supervisor.spawn(order("teacher"))
        announced("teacher")
        with pytest.raises(ChildNotStarted, match="running already"):
            supervisor.spawn(order("teacher"))
        with pytest.raises(ChildNotStarted, match="scratch folder"):
            supervisor.spawn(order("other", scratch=(tmp_path,)))
    assert supervisor.receipt is not None
    assert [end.name for end in supervisor.receipt.children] == ["teacher"]
    events = [record.event for record in read_ledger(tmp_path / "ledger.jsonl")]
    assert events.count("child_not_started") == 2


def test_one_child_can_be_stopped_with_its_strays_and_started_again(
    tmp_path: Path, run_id: str, order: Order, announced: Announced, gone: Gone
) -> None:
    def with_daemon(name: str) -> ChildSpec:
        daemon = {"announce": str(tmp_path / f"{name}-daemon"), "deaf": True}
        return order(name, {"daemon": daemon})

    with Supervisor.start(run_dir=tmp_path, run_id=run_id) as supervisor:
        first = supervisor.spawn(with_daemon("one"))
        supervisor.spawn(with_daemon("two"))
        stray, kept = announced("one-daemon"), announced("two-daemon")
        assert supervisor.stop("one") == -signal.SIGTERM
        assert not is_running(stray)
        assert is_running(kept)
        assert supervisor.stop("one") == -signal.SIGTERM
        with pytest.raises(UnknownChild, match="'three'"):
            supervisor.stop("three")
        second = supervisor.spawn(order("one"))
        assert second.pid != first.pid
        assert supervisor.child_exit("one") is None
        supervisor.raise_if_dead("one", "two")
    assert not is_running(kept)
    assert supervisor.receipt is not None
    assert [end.name for end in supervisor.receipt.children] == ["one", "two", "one"]


def test_children_are_stopped_in_their_order_each_with_its_signal(
    tmp_path: Path, run_id: str, order: Order, announced: Announced
) -> None:
    signals = tmp_path / "signals"
    with Supervisor.start(run_dir=tmp_path, run_id=run_id) as supervisor:
        for name, stop_order, stop_signal in (
            ("last", 9, "SIGTERM"),
            ("first", -1, "SIGINT"),
            ("middle", 5, "SIGINT"),
        ):
            options = {"signals": str(signals)}
            supervisor.spawn(order(name, options, stop_order=stop_order, stop_signal=stop_signal))
            announced(name)
    assert signals.read_text().splitlines() == ["first SIGINT", "middle SIGINT", "last SIGTERM"]
    assert supervisor.receipt is not None
    assert {end.name: (end.how, end.returncode) for end in supervisor.receipt.children} == {
        "last": ("SIGTERM", 0),
        "first": ("SIGINT", 0),
        "middle": ("SIGINT", 0),
    }


def test_a_deaf_child_is_killed_after_its_grace(
    tmp_path: Path, run_id: str, order: Order, announced: Announced
) -> None:
    with Supervisor.start(run_dir=tmp_path, run_id=run_id) as supervisor:
        supervisor.spawn(order("deaf", {"deaf": True}, grace_s=0.2))
        deaf = announced("deaf")
    assert supervisor.receipt is not None
    assert supervisor.receipt.clean
    assert [end.how for end in supervisor.receipt.children] == ["SIGKILL"]
    assert supervisor.receipt.seconds >= 0.2
    assert not is_running(deaf)


def test_one_deadline_bounds_the_end_of_many_deaf_children(
    tmp_path: Path, run_id: str, order: Order, announced: Announced
) -> None:
    with Supervisor.start(run_dir=tmp_path, run_id=run_id, teardown_s=2.0) as supervisor:
        for stop_order in range(3):
            name = f"deaf-{stop_order}"
            supervisor.spawn(order(name, {"deaf": True}, stop_order=stop_order, grace_s=600.0))
            announced(name)
    receipt = supervisor.receipt
    assert receipt is not None
    assert receipt.clean
    assert [end.how for end in receipt.children] == ["SIGKILL"] * 3
    # Asking stops at 1.5 s; the rest of the time is for killing, and for a busy test machine.
    assert 1.4 <= receipt.seconds < 20.0


def test_sigterm_to_the_supervisor_ends_the_run_in_order(
    tmp_path: Path, run_id: str, order: Order, announced: Announced
) -> None:
    with Supervisor.start(run_dir=tmp_path, run_id=run_id) as supervisor:
        supervisor.spawn(order("teacher"))
        teacher = announced("teacher")
        pidfd = open_pidfd(supervisor.pid)
        os.kill(supervisor.pid, signal.SIGTERM)
        assert wait_pidfd(pidfd, 60.0)
        os.close(pidfd)
        assert not is_running(teacher)
        with pytest.raises(SupervisorGone, match="signal SIGTERM"):
            supervisor.raise_if_dead("teacher")
        with pytest.raises(SupervisorGone, match="signal SIGTERM"):
            supervisor.spawn(order("late"))
    assert supervisor.receipt is not None
    assert (supervisor.receipt.cause, supervisor.receipt.clean) == ("signal SIGTERM", True)


def test_the_end_of_the_run_breaks_off_the_stop_of_one_child(
    tmp_path: Path, run_id: str, order: Order, announced: Announced, wait_until: WaitUntil
) -> None:
    def stop() -> None:
        try:
            supervisor.stop("deaf")
        except SupervisorGone as error:
            reasons.append(str(error))

    reasons: list[str] = []
    signals = tmp_path / "signals"
    with Supervisor.start(run_dir=tmp_path, run_id=run_id, teardown_s=3.0) as supervisor:
        supervisor.spawn(order("deaf", {"signals": str(signals), "stays": True}, grace_s=600.0))
        announced("deaf")
        thread = threading.Thread(target=stop)
        thread.start()
        wait_until(signals.exists, "the stop signal to arrive")
        os.kill(supervisor.pid, signal.SIGTERM)
        thread.join()
    assert len(reasons) == 1
    assert "signal SIGTERM" in reasons[0]
    assert supervisor.receipt is not None
    assert supervisor.receipt.clean
    assert supervisor.receipt.seconds > 2.0, "the end of the run took over the waiting"
    assert signals.read_text() == "deaf SIGTERM\n", "the stop signal is sent once"


def test_a_secret_reaches_the_child_and_no_file_or_command_line(
    tmp_path: Path, run_id: str, order: Order, announced: Announced
) -> None:
    secret, key = "hunter2-in-the-environment", "hunter2-in-the-arguments"
    run_dir, shown = tmp_path / "run", tmp_path / "shown"
    with Supervisor.start(run_dir=run_dir, run_id=run_id) as supervisor:
        spec = order("teacher", {"show": str(shown), "key": key}, env={"API_KEY": secret})
        assert secret not in repr(spec)
        supervisor.spawn(spec)
        announced("teacher")
        child_environment = json.loads(shown.read_text())
        command_line = Path(f"/proc/{supervisor.pid}/cmdline").read_bytes()
        with pytest.raises(ChildNotStarted) as caught:
            supervisor.spawn(order("bad", argv=("/no/such/program",), env={"API_KEY": secret}))
    assert child_environment["API_KEY"] == secret
    assert child_environment["OPD_RUN_ID"] == run_id
    assert child_environment["SPT_NOENV"] == "1"
    assert child_environment["PATH"] == os.environ["PATH"]
    written = [path.read_text() for path in run_dir.iterdir()]
    assert len(written) == 3, "ledger, receipt, supervisor's log"
    for text in [*written, command_line.decode(), str(caught.value)]:
        assert secret not in text
        assert key not in text


def test_other_runs_are_never_touched(
    tmp_path: Path, run_id: str, order: Order, announced: Announced
) -> None:
    others = []
    for name, other_run in (("longer", f"{run_id}-2"), ("prefix", run_id[:-1]), ("none", "")):
        spec = order(name)
        environment = {**os.environ, "OPD_RUN_ID": other_run, "NOTE": f"OPD_RUN_ID={run_id}"}
        others.append(subprocess.Popen(spec.argv, env=environment))
        announced(name)
    try:
        with Supervisor.start(run_dir=tmp_path, run_id=run_id) as supervisor:
            supervisor.spawn(order("teacher"))
        assert supervisor.receipt is not None
        assert supervisor.receipt.clean
        assert [other.poll() for other in others] == [None, None, None]
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_a_second_supervisor_of_a_live_run_is_refused(tmp_path: Path, run_id: str) -> None:
    with (
        Supervisor.start(run_dir=tmp_path, run_id=run_id) as supervisor,
        pytest.raises(LedgerBusy, match=f"pid {supervisor.pid}"),
    ):
        Supervisor.start(run_dir=tmp_path, run_id=run_id)
    with pytest.raises(LedgerDamaged, match="belongs to run"):
        Supervisor.start(run_dir=tmp_path, run_id="another-run")
    with Supervisor.start(run_dir=tmp_path, run_id=run_id) as continued:
        assert not (tmp_path / "receipt.json").exists(), "the earlier run's receipt"
    assert continued.receipt is not None
    assert continued.receipt.clean


def test_a_child_outlives_the_thread_that_ordered_it(
    tmp_path: Path, run_id: str, order: Order, announced: Announced
) -> None:
    with Supervisor.start(run_dir=tmp_path, run_id=run_id) as supervisor:
        thread = threading.Thread(target=lambda: supervisor.spawn(order("teacher")))
        thread.start()
        thread.join()
        teacher = announced("teacher")
        assert supervisor.stop("teacher") == -signal.SIGTERM, "it lived until it was stopped"
        assert not is_running(teacher)


def test_a_forked_copy_of_the_owner_ends_nothing(
    tmp_path: Path, run_id: str, order: Order, announced: Announced
) -> None:
    with Supervisor.start(run_dir=tmp_path, run_id=run_id) as supervisor:
        supervisor.spawn(order("teacher"))
        teacher = announced("teacher")
        copy = os.fork()
        if copy == 0:
            supervisor.__exit__(None, None, None)
            try:
                supervisor.end()
            except LifecycleError as error:
                os._exit(0 if "belongs to process" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 0
        supervisor.raise_if_dead("teacher")
        assert is_running(teacher)


def test_a_port_in_foreign_hands_makes_the_receipt_unclean(
    tmp_path: Path, run_id: str, order: Order, announced: Announced
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        with Supervisor.start(run_dir=tmp_path, run_id=run_id, teardown_s=0.5) as supervisor:
            supervisor.spawn(order("teacher", ports=(port,)))
            announced("teacher")
        assert supervisor.receipt is not None
        assert supervisor.receipt.ports == (PortState(port, free=False),)
        assert not supervisor.receipt.clean


def test_a_scratch_link_is_not_followed_and_makes_the_receipt_unclean(
    tmp_path: Path, run_id: str, order: Order, announced: Announced
) -> None:
    precious, link = tmp_path / "precious", tmp_path / "link"
    precious.mkdir()
    (precious / "data").touch()
    link.symlink_to(precious)
    with Supervisor.start(run_dir=tmp_path / "run", run_id=run_id) as supervisor:
        supervisor.spawn(order("teacher", scratch=(link,)))
        announced("teacher")
    assert (precious / "data").exists()
    assert supervisor.receipt is not None
    assert supervisor.receipt.scratch == (ScratchState(str(link), removed=False),)
    assert not supervisor.receipt.clean


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_lost_supervisor_leaves_nothing_and_the_receipt_says_so(
    how: str, tmp_path: Path, run_id: str, order: Order, announced: Announced
) -> None:
    cause = {"SIGKILL": "supervisor died", "SIGSTOP": "supervisor hung"}[how]
    supervisor = Supervisor.start(run_dir=tmp_path, run_id=run_id, teardown_s=1.0, margin_s=0.5)
    with supervisor:
        daemon = {"announce": str(tmp_path / "daemon"), "deaf": True}
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        supervisor.spawn(order("teacher", {"deaf": True, "daemon": daemon}, scratch=(scratch,)))
        processes = [announced("teacher"), announced("daemon")]
        os.kill(supervisor.pid, signal.Signals[how])
    receipt = supervisor.receipt
    assert receipt is not None
    assert (receipt.cause, receipt.clean) == (cause, True)
    assert [(end.name, end.how, end.returncode) for end in receipt.children] == [
        ("teacher", "SIGKILL", None)
    ]
    assert receipt.scratch == (ScratchState(str(scratch), removed=True),)
    assert not any(is_running(process) for process in processes)
    assert read_receipt(tmp_path) == receipt
    assert read_ledger(tmp_path / "ledger.jsonl")[-1].event == "receipt"


def test_a_lost_supervisor_with_a_damaged_ledger_leaves_nothing_but_doubt(
    tmp_path: Path, run_id: str, order: Order, announced: Announced
) -> None:
    with Supervisor.start(run_dir=tmp_path, run_id=run_id) as supervisor:
        daemon = {"announce": str(tmp_path / "daemon"), "deaf": True}
        supervisor.spawn(order("teacher", {"daemon": daemon}))
        stray = announced("daemon")
        os.kill(supervisor.pid, signal.SIGKILL)
        ledger = tmp_path / "ledger.jsonl"
        first, _, *others = ledger.read_bytes().splitlines(keepends=True)
        ledger.write_bytes(b"".join([first, b"rubbish\n", *others]))
    assert not is_running(stray)
    assert supervisor.receipt is not None
    assert not supervisor.receipt.clean


@pytest.mark.parametrize(
    ("last_words", "cause"), [("asked", "asked"), (None, "owner closed the control line")]
)
def test_a_closed_control_line_ends_the_run_after_what_was_said_on_it(
    last_words: str | None, cause: str, tmp_path: Path, run_id: str
) -> None:
    ours, theirs = socket.socketpair()
    me = identify(os.getpid())
    assert me is not None
    with theirs:
        order = RunOrder(
            run_id=run_id,
            run_dir=tmp_path,
            teardown_s=60.0,
            owner=me,
            control_fd=theirs.fileno(),
        )
        process = launch(order, sys.executable)
    conversation = Conversation(ours)
    assert conversation.await_ready(60.0)
    if last_words is not None:
        conversation.say_end(last_words)
    conversation.close()
    assert wait_pidfd(process.pidfd, 60.0)
    process.close()
    receipt = read_receipt(tmp_path)
    assert receipt is not None
    assert receipt.cause == cause


def test_the_owner_notices_that_its_supervisor_died(
    tmp_path: Path, run_id: str, order: Order, announced: Announced, wait_until: WaitUntil
) -> None:
    def is_noticed() -> bool:
        try:
            supervisor.raise_if_dead()
        except SupervisorGone as error:
            return "supervisor died" in str(error)
        return False

    with Supervisor.start(run_dir=tmp_path, run_id=run_id) as supervisor:
        supervisor.spawn(order("teacher"))
        announced("teacher")
        os.kill(supervisor.pid, signal.SIGKILL)
        wait_until(is_noticed, "the supervisor's death to be noticed")
        with pytest.raises(SupervisorGone):
            supervisor.status()


def test_arguments_with_which_no_run_can_be_watched_are_refused(
    tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LifecycleError, match="run id"):
        Supervisor.start(run_dir=tmp_path, run_id="a b")
    with pytest.raises(LifecycleError, match="teardown_s"):
        Supervisor.start(run_dir=tmp_path, run_id=run_id, teardown_s=0.0)
    with pytest.raises(SupervisorNotStarted, match="no-python"):
        Supervisor.start(run_dir=tmp_path, run_id=run_id, interpreter="/no-python")
    with pytest.raises(SupervisorNotStarted, match="ready"):
        Supervisor.start(run_dir=tmp_path, run_id=run_id, interpreter="/bin/false")
    monkeypatch.setenv("OPD_RUN_ID", run_id)
    with pytest.raises(LifecycleError, match="environment of this process"):
        Supervisor.start(run_dir=tmp_path, run_id=run_id)


def test_a_supervisor_is_ready_and_gone_within_seconds(tmp_path: Path, run_id: str) -> None:
    began = time.monotonic()
    with Supervisor.start(run_dir=tmp_path, run_id=run_id, interpreter=sys.executable):
        pass
    # About 0.2 s on an idle machine; the limit only catches an import of the trainer's packages.
    assert time.monotonic() - began < 10.0
