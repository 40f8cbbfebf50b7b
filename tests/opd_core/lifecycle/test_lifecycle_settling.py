"""After a run's end: its supervisor stays until everything is written, by the owner or the command.

Also what else the owner and its supervisor agree on: the deadline, and the owner's notes.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from opd_core.lifecycle.conversation import Conversation
from opd_core.lifecycle.errors import DevicesBusy, LifecycleError, SupervisorGone
from opd_core.lifecycle.handle import Supervisor
from opd_core.lifecycle.leases import DeviceLease
from opd_core.lifecycle.ledger import LedgerRecord, read_ledger
from opd_core.lifecycle.order import RunOrder
from opd_core.lifecycle.process import ProcessId, identify, is_running, kill_exactly
from opd_core.lifecycle.records import ChildSpec, Receipt, read_receipt
from opd_core.lifecycle.registry import Registry
from opd_core.lifecycle.settling import run_settle_command
from tests.opd_core.lifecycle.counted_settle import CountedSettle

Order = Callable[..., ChildSpec]
Announced = Callable[[str], ProcessId]
Talk = tuple[Conversation, subprocess.Popen[bytes]]
Start = Callable[..., tuple[Supervisor, ProcessId]]
Gone = Callable[[ProcessId], None]
WaitUntil = Callable[..., None]
StartOwner = Callable[..., tuple[subprocess.Popen[str], ProcessId]]


class Run(CountedSettle):
    """Where a test's run lies, and what is known of its settling."""

    def noted(self, event: str) -> list[dict[str, Any]]:
        return [record.facts for record in self.ledger() if record.event == event]

    def ledger(self) -> tuple[LedgerRecord, ...]:
        return read_ledger(self.folder / "ledger.jsonl")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(
        folder=tmp_path.resolve() / "run",
        registry=Registry(tmp_path / "registry"),
        record=tmp_path / "record",
    )


@pytest.fixture
def start(run: Run, run_id: str) -> Iterator[Start]:
    """Start a run of this process; return its handle and its supervisor."""
    started: list[Supervisor] = []

    def begin(**options: Any) -> tuple[Supervisor, ProcessId]:
        supervisor = Supervisor.start(
            run_dir=run.folder,
            run_id=run_id,
            **{"settle": run.settle, "registry": run.registry, **options},
        )
        started.append(supervisor)
        process = identify(supervisor.pid)
        assert process is not None
        return supervisor, process

    yield begin
    for supervisor in started:
        supervisor.end()
        supervisor.settled()


@pytest.fixture
def talk_of(run: Run, run_id: str, repository: Path) -> Iterator[Callable[..., Talk]]:
    """Start a supervisor with an order of these fields; return it with its owner's control line."""
    with ExitStack() as started:

        def begin(**fields: Any) -> Talk:
            return started.enter_context(talking(run, run_id, repository, fields))

        yield begin


@pytest.fixture
def talk(talk_of: Callable[..., Talk]) -> Talk:
    """A supervisor of a run of this process, and the owner's end of its control line."""
    return talk_of()


@contextmanager
def talking(run: Run, run_id: str, repository: Path, fields: dict[str, Any]) -> Iterator[Talk]:
    me = identify(os.getpid())
    assert me is not None
    run.folder.mkdir()
    code = (
        "import sys; from opd_core.lifecycle.supervisor import main; sys.exit(main(sys.argv[1:]))"
    )
    ours, theirs = socket.socketpair()
    with theirs, (run.folder / "supervisor.log").open("wb") as log:
        what = RunOrder(
            run_id=run_id,
            run_dir=run.folder,
            teardown_s=60.0,
            owner=me,
            control_fd=theirs.fileno(),
            settle=run.settle,
        )
        supervisor = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps({**what.to_wire(), **fields})],
            env={**os.environ, "OPD_RUN_ID": "an-outer-run", "PYTHONPATH": str(repository)},
            stderr=log,
            pass_fds=[what.control_fd],
        )
    conversation = Conversation(ours)
    assert conversation.await_ready(60.0)
    yield conversation, supervisor
    conversation.close()
    supervisor.kill()
    supervisor.wait()


def await_receipt(conversation: Conversation) -> Receipt:
    while conversation.receipt is None:
        conversation.listen(60.0)
    return conversation.receipt


def tell(owner: subprocess.Popen[str], what: str) -> None:
    assert owner.stdin is not None
    print(what, file=owner.stdin, flush=True)


