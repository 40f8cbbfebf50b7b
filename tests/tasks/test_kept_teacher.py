"""Keeping a teacher: up, used, down, and what is left when its keeper is killed. The keeper is a
real process, its server a stand-in."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from opd_core.config import OPDTeacherConfig
from opd_core.errors import ConfigError, PreflightError, ServingError
from opd_core.lifecycle.process import read_stat
from opd_core.lifecycle.reaper import look
from opd_core.lifecycle.records import read_receipt
from opd_core.lifecycle.registry import Registry
from opd_core.recipe import RECIPES, find_recipe, load_recipe
from opd_core.serving.kept.record import KeptState, KeptTeacher
from opd_core.serving.kept.users import use_kept
from tasks.kept_teacher import end_teacher, keep_teacher, overrides_to_use
from tests.opd_core.serving.kept_standin import an_order, said_to_serve, wait_until

TINY = find_recipe("tiny")
Up = Callable[..., KeptTeacher]


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Up]:
    """``opd teacher up tiny``, in a state folder of the test's own; ended afterwards."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    an_order(tmp_path)  # writes the program
    python = f"opd.teachers.0.launch.python={tmp_path / 'server'}"

    def keep(*overrides: str, hours: float = 1.0, name: str = "kept") -> KeptTeacher:
        changes = (python, *overrides)
        return keep_teacher(TINY, changes, name=name, hours=hours, telling=lambda said: None)

    yield keep
    if (tmp_path / "state/opd-lab/teachers/kept").is_dir():
        end_teacher("kept", force=True)


def gone(pid: int) -> bool:
    """Whether it has ended; nobody may have collected it yet."""
    stat = read_stat(pid)
    return stat is None or not stat.running


def server_pid(tmp_path: Path) -> int:
    """The process of the server that was started last."""
    return int((tmp_path / "starts").read_text().split()[-1])


def keeper_pid(kept: KeptTeacher) -> int:
    """The process of its keeper."""
    assert kept.state is not None
    return kept.state.pid


def supervisor_pid(kept: KeptTeacher) -> int:
    """The process of its supervisor."""
    lines = (kept.folder / "ledger.jsonl").read_text().splitlines()
    started = [e for e in map(json.loads, lines) if e["event"] == "run_started"]
    return int(started[-1]["supervisor_pid"])


@pytest.mark.long
def test_it_outlives_the_command_and_is_down_only_when_no_run_uses_it(
    up: Up, tmp_path: Path
) -> None:
    kept = up()
    assert os.getsid(keeper_pid(kept)) != os.getsid(0)
    assert kept.state is not None
    use = use_kept(kept.state.endpoints, "run-1", tmp_path)
    with pytest.raises(ServingError, match=r"used by run run-1 in .* --force"):
        end_teacher("kept")
    assert kept.alive
    use.release()
    assert "nothing of it is left" in end_teacher("kept")
    assert gone(server_pid(tmp_path))
    assert look(Registry.of_user()) == ()
    assert "was not up" in end_teacher("kept")


@pytest.mark.long
def test_up_again_goes_on_with_the_same_server_and_its_time_begins_anew(
    up: Up, tmp_path: Path
) -> None:
    up(hours=1.0)
    first = server_pid(tmp_path)
    kept = up(hours=7.0)
    assert server_pid(tmp_path) == first
    assert kept.lease is not None
    assert kept.lease.hours == 7.0
    with pytest.raises(ConfigError, match=r"another teacher, or one with other settings"):
        up("opd.teachers.0.launch.context_length=64")
    end_teacher("kept")
    up()
    assert server_pid(tmp_path) != first


@pytest.mark.long
def test_all_ends_with_a_keeper_that_is_killed(up: Up, tmp_path: Path) -> None:
    kept = up()
    server, supervisor = server_pid(tmp_path), supervisor_pid(kept)
    os.kill(keeper_pid(kept), signal.SIGKILL)
    wait_until(lambda: gone(supervisor), "the end of the supervisor")
    assert gone(server)
    receipt = read_receipt(kept.folder)
    assert receipt is not None
    assert (receipt.cause, receipt.clean) == ("owner died", True)
    assert look(Registry.of_user()) == ()
    up()


