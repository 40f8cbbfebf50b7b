"""No two runs have the same device, and whoever waits is told for whom."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from opd_core.lifecycle.errors import DevicesBusy, LifecycleError
from opd_core.lifecycle.leases import DeviceHolder, DeviceLease, lease_folder
from opd_core.lifecycle.process import boot_id, identify

OWNER = {"run_id": "demo-1", "run_dir": "/runs/demo-1"}
# Takes the devices of its command line, waiting at most so long, and holds them until its input
# ends.
HOLD = """
import sys
from opd_core.lifecycle.leases import DeviceLease
wait_s, *devices = sys.argv[1:]
with DeviceLease.take(devices, owner={"run_id": "other"}, wait_s=float(wait_s)) as lease:
    print(*lease.devices, flush=True)
    sys.stdin.read()
"""

Take = Callable[..., DeviceLease]
Hold = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the locks of this test, for this process and those that it starts."""
    monkeypatch.setenv("OPD_LEASES", str(tmp_path / "leases"))
    return tmp_path / "leases"


@pytest.fixture
def take(folder: Path) -> Iterator[Take]:
    """Take devices in this process, by default at once or not at all."""
    with ExitStack() as held:

        def take_them(*devices: str, **fields: Any) -> DeviceLease:
            lease = DeviceLease.take(devices, **{"owner": OWNER, "wait_s": 0.0, **fields})
            return held.enter_context(lease)

        yield take_them


@pytest.fixture
def hold(folder: Path, repository: Path) -> Iterator[Hold]:
    """Take devices in another process, which holds them until its input is closed."""
    with ExitStack() as started:

        def hold_them(*devices: str, wait_s: float = 0.0, **fields: Any) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", HOLD, str(wait_s), *devices],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=repository,
                **fields,
            )
            started.enter_context(process)
            started.callback(process.kill)
            return process

        yield hold_them