def await_answer(owner: subprocess.Popen[str]) -> None:
    assert owner.stdout is not None
    assert owner.stdout.readline() == "done\n"


# --- the owner says that everything is written


def test_the_supervisor_stays_until_the_owner_has_settled_the_run(
    run: Run, start: Start, order: Order, announced: Announced
) -> None:
    supervisor, process = start()
    with supervisor:
        supervisor.spawn(order("teacher"))
        teacher = announced("teacher")
    assert supervisor.receipt is not None
    assert supervisor.receipt.clean
    assert not is_running(teacher)
    assert is_running(process)
    assert len(run.registry.runs()) == 1
    supervisor.settled()
    assert not is_running(process)
    assert run.noted("settled") == [{"by": "owner"}]
    assert run.registry.runs() == ()
    assert not run.record.exists(), "the command is for a dead owner"
    supervisor.settled()
    assert run.noted("settled") == [{"by": "owner"}], "once is enough"


@pytest.mark.parametrize("clean", [True, False])
def test_its_exit_status_is_still_that_of_the_receipt(
    clean: bool, tmp_path: Path, run: Run, talk: Talk, order: Order
) -> None:
    # A link that stands for a scratch folder is not removed, and makes the receipt unclean.
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    spec = order("teacher", scratch=() if clean else (tmp_path / "link",))
    conversation, supervisor = talk
    conversation.ask({"op": "start", "child": spec.to_wire()}, 60.0)
    conversation.say_end("completed")
    conversation.say_settled()
    assert supervisor.wait(60) == (0 if clean else 1)
    assert run.noted("settled") == [{"by": "owner"}]


def test_an_owner_that_closes_the_line_without_that_word_has_not_settled(
    run: Run, talk: Talk
) -> None:
    conversation, supervisor = talk
    conversation.say_end("completed")
    conversation.say_end("once more")
    conversation.close()
    assert supervisor.wait(60) == 0
    assert run.noted("settled") == [{"by": "command"}]
    assert run.record.read_text() == run.settled_once


def test_settled_before_the_end_settles_nothing(run: Run, start: Start) -> None:
    supervisor, process = start()
    supervisor.settled()
    supervisor.raise_if_dead()
    supervisor.end()
    assert is_running(process)
    assert run.noted("settled") == []
    supervisor.settled()
    assert run.noted("settled") == [{"by": "owner"}]


def test_without_a_settle_command_the_supervisor_goes_after_the_receipt(
    run_id: str, run: Run
) -> None:
    supervisor = Supervisor.start(run_dir=run.folder, run_id=run_id)
    process = identify(supervisor.pid)
    assert process is not None
    supervisor.end()
    assert not is_running(process)
    supervisor.settled()
    assert run.noted("settled") == run.noted("not_settled") == []


def test_a_run_whose_supervisor_died_after_the_receipt_can_still_be_settled(
    run: Run, start: Start, gone: Gone
) -> None:
    supervisor, process = start()
    receipt = supervisor.end()
    os.kill(supervisor.pid, signal.SIGKILL)
    gone(process)
    assert supervisor.end() is receipt
    assert len(run.registry.runs()) == 1
    supervisor.settled()
    assert run.registry.runs() == ()
    assert not run.record.exists()


def test_a_run_whose_supervisor_died_before_the_end_can_still_be_settled(
    run: Run, start: Start, gone: Gone
) -> None:
    supervisor, process = start()
    os.kill(supervisor.pid, signal.SIGKILL)
    gone(process)
    assert supervisor.end().cause == "supervisor died"
    assert len(run.registry.runs()) == 1
    supervisor.settled()
    assert run.registry.runs() == ()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_does_not_send_it_away_while_the_owner_still_writes(
    sent: signal.Signals, run: Run, start: Start, wait_until: WaitUntil
) -> None:
    def turns() -> int:
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    supervisor, process = start()
    receipt = supervisor.end()
    before = turns()
    os.kill(supervisor.pid, sent)
    wait_until(lambda: not is_running(process) or turns() > before, "it to notice the signal")
    supervisor.settled()
    assert not is_running(process)
    assert run.noted("settled") == [{"by": "owner"}], "it had not gone before"
    assert not run.record.exists()
    assert read_receipt(run.folder) == receipt
    assert len(run.noted("receipt")) == 1


# --- how it ends