@pytest.mark.long
def test_the_reaper_settles_it_when_keeper_and_supervisor_are_killed(
    up: Up, tmp_path: Path
) -> None:
    kept = up()
    server, keeper = server_pid(tmp_path), keeper_pid(kept)
    supervisor = supervisor_pid(kept)
    os.kill(keeper, signal.SIGSTOP)  # or it would end in order
    os.kill(supervisor, signal.SIGKILL)
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: gone(keeper), "the end of the keeper")
    wait_until(
        lambda: [found.state for found in look(Registry.of_user())] == ["dead"],
        "the reaper to see that both are gone",
    )
    assert "was not up" in end_teacher("kept")
    assert look(Registry.of_user()) == ()
    assert gone(server)


@pytest.mark.long
def test_a_keeper_that_lost_its_supervisor_ends_in_order(up: Up, tmp_path: Path) -> None:
    kept = up()
    os.kill(supervisor_pid(kept), signal.SIGKILL)
    wait_until(lambda: not kept.alive, "the end of the keeper")
    assert kept.state is not None
    assert kept.state.phase == "failed"
    assert gone(server_pid(tmp_path))
    assert look(Registry.of_user()) == ()


@pytest.mark.long
def test_a_keeper_that_hangs_is_ended_by_force(up: Up, tmp_path: Path) -> None:
    kept = up("run.teardown_s=1")
    os.kill(keeper_pid(kept), signal.SIGSTOP)
    assert "nothing of it is left" in end_teacher("kept", force=True)
    assert gone(server_pid(tmp_path))


