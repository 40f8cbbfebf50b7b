"""Folders of checkpoints. Run as a script, this file is a run that is killed again and again."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from opd_core.errors import TrainingError
from opd_core.training.checkpoint_folder import Checkpoint, CheckpointFolder

KILLS = 60


def make(folder: Path, *, keep: int = 2, keep_every: int = 0) -> CheckpointFolder:
    return CheckpointFolder(folder / "checkpoints", keep=keep, keep_every=keep_every)


def add(checkpoints: CheckpointFolder, train_step: int, **facts: Any) -> Checkpoint:
    begun = checkpoints.begin(train_step)
    begun.state.mkdir()
    (begun.state / "shard").write_text(str(train_step))
    return checkpoints.commit(begun, facts)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    checkpoints.clean()
    assert checkpoints.newest() is None
    assert checkpoints.oldest_kept() is None


def test_a_checkpoint_counts_only_once_it_is_committed(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    begun = checkpoints.begin(20)
    (begun.path / "loop.json").write_text('{"train_step": 20}')
    assert checkpoints.newest() is None
    whole = checkpoints.commit(begun, {"next_group": 7, "rate": 0.1})
    assert whole.path.name == "step-000020"
    assert make(tmp_path).newest() == whole
    assert checkpoints.facts(whole) == {"train_step": 20, "next_group": 7, "rate": 0.1}


def test_beginning_again_starts_from_an_empty_folder(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    (checkpoints.begin(20).path / "left-over").touch()
    assert list(checkpoints.begin(20).path.iterdir()) == []


def test_a_step_that_has_a_checkpoint_is_not_begun_again(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    add(checkpoints, 20)
    with pytest.raises(TrainingError, match="step-000020 exists already"):
        checkpoints.begin(20)


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, keep=9)
    for step in (1_000_000, 999_999):
        add(checkpoints, step)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.train_step == 1_000_000
    assert checkpoints.oldest_kept() == 999_999


def test_the_newest_are_kept_and_multiples_for_ever(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, keep=2, keep_every=40)
    for step in range(20, 181, 20):
        add(checkpoints, step)
    steps = (40, 80, 120, 160, 180)
    assert names(tmp_path) == [f"step-{step:06d}" for step in steps]
    assert checkpoints.oldest_kept() == 160, "a run goes on from the newest two"


def test_without_keep_every_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, keep=1)
    for step in (20, 40, 60):
        add(checkpoints, step)
    assert names(tmp_path) == ["step-000060"]


def test_cleaning_removes_what_is_not_whole_and_nothing_else(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    add(checkpoints, 20)
    checkpoints.begin(40)
    (tmp_path / "checkpoints" / "notes").mkdir()
    checkpoints.clean()
    assert names(tmp_path) == ["notes", "step-000020"]


def test_facts_that_json_cannot_hold_leave_the_checkpoint_partial(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    with pytest.raises(TypeError):
        checkpoints.commit(checkpoints.begin(20), {"path": tmp_path})
    assert checkpoints.newest() is None


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"train_step": 40}'])
def test_facts_that_cannot_be_read_are_named(tmp_path: Path, content: str) -> None:
    checkpoints = make(tmp_path)
    whole = add(checkpoints, 20)
    (whole.path / "loop.json").write_text(content)
    with pytest.raises(TrainingError, match=f"{whole.path}/loop.json cannot be read"):
        checkpoints.facts(whole)


def test_everything_is_on_the_disk_before_the_name_appears(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    begun = checkpoints.begin(20)
    begun.state.mkdir()
    for path in (begun.state / "shard", begun.path / "more"):
        path.touch()
    calls: list[str] = []

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call" or called not in (os.fsync, os.replace):
            return
        if called is os.replace:
            calls.append("rename")
        elif "descriptor" in frame.f_locals:
            synced = f"/proc/self/fd/{frame.f_locals['descriptor']}"
            calls.append(Path(os.readlink(synced)).name)

    sys.setprofile(note)
    try:
        checkpoints.commit(begun, {})
    finally:
        sys.setprofile(None)
    named = len(calls) - 1 - calls[::-1].index("rename")
    written = {"shard", "more", "loop.json", "state", "step-000020.partial"}
    assert written <= set(calls[:named])
    assert calls[named + 1 :] == ["checkpoints"]


def test_a_run_killed_at_any_moment_leaves_whole_checkpoints(tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    endings = json.loads(found.stdout)
    assert endings["killed"] == KILLS
    # The kills did hit the moments that matter.
    assert endings["partial left"] > 10
    assert endings["newest moved on"] > 10


def run_until_killed(folder: Path, lines: int) -> None:
    """Write checkpoints until a SIGKILL before the line of Python with that number."""
    left = lines

    def count(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return count

    sys.settrace(count)
    checkpoints = make(folder, keep=2, keep_every=3)
    checkpoints.clean()
    newest = checkpoints.newest()
    step = newest.train_step if newest else 0
    while True:
        step += 1
        begun = checkpoints.begin(step)
        begun.state.mkdir()
        digest = hashlib.sha256()
        for number in range(3):
            with (begun.state / str(number)).open("wb") as file:
                for _ in range(2):
                    digest.update(content := os.urandom(50))
                    file.write(content)
                    file.flush()
        checkpoints.commit(begun, {"sha256": digest.hexdigest()})
        (folder / "committed").write_text(str(step))


def check(folder: Path) -> int:
    """Every checkpoint that counts holds what was written; step of the newest."""
    checkpoints = make(folder, keep=2, keep_every=3)
    newest = checkpoints.newest()
    assert newest is None or not newest.path.name.endswith(".partial")
    root = folder / "checkpoints"
    for path in root.glob("step-" + "[0-9]" * 6):
        checkpoint = Checkpoint(int(path.name[5:]), path)
        shards = [file.read_bytes() for file in sorted(checkpoint.state.iterdir())]
        digest = hashlib.sha256(b"".join(shards)).hexdigest()
        assert checkpoints.facts(checkpoint)["sha256"] == digest
    committed = (folder / "committed").read_text() if (folder / "committed").exists() else ""
    step = newest.train_step if newest else 0
    assert step >= int(committed or 0)
    return step


def main(folder: Path) -> None:
    moments = random.Random(1)
    endings = {"killed": 0, "partial left": 0, "newest moved on": 0}
    before = 0
    for _ in range(KILLS):
        moment = moments.randrange(1, 6000)
        child = os.fork()
        if child == 0:
            run_until_killed(folder, moment)
        _, status = os.waitpid(child, 0)
        endings["killed"] += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        endings["partial left"] += any((folder / "checkpoints").glob("*.partial"))
        step = check(folder)
        endings["newest moved on"] += step > before
        before = step
    print(json.dumps(endings))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