def test_the_owners_word_for_the_end_breaks_off_the_stop_of_one_child(
    tmp_path: Path, talk: Talk, order: Order, announced: Announced, wait_until: WaitUntil
) -> None:
    conversation, _ = talk
    signals = tmp_path / "signals"
    spec = order("slow", {"signals": str(signals), "stays": True}, grace_s=600.0)
    conversation.ask({"op": "start", "child": spec.to_wire()}, 60.0)
    child = announced("slow")
    with pytest.raises(SupervisorGone, match="within 0 s"):
        conversation.ask({"op": "stop", "name": "slow"}, 0.0)
    wait_until(signals.exists, "the child to be asked to stop")
    conversation.say_end("Ctrl-C")
    while not conversation.is_over:
        conversation.listen(60.0)
    assert is_running(child), "the stop was not waited for"
    kill_exactly(child)
    assert await_receipt(conversation).cause == "Ctrl-C"
    assert signals.read_text() == "slow SIGTERM\n"


def test_a_teardown_that_fails_leaves_no_process_and_a_receipt_that_says_so(
    tmp_path: Path,
    run: Run,
    talk_of: Callable[..., Talk],
    order: Order,
    announced: Announced,
) -> None:
    conversation, supervisor = talk_of(teardown_s="no number")
    spec = order("teacher", {"daemon": {"announce": str(tmp_path / "daemon"), "deaf": True}})
    conversation.ask({"op": "start", "child": spec.to_wire()}, 60.0)
    processes = [announced("teacher"), announced("daemon")]
    conversation.say_end("completed")
    receipt = await_receipt(conversation)
    assert (receipt.cause, receipt.clean, receipt.survivors) == ("completed", False, ())
    assert [end.name for end in receipt.children] == ["teacher"]
    assert read_receipt(run.folder) == receipt
    assert not any(is_running(process) for process in processes)
    conversation.say_settled()
    assert supervisor.wait(60) == 1
    assert "TypeError" in (run.folder / "supervisor.log").read_text()