@pytest.mark.long
def test_its_key_is_in_no_file_and_no_command_line(
    up: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEPT_KEY", "kept-secret-4711")
    kept = up("opd.teachers.0.api_key=env:KEPT_KEY")
    for pid in (keeper_pid(kept), supervisor_pid(kept), server_pid(tmp_path)):
        assert b"kept-secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    files = [file for file in (tmp_path / "state").rglob("*") if file.is_file()]
    assert len(files) > 5
    assert not [file for file in files if b"kept-secret" in file.read_bytes()]


@pytest.mark.long
def test_one_that_does_not_come_up_leaves_nothing(up: Up, tmp_path: Path) -> None:
    (tmp_path / "dies").touch()
    with pytest.raises(ServingError, match=r"is not up: .* died while it started(.|\n)*no weights"):
        up()
    wait_until(lambda: not KeptTeacher.named("kept").alive, "the end of the keeper")
    assert look(Registry.of_user()) == ()


def test_what_is_wrong_is_told_before_anything_is_started(up: Up) -> None:
    with pytest.raises(PreflightError, match="no-such-model"):
        up("opd.teachers.0.launch.model=no-such-model")
    assert not KeptTeacher.named("kept").alive
    assert KeptTeacher.named("kept").order is None


def test_an_external_teacher_cannot_be_kept(up: Up) -> None:
    with pytest.raises(ConfigError, match="has an external server, which cannot be kept"):
        keep_teacher(
            TINY,
            ["opd.teachers.0.launch=null", "opd.teachers.0.endpoint=http://127.0.0.1:9"],
            hours=1.0,
            telling=lambda said: None,
        )


def test_one_of_several_teachers_has_to_be_named() -> None:
    recipe = find_recipe("tiny_multi_teacher")
    names = [t["name"] for t in yaml.safe_load(recipe.read_text())["opd"]["teachers"]]
    assert recipe.parent == RECIPES
    with pytest.raises(ConfigError, match=f"name one with --teacher .{', '.join(names)}"):
        keep_teacher(recipe, hours=1.0, telling=lambda said: None)
    with pytest.raises(ConfigError, match="has no teacher 'nobody'"):
        keep_teacher(recipe, teacher="nobody", hours=1.0, telling=lambda said: None)


def test_a_name_that_was_never_kept_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no teacher 'unheard-of' was ever kept here"):
        end_teacher("unheard-of")


def test_a_second_up_while_the_first_still_checks_is_told(up: Up, tmp_path: Path) -> None:
    kept = KeptTeacher.named("kept")
    with said_to_serve(kept, an_order(tmp_path), "http://127.0.0.1:9"):
        pass  # an earlier life, which ended without a word
    lock = kept.take()
    assert lock is not None
    with pytest.raises(ServingError, match="is being checked by another"):
        up()
    os.close(lock)


def test_it_is_not_started_once_somebody_has_asked_for_its_end(up: Up, tmp_path: Path) -> None:
    kept = KeptTeacher.named("kept")
    python = f"opd.teachers.0.launch.python={tmp_path / 'server'}"

    def ask_end(warning: str) -> None:
        assert "no judge is" in warning
        kept.ask_end("asked to end")

    with pytest.raises(ServingError, match="is not up: asked to end"):
        keep_teacher(TINY, [python, "task.judge=null"], name="kept", hours=1.0, telling=ask_end)
    assert not (tmp_path / "starts").exists()
    assert kept.state is not None
    assert (kept.state.phase, kept.alive) == ("failed", False)


def test_up_waits_for_the_end_of_what_ends(up: Up, tmp_path: Path) -> None:
    kept = KeptTeacher.named("kept")
    wanted = load_recipe(TINY, [f"opd.teachers.0.launch.python={tmp_path / 'server'}"])
    assert wanted.opd is not None
    order = replace(an_order(tmp_path), teacher=wanted.opd.teachers[0])
    with said_to_serve(kept, order):
        kept.tell(KeptState("ending", "it goes"))
        with pytest.raises(ServingError, match="is not up: nothing is left"):
            keep_teacher(
                TINY,
                [f"opd.teachers.0.launch.python={tmp_path / 'server'}"],
                name="kept",
                hours=1.0,
                telling=lambda said: kept.tell(KeptState("ended", "nothing is left")),
            )


@pytest.mark.parametrize("file", ["order.json", "state.json"])
def test_one_that_cannot_be_read_is_ended_all_the_same(up: Up, tmp_path: Path, file: str) -> None:
    kept = KeptTeacher.named("kept")
    told: list[str] = []
    with said_to_serve(kept, an_order(tmp_path), "http://127.0.0.1:9"):
        (kept.folder / file).write_text('{"recipe": 1}')
        down = threading.Thread(target=lambda: told.append(end_teacher("kept", force=True)))
        down.start()
        wait_until(lambda: kept.end_wish, "the wish")
    down.join()
    assert "nothing of it is left" in told[0]


@pytest.mark.parametrize("api_key", [None, "env:KEPT_KEY"])
def test_a_run_is_told_the_address_and_where_the_key_is(
    tmp_path: Path, api_key: str | None
) -> None:
    changes = overrides_to_use(an_order(tmp_path, api_key=api_key), ["http://127.0.0.1:7"])
    assert changes[:2] == [
        "opd.teachers.0.endpoint=http://127.0.0.1:7",
        "opd.teachers.0.launch=null",
    ]
    assert changes[2:] == ([f"opd.teachers.0.api_key={api_key}"] if api_key else [])
    opd = load_recipe(TINY, changes).opd
    assert opd is not None
    (teacher,) = opd.teachers
    assert (teacher.endpoint, teacher.launch) == ("http://127.0.0.1:7", None)
    assert (teacher.api_key and teacher.api_key.get_secret_value()) == api_key


def test_a_run_is_told_the_address_of_each_replica(tmp_path: Path) -> None:
    raw = yaml.safe_load(TINY.read_text())
    one = raw["opd"]["teachers"][0]
    server = {"backend": one.pop("backend"), "launch": one.pop("launch")}
    one["replicas"] = [server, {**server, "backend": "sglang"}]
    recipe = tmp_path / "two.yaml"
    recipe.write_text(yaml.safe_dump(raw))
    replicated = OPDTeacherConfig.model_validate({**one, "api_key": "env:KEPT_KEY"})
    order = replace(an_order(tmp_path), teacher=replicated)
    changes = overrides_to_use(order, ["http://127.0.0.1:7", "http://127.0.0.1:8"])
    opd = load_recipe(recipe, changes).opd
    assert opd is not None
    (teacher,) = opd.teachers
    told = [(each.endpoint, each.backend, each.launch) for each in teacher.all_replicas]
    assert told == [
        ("http://127.0.0.1:7", "embedded", None),
        ("http://127.0.0.1:8", "sglang", None),
    ]
    assert teacher.api_key is not None
    assert changes[1:] == ["opd.teachers.0.api_key=env:KEPT_KEY"]
