"""A kept teacher: what ends it, what does not, and how it comes back after its server has died."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from opd_core.errors import ConfigError, ServingError
from opd_core.lifecycle.leases import DeviceLease
from opd_core.lifecycle.process import identify
from opd_core.lifecycle.reaper import look
from opd_core.lifecycle.records import read_receipt
from opd_core.lifecycle.registry import Registry
from opd_core.serving.kept.record import KeptTeacher
from opd_core.serving.kept.users import use_kept, users_of
from tests.opd_core.serving.kept_standin import Keeping, an_order, said_to_serve, wait_until

IN_NO_TIME = 1e-7
"""Hours: over before its keeper's next look."""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptTeacher]:
    """A name in a state folder of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("OPD_LEASES", str(tmp_path / "leases"))
    return KeptTeacher.named("sums")


def pids(folder: Path) -> list[int]:
    """The server's processes, in the order of their starts."""
    file = folder / "starts"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def test_it_is_proven_before_it_is_called_up_and_leaves_nothing(
    kept: KeptTeacher, tmp_path: Path
) -> None:
    with Keeping(kept, an_order(tmp_path, locks=("cpu:0",))) as keeping:
        state = keeping.wait_ready()
        assert state.said.startswith("scores: 8 tokens")
        assert state.endpoints[0].startswith("http://127.0.0.1:")
        (found,) = look(Registry.of_user())
        assert (found.run.run_id, found.state) == (kept.run_id, "living")
    receipt = read_receipt(kept.folder)
    assert receipt is not None
    assert receipt.clean
    assert (receipt.cause, keeping.state.phase) == ("the test is over", "ended")
    (pid,) = pids(tmp_path)
    assert identify(pid) is None
    assert look(Registry.of_user()) == ()
    with DeviceLease.take(["cpu:0"], owner={}, wait_s=0.0):
        pass


def test_it_ends_when_nobody_has_used_it_for_its_time(kept: KeptTeacher, tmp_path: Path) -> None:
    with Keeping(kept, an_order(tmp_path)) as keeping:
        keeping.wait_ready()
        kept.renew(IN_NO_TIME)
        state = keeping.wait()
    assert (state.phase, state.said) == ("ended", "no run has used it for 1e-07 h")


def test_a_run_that_uses_it_puts_its_end_off(kept: KeptTeacher, tmp_path: Path) -> None:
    with Keeping(kept, an_order(tmp_path)) as keeping:
        endpoint = keeping.wait_ready().endpoints[0]
        use = use_kept([endpoint], "run-1", tmp_path)
        kept.renew(IN_NO_TIME)
        before = keeping.state.until
        wait_until(lambda: keeping.state.until < before, "its keeper to see the new time", 10.0)
        assert keeping.state.phase == "ready"
        use.release()
        assert keeping.wait().phase == "ended"


def test_a_server_that_died_comes_back_at_its_address(kept: KeptTeacher, tmp_path: Path) -> None:
    with Keeping(kept, an_order(tmp_path)) as keeping:
        endpoints = keeping.wait_ready().endpoints
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        wait_until(lambda: keeping.state.restarts, "the restart")
        state = keeping.wait_ready()
    assert (state.endpoints, state.restarts) == (endpoints, 1)
    assert "has died (return code -9), and is back" in state.said


def test_a_server_that_dies_again_and_again_is_given_up(kept: KeptTeacher, tmp_path: Path) -> None:
    with Keeping(kept, an_order(tmp_path, max_restarts=1)) as keeping:
        keeping.wait_ready()
        (tmp_path / "dies").touch()
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        state = keeping.wait()
    assert (state.phase, len(pids(tmp_path))) == ("failed", 2)
    assert "started again 1 times within an hour already" in state.said
    assert "no weights here" in state.said


def test_a_server_that_came_back_with_other_numbers_is_ended(
    kept: KeptTeacher, tmp_path: Path
) -> None:
    with Keeping(kept, an_order(tmp_path)) as keeping:
        keeping.wait_ready()
        (tmp_path / "differs").touch()
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        state = keeping.wait()
    assert state.phase == "failed"
    assert "is not what it was" in state.said


def test_a_server_that_does_not_start_is_told_with_the_end_of_its_log(
    kept: KeptTeacher, tmp_path: Path
) -> None:
    (tmp_path / "dies").touch()
    with Keeping(kept, an_order(tmp_path)) as keeping:
        state = keeping.wait()
    assert state.phase == "failed"
    assert "no weights here" in state.said


def test_a_device_that_a_run_has_is_told_with_its_holder(kept: KeptTeacher, tmp_path: Path) -> None:
    with (
        DeviceLease.take(["cpu:3"], owner={"run_id": "other-run"}, wait_s=0.0),
        Keeping(kept, an_order(tmp_path, locks=("cpu:3",))) as keeping,
    ):
        state = keeping.wait()
    assert state.phase == "failed"
    assert "device cpu:3 is held by run 'other-run'" in state.said
    assert pids(tmp_path) == []