# --- its devices


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A driver of GPU-a; 9000 MiB are used on it while the process exists whose pid is in this
    file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    user = tmp_path / "user"
    program = folder / "nvidia-smi"
    program.write_text(
        f"""#!/bin/sh
exec 2>/dev/null
read pid < {user} && read stat < /proc/$pid/stat || stat=") Z"
case "$stat" in *") Z"*) mib=4 ;; *) mib=9000 ;; esac
echo 0, GPU-a, $mib
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return user


def take_gpu(tmp_path: Path) -> DeviceLease:
    return DeviceLease.take(["GPU-a"], owner={}, wait_s=0.0, folder=tmp_path / "leases")


@pytest.mark.parametrize("is_free", [True, False])
def test_a_supervisor_that_stays_keeps_a_device_that_is_still_in_use(
    is_free: bool, tmp_path: Path, driver: Path, start: Start
) -> None:
    with take_gpu(tmp_path) as lease:
        supervisor, _ = start(lease=lease, teardown_s=2.0)
    if not is_free:
        driver.write_text(f"{os.getpid()}\n")
    receipt = supervisor.end()
    assert [device.released for device in receipt.devices] == [is_free]
    if not is_free:
        with pytest.raises(DevicesBusy):
            take_gpu(tmp_path)
        supervisor.settled()
    take_gpu(tmp_path).release()


def test_the_lock_of_a_living_run_does_not_grow_old(
    tmp_path: Path, start: Start, wait_until: WaitUntil
) -> None:
    with take_gpu(tmp_path) as lease:
        lock = tmp_path / "leases" / "GPU-a.lock"
        os.utime(lock, (1.0, 1.0))
        start(lease=lease)
        wait_until(lambda: lock.stat().st_mtime > 1.0, "the lock to be touched")


def test_the_memory_before_a_run_is_what_is_used_after_its_past_has_ended(
    tmp_path: Path,
    driver: Path,
    run: Run,
    start: Start,
    start_owner: StartOwner,
    order: Order,
    announced: Announced,
    gone: Gone,
) -> None:
    daemon = {"announce": str(tmp_path / "daemon"), "deaf": True}
    owner, former = start_owner(run.settle, order("teacher", {"daemon": daemon}))
    stray, teacher = announced("daemon"), announced("teacher")
    kill_exactly(former)
    owner.kill()
    gone(teacher)
    driver.write_text(f"{stray.pid}\n")
    assert is_running(stray)
    with take_gpu(tmp_path) as lease:
        start(lease=lease)
    assert not is_running(stray)
    assert run.noted("run_started")[-1]["used_mib"] == {"GPU-a": 4}


# --- the owner hangs


def test_a_hung_owner_is_not_waited_for_for_ever_after_the_deadline(
    run: Run, talk_of: Callable[..., Talk]
) -> None:
    _, supervisor = talk_of(deadline_s=0.1, patience_s=0.1)
    assert supervisor.wait(60) == 0
    assert run.noted("settled") == [{"by": "command"}]
    assert run.record.read_text() == run.settled_once


def test_a_second_signal_ends_the_waiting_for_a_hung_owner(
    run: Run, talk_of: Callable[..., Talk]
) -> None:
    conversation, supervisor = talk_of(patience_s=600.0)
    supervisor.terminate()
    assert await_receipt(conversation).cause == "signal SIGTERM"
    assert supervisor.poll() is None
    supervisor.terminate()
    assert supervisor.wait(60) == 0
    assert run.noted("settled") == [{"by": "command"}]


def test_an_owner_that_notices_the_end_is_waited_for(
    run: Run, talk_of: Callable[..., Talk], order: Order, announced: Announced
) -> None:
    conversation, supervisor = talk_of(patience_s=0.0)
    spec = order("slow", {"deaf": True})
    conversation.ask({"op": "start", "child": spec.to_wire()}, 60.0)
    child = announced("slow")
    supervisor.terminate()
    while not conversation.is_over:
        conversation.listen(60.0)
    conversation.say_end("noticed")
    kill_exactly(child)
    assert await_receipt(conversation).cause == "signal SIGTERM"
    conversation.say_settled()
    assert supervisor.wait(60) == 0
    assert run.noted("settled") == [{"by": "owner"}]


# --- the owner is gone


@pytest.mark.parametrize("when", ["before the end", "after the end", "during the teardown"])
def test_a_killed_owners_run_is_settled_once_by_the_command(
    when: str,
    tmp_path: Path,
    run: Run,
    start_owner: StartOwner,
    order: Order,
    announced: Announced,
    gone: Gone,
    wait_until: WaitUntil,
) -> None:
    signals = tmp_path / "signals"
    slow = {"signals": str(signals), "stays": True}
    owner, supervisor = start_owner(run.settle, order("slow", slow, grace_s=0.5))
    child = announced("slow")
    if when != "before the end":
        tell(owner, "end")
    if when == "after the end":
        await_answer(owner)
        assert is_running(supervisor)
        assert not run.record.exists()
    if when == "during the teardown":
        wait_until(signals.exists, "the child to be asked to stop")
    owner.kill()
    gone(supervisor)
    assert run.record.read_text() == run.settled_once
    assert run.noted("settled") == [{"by": "command"}]
    assert run.registry.runs() == ()
    assert not is_running(child)
    receipt = read_receipt(run.folder)
    assert receipt is not None
    assert receipt.cause == ("owner died" if when == "before the end" else "completed")
    events = [record.event for record in run.ledger()]
    assert events[-2:] == ["receipt", "settled"]


def test_an_owner_that_leaves_without_settling_has_the_command_run(
    run: Run, start_owner: StartOwner, gone: Gone
) -> None:
    owner, supervisor = start_owner(run.settle)
    tell(owner, "end")
    await_answer(owner)
    owner.communicate(timeout=60)
    assert owner.returncode == 0
    gone(supervisor)
    assert run.record.read_text() == run.settled_once
    assert run.noted("settled") == [{"by": "command"}]
    assert run.registry.runs() == ()


def test_an_owner_that_settles_and_leaves_at_once_has_settled(
    run: Run, start_owner: StartOwner, gone: Gone
) -> None:
    owner, supervisor = start_owner(run.settle)
    owner.communicate("end\nsettled\n", timeout=60)
    assert owner.returncode == 0
    gone(supervisor)
    assert run.noted("settled") == [{"by": "owner"}]
    assert not run.record.exists()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("/bin/sh", "-c", "echo no tracking server; exit 3"), "no tracking server"),
        (("/bin/sh", "-c", "exit 3"), "it ended with status 3"),
        (("/no/such/command",), r"/no/such/command could not be started"),
    ],
    ids=["fails", "fails silently", "is missing"],
)
def test_a_command_that_does_not_settle_leaves_the_run_to_the_reaper(
    command: tuple[str, ...], reason: str, run: Run, start_owner: StartOwner, gone: Gone
) -> None:
    owner, supervisor = start_owner(command)
    owner.kill()
    gone(supervisor)
    assert run.noted("settled") == []
    (facts,) = run.noted("not_settled")
    assert reason in facts["reason"]
    (entry,) = run.registry.runs()
    assert (entry.run_dir, entry.settle) == (run.folder, command)
    receipt = read_receipt(run.folder)
    assert receipt is not None
    assert receipt.clean


def test_what_the_command_has_left_behind_is_swept(
    tmp_path: Path,
    run: Run,
    start_owner: StartOwner,
    order: Order,
    announced: Announced,
    gone: Gone,
) -> None:
    daemon = {"announce": str(tmp_path / "daemon"), "deaf": True}
    command = order("settle", {"daemon": daemon, "code": 0}).argv
    # The command ends only when its daemon has announced itself.
    script = '"$@"; until [ -e "$0" ]; do sleep 0.01; done'
    owner, supervisor = start_owner(("/bin/sh", "-c", script, str(tmp_path / "daemon"), *command))
    owner.kill()
    left = announced("daemon")
    gone(left)
    gone(supervisor)
    assert run.noted("settled") == [{"by": "command"}]


def test_a_folder_removed_after_the_end_does_not_come_back(
    run: Run, start_owner: StartOwner, gone: Gone
) -> None:
    owner, supervisor = start_owner(run.settle)
    tell(owner, "end")
    await_answer(owner)
    shutil.rmtree(run.folder)
    owner.kill()
    gone(supervisor)
    assert not run.folder.exists()
    assert not run.record.exists()
    assert len(run.registry.runs()) == 1, "the reaper sees that there is nothing to write"


# --- the command itself


def test_a_command_that_takes_too_long_is_killed_with_its_session(
    tmp_path: Path, order: Order, gone: Gone
) -> None:
    helper = {"announce": str(tmp_path / "helper"), "deaf": True}
    command = order("settle", {"deaf": True, "helper": helper}).argv
    reason = run_settle_command(command, tmp_path, limit_s=3.0)
    assert reason == f"it took more than 3 s; read {tmp_path / 'logs' / 'settle.log'}"
    for name in ("settle", "helper"):
        process = identify(int((tmp_path / name).read_text()))
        if process is not None:
            try:
                gone(process)
            finally:
                kill_exactly(process)


class Interrupt(BaseException):
    """What Ctrl-C and the end of a Prefect flow are."""


@pytest.mark.parametrize("how", ["done", "too late", "interrupted"])
def test_whatever_the_command_has_started_ends_with_it(
    how: str, tmp_path: Path, order: Order, wait_until: WaitUntil
) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupt

    def interrupt_when_it_runs() -> None:
        wait_until((tmp_path / "daemon").exists, "the daemon to start")
        os.kill(os.getpid(), signal.SIGUSR1)

    daemon = {"announce": str(tmp_path / "daemon"), "deaf": True}
    command = order("settle", {"daemon": daemon, "code": 0}).argv
    end = "exit 0" if how == "done" else "exec sleep 600"
    script = f'"$@"; until [ -e "$0" ]; do sleep 0.01; done; {end}'
    command = ("/bin/sh", "-c", script, str(tmp_path / "daemon"), *command)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        if how == "interrupted":
            thread = threading.Thread(target=interrupt_when_it_runs)
            thread.start()
            with pytest.raises(Interrupt):
                run_settle_command(command, tmp_path)
            thread.join()
        else:
            said = run_settle_command(command, tmp_path, 5.0)
            assert ("more than 5 s" in said) is (how == "too late")
        left = identify(int((tmp_path / "daemon").read_text()))
        if left is not None:
            assert not is_running(left) or not kill_exactly(left), "it was left running"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_no_code_of_this_process_runs_between_fork_and_exec(
    tmp_path: Path, repository: Path
) -> None:
    # Another thread may have held any lock at the fork.
    code = (
        "import os, sys; from pathlib import Path; "
        "from opd_core.lifecycle.settling import run_settle_command; "
        "os.register_at_fork(after_in_child=lambda: os._exit(9)); "
        "sys.exit(run_settle_command(('true',), Path(sys.argv[1])) or 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, env=environment, timeout=60).returncode == 0


def test_the_reason_is_what_the_latest_try_said(tmp_path: Path) -> None:
    command = ("/bin/sh", "-c", '[ -z "$1" ] || echo "$1" >&2; exit $2', "settle")
    log = tmp_path / "logs" / "settle.log"
    assert run_settle_command((*command, "no server", "1"), tmp_path) == "no server"
    assert log.read_text() == "no server\n"
    assert run_settle_command((*command, "", "4"), tmp_path) == "it ended with status 4"
    assert run_settle_command((*command, "with words", "0"), tmp_path) == ""
    assert log.read_text() == "with words\n"


# --- the deadline


@pytest.mark.parametrize("with_command", [True, False])
def test_a_run_ends_at_its_deadline(
    with_command: bool,
    run: Run,
    start: Start,
    order: Order,
    announced: Announced,
    gone: Gone,
    wait_until: WaitUntil,
) -> None:
    without: dict[str, Any] = {} if with_command else {"settle": (), "registry": None}
    supervisor, process = start(deadline_s=2.5, **without)
    supervisor.spawn(order("teacher"))
    teacher = announced("teacher")
    supervisor.raise_if_dead()
    gone(teacher)
    wait_until((run.folder / "receipt.json").exists, "the receipt to be written")
    with pytest.raises(SupervisorGone, match="deadline"):
        supervisor.raise_if_dead("teacher")
    with pytest.raises(SupervisorGone, match="deadline"):
        supervisor.spawn(order("late"))
    receipt = supervisor.end("completed")
    assert (receipt.cause, receipt.clean) == ("deadline", True)
    assert [end.how for end in receipt.children] == ["SIGTERM"]
    assert read_receipt(run.folder) == receipt
    assert is_running(process) is with_command
    supervisor.settled()
    assert not run.record.exists()


# --- the owner's notes


def test_a_note_stands_in_the_ledger_at_once_and_none_after_the_end(run: Run, start: Start) -> None:
    supervisor, _ = start(settle=(), registry=None)
    supervisor.note("ray_job", address="http://127.0.0.1:8265", job_id="job-1", token=False)
    assert run.noted("ray_job") == [
        {"address": "http://127.0.0.1:8265", "job_id": "job-1", "token": False}
    ]
    with pytest.raises(LifecycleError, match="a name of the owner's own, got 'receipt'"):
        supervisor.note("receipt", clean=True)
    supervisor.end()
    with pytest.raises(SupervisorGone, match="completed"):
        supervisor.note("too_late")
    assert run.noted("too_late") == []


def test_a_note_that_could_not_be_written_is_an_error(run: Run, start: Start) -> None:
    supervisor, _ = start(settle=(), registry=None)
    ledger = run.folder / "ledger.jsonl"
    most = resource.prlimit(supervisor.pid, resource.RLIMIT_FSIZE)
    # To the supervisor that is a full disk.
    resource.prlimit(supervisor.pid, resource.RLIMIT_FSIZE, (ledger.stat().st_size, most[1]))
    with pytest.raises(LifecycleError, match=r"'ray_job' was not written: .*ledger.jsonl"):
        supervisor.note("ray_job", job_id="job-1")
    resource.prlimit(supervisor.pid, resource.RLIMIT_FSIZE, most)
    assert run.noted("ray_job") == []


def test_a_registry_without_a_settle_command_is_refused(start: Start) -> None:
    with pytest.raises(LifecycleError, match="expected a settle command with a registry"):
        start(settle=())


def test_an_owner_that_goes_on_with_the_run_lets_the_supervisor_go_and_keeps_the_entry(
    run: Run, start: Start, gone: Gone
) -> None:
    supervisor, process = start()
    supervisor.end()
    supervisor.settled(complete=False)
    gone(process)
    assert not run.record.exists()
    assert [each.run_dir for each in run.registry.runs()] == [run.folder]


def test_a_copied_folder_does_not_begin_while_its_original_lives(
    run: Run, start: Start, tmp_path: Path
) -> None:
    supervisor, _ = start()
    with pytest.raises(LifecycleError, match=f"is alive in {run.folder}; end it"):
        Supervisor.start(
            run_dir=tmp_path / "copy",
            run_id=supervisor.run_id,
            settle=run.settle,
            registry=run.registry,
        )
    assert not (tmp_path / "copy").exists()


def test_the_entry_of_a_run_that_somebody_began_anew_is_not_struck_out(
    run: Run, start: Start
) -> None:
    supervisor, process = start()
    supervisor.end()
    kill_exactly(process)
    other = ProcessId(2**22 - 1, 1)
    run.registry.hand_over(supervisor.run_id, other)
    supervisor.settled()
    assert [each.owner for each in run.registry.runs()] == [other]