def said(process: subprocess.Popen[str]) -> str:
    """The devices that a process has taken, once it has them."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def let_go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60.0) == 0


def is_busy(take: Take, device: str) -> bool:
    try:
        take(device).release()
    except DevicesBusy:
        return True
    return False


# ------------------------------------------------------------------ taking and letting go


def test_a_device_is_for_one_process_until_it_lets_go(take: Take, hold: Hold) -> None:
    other = hold("GPU-a")
    assert said(other) == "GPU-a"
    assert is_busy(take, "GPU-a")
    assert not is_busy(take, "GPU-b")
    let_go(other)
    assert not is_busy(take, "GPU-a")


def test_devices_are_taken_once_each_in_their_order_and_a_plain_cpu_not_at_all(
    take: Take, folder: Path
) -> None:
    lease = take("cpu:1", "cpu", "GPU-b", "cpu:1", "GPU-a")
    assert lease.devices == ("GPU-a", "GPU-b", "cpu:1")
    assert len(set(lease.descriptors)) == 3
    assert sorted(path.name for path in folder.iterdir()) == [
        "GPU-a.lock",
        "GPU-b.lock",
        "cpu:1.lock",
    ]
    lease.release()
    lease.release()
    assert lease.devices == ()
    assert lease.descriptors == ()


def test_a_run_on_plain_cpus_needs_no_folder(take: Take, folder: Path) -> None:
    assert take("cpu").devices == ()
    assert not folder.exists()


def test_who_waits_gets_the_device_when_it_is_let_go_and_is_told_for_whom(
    take: Take, hold: Hold
) -> None:
    other = hold("GPU-a")
    said(other)
    words: list[tuple[float, DeviceHolder]] = []

    def waiting(seconds: float, holder: DeviceHolder) -> None:
        words.append((seconds, holder))
        if len(words) == 2:
            let_go(other)

    assert take("GPU-a", wait_s=math.inf, waiting=waiting).devices == ("GPU-a",)
    (first, holder), (second, same) = words
    assert first < 0.5
    assert 1.0 <= second < 30.0
    assert (holder.device, holder.run_id, holder.pid) == ("GPU-a", "other", other.pid)
    assert same == holder


def test_who_waits_in_vain_gives_up_after_its_time_with_nothing_held(
    take: Take, hold: Hold
) -> None:
    other = hold("GPU-b")
    said(other)
    began = time.monotonic()
    with pytest.raises(DevicesBusy, match="device GPU-b is held"):
        take("GPU-a", "GPU-b", "GPU-c", wait_s=0.5)
    assert 0.5 <= time.monotonic() - began < 30.0
    assert not is_busy(take, "GPU-a")


def test_an_interrupt_of_the_waiting_lets_go_of_what_was_held(take: Take, hold: Hold) -> None:
    other = hold("GPU-b")
    said(other)

    def interrupt(seconds: float, holder: DeviceHolder) -> None:
        assert is_busy(take, "GPU-a")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take("GPU-a", "GPU-b", wait_s=math.inf, waiting=interrupt)
    assert not is_busy(take, "GPU-a")


def test_who_waits_for_a_device_holds_none_that_comes_after_it(take: Take, hold: Hold) -> None:
    other = hold("GPU-a")
    said(other)

    def waiting(seconds: float, holder: DeviceHolder) -> None:
        assert not is_busy(take, "GPU-b")
        let_go(other)

    assert take("GPU-b", "GPU-a", wait_s=60.0, waiting=waiting).devices == ("GPU-a", "GPU-b")


def test_two_that_want_the_same_devices_in_another_order_both_finish(hold: Hold) -> None:
    def end(process: subprocess.Popen[str]) -> None:
        assert said(process) == "GPU-a GPU-b"
        let_go(process)

    for _ in range(3):
        both = hold("GPU-a", "GPU-b", wait_s=60.0), hold("GPU-b", "GPU-a", wait_s=60.0)
        enders = [threading.Thread(target=end, args=(process,)) for process in both]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join(60.0)
        assert [process.returncode for process in both] == [0, 0]


@pytest.mark.parametrize("wait_s", [-1.0, math.nan])
def test_a_time_to_wait_that_is_none_is_refused(wait_s: float, take: Take) -> None:
    with pytest.raises(LifecycleError, match="expected wait_s to be 0 seconds or more"):
        take("GPU-a", wait_s=wait_s)


# ------------------------------------------------------------------ who holds it


def test_the_message_names_the_holder_and_what_to_do(take: Take) -> None:
    lease = take("GPU-a")
    with pytest.raises(DevicesBusy) as caught:
        take("GPU-a")
    message = str(caught.value)
    assert re.match(
        r"device GPU-a is held by run 'demo-1' in /runs/demo-1 "
        rf"\(process {os.getpid()}\), since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d; waited 0 s for it: ",
        message,
    )
    for way_out in ("--set devices.wait_s=", "name other devices", "end that run", "`opd reap`"):
        assert way_out in message
    lease.tell(run_id="demo-2", run_dir="/elsewhere")
    with pytest.raises(DevicesBusy, match=r"run 'demo-2' in /elsewhere \(process "):
        take("GPU-a")


def test_the_file_tells_all_of_the_holder_and_what_it_learns_later(
    take: Take, folder: Path
) -> None:
    before = time.time()
    lease = take("GPU-a", "GPU-b", owner={"run_id": "demo-1" * 20})
    lease.tell(run_id="demo-2", run_dir="/runs/demo-2")
    me = identify(os.getpid())
    assert me is not None
    for device in lease.devices:
        facts = json.loads((folder / f"{device}.lock").read_text())
        assert before - 1 <= facts.pop("since") <= time.time() + 1
        assert facts == {
            "run_id": "demo-2",
            "run_dir": "/runs/demo-2",
            "pid": os.getpid(),
            "start_ticks": me.start_ticks,
            "boot_id": boot_id(),
        }


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"pid": "x"}', "\x00\xff", '{"run_id": "to'])
def test_a_holder_that_has_not_told_who_it_is_is_told_as_such(
    content: str, take: Take, folder: Path
) -> None:
    take("GPU-a")
    (folder / "GPU-a.lock").write_text(content)
    with pytest.raises(DevicesBusy, match="held by a run that has not told its name; waited"):
        take("GPU-a")


def test_the_rest_of_an_older_and_longer_content_is_not_read(take: Take, folder: Path) -> None:
    take("GPU-a")
    with (folder / "GPU-a.lock").open("a") as file:
        file.write('"/an/older/folder"}\n')
    with pytest.raises(DevicesBusy, match="held by run 'demo-1' in /runs/demo-1"):
        take("GPU-a")


def test_what_a_dead_holder_wrote_is_overwritten(take: Take, folder: Path) -> None:
    folder.mkdir()
    (folder / "GPU-a.lock").write_text(json.dumps({"run_id": "dead", "pid": 1, "x": "y" * 9000}))
    take("GPU-a")
    assert json.loads((folder / "GPU-a.lock").read_text())["run_id"] == "demo-1"


def test_a_removed_file_of_a_lock_is_made_again(take: Take, folder: Path) -> None:
    take("GPU-a").release()
    (folder / "GPU-a.lock").unlink()
    take("GPU-a")
    assert is_busy(take, "GPU-a")


# ------------------------------------------------------------------ how long a lock lives


def test_a_killed_holder_holds_nothing(take: Take, hold: Hold) -> None:
    other = hold("GPU-a")
    said(other)
    other.kill()
    other.wait(60.0)
    assert take("GPU-a").devices == ("GPU-a",)


def test_a_child_of_the_holder_does_not_keep_its_devices(take: Take) -> None:
    lease = take("GPU-a")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as child:
        lease.release()
        assert child.poll() is None
        assert not is_busy(take, "GPU-a")


def test_a_descriptor_that_was_handed_over_keeps_the_device(take: Take, repository: Path) -> None:
    code = HOLD.replace(
        "    print(",
        "    import subprocess\n"
        "    subprocess.Popen(['cat'], pass_fds=lease.descriptors)\n"
        "    print(",
    )
    read_end, write_end = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", code, "0", "GPU-a"],
        stdin=read_end,
        stdout=subprocess.PIPE,
        text=True,
        cwd=repository,
    ) as first:
        os.close(read_end)
        assert said(first) == "GPU-a"
        first.kill()
    try:
        with pytest.raises(DevicesBusy, match=f"run 'other' .process {first.pid}."):
            take("GPU-a")
    finally:
        os.close(write_end)  # the end of its input is the end of the heir
    assert take("GPU-a", wait_s=60.0).devices == ("GPU-a",)


def test_letting_go_takes_the_device_from_nobody_who_shares_the_descriptor(take: Take) -> None:
    lease = take("GPU-a")
    shared = os.dup(*lease.descriptors)
    lease.release()
    assert is_busy(take, "GPU-a")
    os.close(shared)
    assert not is_busy(take, "GPU-a")


# ------------------------------------------------------------------ the folder


def test_all_runs_of_a_host_use_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPD_LEASES", raising=False)
    assert lease_folder() == Path("/tmp/opd-leases")
    monkeypatch.setenv("OPD_LEASES", "/locks")
    assert lease_folder() == Path("/locks")


def test_the_folder_and_the_files_are_for_all_users_whatever_the_umask(
    take: Take, folder: Path
) -> None:
    before = os.umask(0o077)
    try:
        take("GPU-a")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert stat.S_IMODE((folder / "GPU-a.lock").stat().st_mode) == 0o666


def test_a_folder_whose_maker_was_killed_shuts_nobody_out(
    take: Take, folder: Path, repository: Path
) -> None:
    killed = (
        "import os, sys\n"
        "def die(event, arguments):\n"
        "    if event == 'os.chmod':\n"
        "        os._exit(9)\n"
        "sys.addaudithook(die)\n"
    )
    command = [sys.executable, "-c", killed + HOLD, "0", "GPU-a"]
    maker = subprocess.run(command, cwd=repository, stdin=subprocess.DEVNULL, timeout=60)
    assert maker.returncode == 9
    take("GPU-a")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777


def test_a_folder_that_cannot_be_used_is_told_with_what_to_do(take: Take, folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(LifecycleError) as caught:
        take("GPU-a")
    assert not isinstance(caught.value, DevicesBusy)
    message = str(caught.value)
    assert message.startswith(f"device GPU-a: expected to lock {folder / 'GPU-a.lock'}, got: ")
    assert "(chmod 1777), or set OPD_LEASES" in message


def test_a_link_in_place_of_a_lock_is_refused(take: Take, folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    (tmp_path / "victim").write_text("precious")
    (folder / "GPU-a.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(LifecycleError, match="expected to lock"):
        take("GPU-a")
    assert (tmp_path / "victim").read_text() == "precious"


# ------------------------------------------------------------------ another user


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users reach, unlike the temporary folders of tests."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name) / "leases"


def as_another_user(folder: Path, device: str) -> str:
    """What comes of a forked copy that is nobody and takes a device for a moment."""
    read_end, write_end = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            lease = DeviceLease.take([device], owner={"run_id": "nobody"}, wait_s=0, folder=folder)
            os.write(write_end, f"took {lease.devices}".encode())
        except BaseException as error:
            os.write(write_end, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write_end)
    os.waitpid(child, 0)
    with open(read_end, encoding="utf-8") as answer:
        return answer.read()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@needs_root
def test_another_user_finds_the_device_taken_and_takes_it_afterwards(open_folder: Path) -> None:
    with DeviceLease.take(["GPU-a"], owner=OWNER, wait_s=0, folder=open_folder):
        told = as_another_user(open_folder, "GPU-a")
        assert told.startswith("DevicesBusy: device GPU-a is held by run 'demo-1'")
    assert as_another_user(open_folder, "GPU-a") == "took ('GPU-a',)"
    assert json.loads((open_folder / "GPU-a.lock").read_text())["run_id"] == "nobody"


@needs_root
def test_a_lock_that_another_user_made_is_taken_too(open_folder: Path) -> None:
    open_folder.mkdir()
    open_folder.chmod(0o1777)
    os.chown(open_folder, 65534, 65534)
    assert as_another_user(open_folder, "GPU-a") == "took ('GPU-a',)"
    assert (open_folder / "GPU-a.lock").stat().st_uid == 65534
    with DeviceLease.take(["GPU-a"], owner=OWNER, wait_s=0, folder=open_folder) as lease:
        assert lease.devices == ("GPU-a",)


@needs_root
def test_a_folder_in_which_a_user_may_not_write_is_told(open_folder: Path) -> None:
    open_folder.mkdir(mode=0o755)
    told = as_another_user(open_folder, "GPU-a")
    assert told.startswith("LifecycleError: device GPU-a: expected to lock")
    assert "Permission denied" in told
    assert "(chmod 1777), or set OPD_LEASES" in told