def test_only_one_keeper_has_a_name(kept: KeptTeacher) -> None:
    lock = kept.take()
    assert lock is not None
    assert kept.take() is None
    assert kept.alive
    os.close(lock)
    assert not kept.alive


def test_users_are_those_that_live(kept: KeptTeacher, tmp_path: Path) -> None:
    with Keeping(kept, an_order(tmp_path)) as keeping:
        endpoint = keeping.wait_ready().endpoints[0]
        first, second = (use_kept([endpoint], run, tmp_path) for run in ("run-1", "run-2"))
        (kept.folder / "users" / "killed.json").write_text("{}")  # no process holds its lock
        assert use_kept(["http://elsewhere:1"], "run-3", tmp_path).teachers == []
        with kept.gate():
            assert [user.run_id for user in users_of(kept)] == ["run-1", "run-2"]
        first.release()
        with kept.gate():
            assert [user.run_id for user in users_of(kept)] == ["run-2"]
        second.release()
    assert list((kept.folder / "users").iterdir()) == []


@pytest.mark.parametrize(
    ("endpoint", "found"),
    [
        ("http://localhost:13141", ["sums"]),
        ("http://127.0.0.1:13141/", ["sums"]),
        ("http://[::1]:13141", ["sums"]),
        ("http://localhost:13142", []),
        ("http://elsewhere:13141", []),
    ],
)
def test_a_use_is_found_whatever_loopback_is_called(
    kept: KeptTeacher, tmp_path: Path, endpoint: str, found: list[str]
) -> None:
    with said_to_serve(
        kept, an_order(tmp_path), "http://127.0.0.1:13140", "http://127.0.0.1:13141"
    ):
        use = use_kept([endpoint], "run-1", tmp_path)
    assert [teacher.name for teacher in use.teachers] == found
    use.release()


def test_a_second_use_of_a_run_is_refused_and_leaves_the_first(
    kept: KeptTeacher, tmp_path: Path
) -> None:
    with said_to_serve(kept, an_order(tmp_path), "http://127.0.0.1:13141"):
        first = use_kept(["http://127.0.0.1:13141"], "run-1", tmp_path)
        with pytest.raises(ServingError, match=r"is used by run run-1 in .* already"):
            use_kept(["http://127.0.0.1:13141"], "run-1", tmp_path)
        with kept.gate():
            assert [user.run_dir for user in users_of(kept)] == [str(tmp_path)]
        first.release()
        use_kept(["http://127.0.0.1:13141"], "run-1", tmp_path).release()


@pytest.mark.parametrize("torn", ["", '{"run', "[]", "{}"])
def test_a_user_whose_file_is_torn_is_one_all_the_same(kept: KeptTeacher, torn: str) -> None:
    file = kept.folder / "users" / "run-1.json"
    file.parent.mkdir(parents=True)
    file.write_text(torn)
    with kept.gate(), file.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (user,) = users_of(kept)
    assert (user.run_id, user.pid) == ("run-1", 0)
    assert f"{file} cannot be read" in str(user)


def test_the_word_of_an_earlier_life_is_over_once_the_name_is_taken(
    kept: KeptTeacher, tmp_path: Path
) -> None:
    with said_to_serve(kept, an_order(tmp_path), "http://127.0.0.1:13141"):
        kept.ask_end("asked to end")
        (kept.folder / "receipt.json").write_text("{}")
    lock = kept.take()
    assert lock is not None
    assert (kept.order, kept.state, kept.lease, kept.end_wish) == (None,) * 4
    assert not (kept.folder / "receipt.json").exists()
    os.close(lock)


def test_what_is_asked_before_it_begins_is_heard(kept: KeptTeacher, tmp_path: Path) -> None:
    lock = kept.take()
    assert lock is not None
    kept.ask_end("asked to end")
    kept.begin(an_order(tmp_path), 1.0)
    assert kept.end_wish is not None
    os.close(lock)


def test_no_run_begins_to_use_what_is_being_ended(kept: KeptTeacher, tmp_path: Path) -> None:
    with Keeping(kept, an_order(tmp_path)) as keeping:
        endpoint = keeping.wait_ready().endpoints[0]
        with kept.gate():
            kept.ask_end("asked to end")
        with pytest.raises(ServingError, match="is being ended"):
            use_kept([endpoint], "run-1", tmp_path)


def test_an_order_names_where_a_key_is_and_never_the_key(kept: KeptTeacher, tmp_path: Path) -> None:
    lock = kept.take()
    assert lock is not None
    kept.begin(an_order(tmp_path, api_key="plain-key-from-python"), 1.0)
    os.close(lock)
    written = (kept.folder / "order.json").read_text()
    assert "plain-key" not in written
    assert '"api_key": "env:OPD_TEACHER_KEY_SUMS"' in written
    assert kept.order is not None


def test_two_folders_never_share_a_mark(tmp_path: Path) -> None:
    assert (
        KeptTeacher(tmp_path / "a" / "sums").run_id != KeptTeacher(tmp_path / "b" / "sums").run_id
    )


def test_a_name_that_is_a_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a name"):
        KeptTeacher.named("../runs")
