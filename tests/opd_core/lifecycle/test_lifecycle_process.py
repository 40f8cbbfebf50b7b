"""Process identities, the exact kill, the control line, logs and ports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opd_core.lifecycle.bond import bound
from opd_core.lifecycle.channel import Channel
from opd_core.lifecycle.children import Children
from opd_core.lifecycle.conversation import Conversation
from opd_core.lifecycle.errors import LifecycleError, SupervisorGone, UnknownChild
from opd_core.lifecycle.logs import log_tail
from opd_core.lifecycle.ports import port_is_free, reserve_ports
from opd_core.lifecycle.process import (
    ProcessId,
    boot_id,
    carries,
    descendants,
    executable_name,
    identify,
    is_running,
    kill_exactly,
    open_pidfd,
    process_table,
    read_stat,
    wait_pidfd,
    with_ancestors,
)
from opd_core.lifecycle.records import ChildSpec

WaitUntil = Callable[..., None]


@pytest.fixture
def sleeper() -> subprocess.Popen[bytes]:
    """A process whose name holds parentheses and spaces would break a naive stat parser."""
    code = "import signal; open('/proc/self/comm', 'w').write('a) Z 1 (b'); print(); signal.pause()"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-u", "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "OPD_RUN_ID": "process-test"},
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_process_is_told_apart_by_pid_and_start(sleeper: subprocess.Popen[bytes]) -> None:
    with sleeper:
        exact = identify(sleeper.pid)
        assert exact is not None
        impostor = ProcessId(exact.pid, exact.start_ticks - 1)
        assert is_running(exact)
        assert not is_running(impostor)
        assert carries(exact.pid, [b"OPD_RUN_ID=process-test"])
        assert not carries(exact.pid, [b"OPD_RUN_ID=process"])
        assert exact.pid in descendants(os.getpid(), process_table())
        assert identify(os.getpid()) in with_ancestors(exact.pid)
        assert executable_name(exact.pid) == Path(os.path.realpath(sys.executable)).name
        assert not kill_exactly(impostor)
        assert sleeper.poll() is None
        pidfd = open_pidfd(exact.pid)
        assert not wait_pidfd(pidfd, 0.0)
        assert kill_exactly(exact)
        assert wait_pidfd(pidfd, 60.0)
        os.close(pidfd)
        assert not is_running(exact), "a zombie counts as ended"
        assert sleeper.wait() == -signal.SIGKILL
        assert identify(exact.pid) is None
        assert not kill_exactly(exact)


def test_a_process_whose_main_thread_has_ended_runs_on_in_its_other_threads(
    wait_until: WaitUntil,
) -> None:
    code = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=[600]).start(); "
        "print(); ctypes.CDLL(None).pthread_exit(None)"
    )
    marked = {**os.environ, "OPD_RUN_ID": "process-test"}
    command = [sys.executable, "-I", "-S", "-u", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=marked) as process:
        assert process.stdout is not None
        process.stdout.readline()

        def state() -> str:
            stat = read_stat(process.pid)
            assert stat is not None
            return stat.state

        wait_until(lambda: state() == "Z", "the main thread to end")
        exact = identify(process.pid)
        assert exact is not None
        assert is_running(exact)
        assert carries(exact.pid, [b"OPD_RUN_ID=process-test"])
        assert not carries(exact.pid, [b"OPD_RUN_ID=another"])
        assert executable_name(exact.pid) == Path(os.path.realpath(sys.executable)).name
        pidfd = open_pidfd(exact.pid)
        assert not wait_pidfd(pidfd, 0.0)
        assert kill_exactly(exact)
        assert wait_pidfd(pidfd, 60.0)
        os.close(pidfd)
        assert not is_running(exact)
        assert not carries(exact.pid, [b"OPD_RUN_ID=process-test"])


def test_a_bound_command_ends_with_the_thread_that_started_it() -> None:
    def start() -> None:
        process = subprocess.Popen(
            bound(["/bin/sh", "-c", "echo $$; exec sleep 600"]), stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid, "it became the command"
        started.append(process)
        assert process.poll() is None

    started: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with started[0] as process:
        assert process.wait(60) == -signal.SIGKILL


def test_a_bound_command_finds_the_default_signals() -> None:
    # A shell that was started with SIGPIPE ignored cannot reset it.
    command = bound(["/bin/sh", "-c", "kill -PIPE $$; echo deaf"])
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGPIPE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_child_that_may_not_be_asked_to_stop_is_no_error(
    run_id: str, order: Callable[..., ChildSpec], announced: Callable[[str], ProcessId]
) -> None:
    if (copy := os.fork()) == 0:
        status = 1
        try:
            child = Children(run_id).start(order("teacher"))
            os.setuid(65534)
            child.ask_to_stop()
            status = 0 if child.living else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 0
    # Nor does the kernel let a parent that has become somebody else take it along.
    kill_exactly(announced("teacher"))


def test_the_boot_has_an_identity() -> None:
    assert len(boot_id()) == 36


def test_reserved_ports_differ_and_are_taken_until_released() -> None:
    with reserve_ports(5) as first, reserve_ports(5) as second:
        assert len({*first.ports, *second.ports}) == 10
        assert not any(port_is_free(port) for port in first.ports)
        first.release()
        assert all(port_is_free(port) for port in first.ports)
        assert not any(port_is_free(port) for port in second.ports)


def test_a_listened_port_is_not_free_and_a_closed_one_is_at_once() -> None:
    with reserve_ports(1) as reservation:
        (port,) = reservation.ports
    server = socket.create_server(("127.0.0.1", port))
    client = socket.create_connection(("127.0.0.1", port))
    connection, _ = server.accept()
    assert not port_is_free(port)
    # The server's side closes first, so that its port stays in TIME_WAIT.
    connection.close()
    server.close()
    client.close()
    assert port_is_free(port)


def test_more_ports_than_there_are_cannot_be_reserved() -> None:
    taken = [socket.socket() for _ in range(3)]
    try:
        for sock in taken:
            sock.bind(("127.0.0.1", 0))
        with pytest.raises(LifecycleError, match="expected 3 free loopback ports"):
            reserve_ports(3, among=[sock.getsockname()[1] for sock in taken])
    finally:
        for sock in taken:
            sock.close()


def test_a_message_larger_than_the_sockets_buffer_arrives_whole() -> None:
    left, right = (Channel(sock) for sock in socket.socketpair())
    message = {"text": "x" * 3_000_000}
    left.send(message)
    assert not left.flush(), "the other end has not read yet"

    def drain() -> None:
        while not left.flush():
            left.wait(1.0)

    thread = threading.Thread(target=drain)
    thread.start()
    received: list[dict[str, Any]] = []
    while not received:
        right.wait(60.0)
        received = right.receive()
    thread.join()
    assert received == [message]
    left.close()
    right.wait(60.0)
    assert right.receive() == []
    assert right.at_end
    right.send({"text": "to nobody"})
    right.close()


def test_a_torn_line_is_dropped_and_the_next_one_read() -> None:
    raw, end = socket.socketpair()
    channel = Channel(end)
    with raw:
        raw.sendall(b'{"id": 1, "op\n[]\n{"id": 2}\n{"id"')
        assert channel.receive() == [{"id": 2}]
        raw.sendall(b": 3}\n")
        assert channel.receive() == [{"id": 3}]
    channel.close()


def test_the_answer_to_a_request_that_was_broken_off_is_dropped() -> None:
    ours, theirs = socket.socketpair()
    conversation, supervisor = Conversation(ours), Channel(theirs)
    with pytest.raises(SupervisorGone, match=r"'status' within 0 s"):
        conversation.ask({"op": "status"}, 0.0)
    supervisor.send({"id": 2, "ok": {"children": "of the second"}})
    supervisor.send({"id": 1, "ok": {"children": "of the first"}})
    assert conversation.ask({"op": "status"}, 60.0) == {"children": "of the second"}
    supervisor.send({"id": 3, "error": {"kind": "UnknownChild", "reason": "no child 'x'"}})
    with pytest.raises(UnknownChild, match="no child 'x'"):
        conversation.ask({"op": "stop", "name": "x"}, 60.0)
    supervisor.close()
    with pytest.raises(SupervisorGone, match="supervisor died"):
        conversation.ask({"op": "status"}, 60.0)
    conversation.close()


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_tail(log) == ""
    log.write_bytes(b"\xff\n" + b"".join(b"line %d\n" % number for number in range(20_000)))
    assert log_tail(log, lines=2) == "line 19998\nline 19999"
    assert len(log_tail(log).splitlines()) == 40
