"""How a server's environment is built: whole or not at all, once, and told; without a network."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from deployments.prepare_servers import (
    ENVIRONMENTS,
    SERVERS,
    Finished,
    Tell,
    device_kind,
    fingerprint,
    link_name,
    prepare_server,
    run_command,
)
from opd_core.errors import PreflightError

ROOT = Path(__file__).parents[2]
NAMES = sorted(SERVERS)


class FakeMachine:
    """Stands for venv, pip and the server's Python: makes the folder, installs nothing."""

    def __init__(self, fails: str = "") -> None:
        self.commands: list[Sequence[str]] = []
        self._fails = fails

    def __call__(self, command: Sequence[str], on_line: Tell) -> Finished:
        self.commands.append(command)
        if "venv" in command:
            site = "lib/python{}.{}/site-packages".format(*sys.version_info)
            (Path(command[-1]) / site).mkdir(parents=True)
        if "pip" in command:
            for _ in range(60):
                on_line("Collecting something\n")
            on_line("Installing collected packages: something\n")
        fails = bool(self._fails) and self._fails in command
        return Finished(int(fails), "ERROR: No matching distribution" if fails else "")

    @property
    def steps(self) -> list[str]:
        names = {"venv": "venv", "pip": "pip", "-c": "proof"}
        return [step for c in self.commands for word, step in names.items() if word in c]


def prepare(
    cache: Path, machine: FakeMachine, said: list[str] | None = None, name: str = "sglang"
) -> Path:
    tell = (said if said is not None else []).append
    return prepare_server(name, cache, tell, "cpu", machine)


@pytest.mark.parametrize("name", NAMES)
def test_an_environment_is_made_installed_proven_and_then_linked(tmp_path: Path, name: str) -> None:
    machine = FakeMachine()
    link = prepare(tmp_path, machine, name=name)
    folder = tmp_path / f"{name}-{fingerprint(name, 'cpu')}"
    assert machine.steps == ["venv", "pip", "proof"]
    assert link.name == link_name(name, "cpu")
    assert link.resolve() == folder
    assert (folder / ".complete").exists()


def test_a_cpu_environment_gets_its_whole_lock_and_the_stand_ins(tmp_path: Path) -> None:
    machine = FakeMachine()
    link = prepare(tmp_path, machine)
    pip = machine.commands[1]
    assert pip[0] == str(link.resolve() / "bin/python")
    assert "--no-deps" in pip
    assert str(ENVIRONMENTS / "sglang/cpu.txt") in pip
    (site,) = link.glob("lib/python*/site-packages")
    assert {file.name for file in site.iterdir()} == {
        *("opd_import_hooks.py", "opd_stand_ins.py", "opd_stand_ins.pth", "sgl_kernel.py")
    }


def test_a_cuda_environment_is_the_published_server_and_nothing_of_ours(tmp_path: Path) -> None:
    machine, said = FakeMachine(), list[str]()
    link = prepare_server("sglang", tmp_path, said.append, "cuda", machine)
    assert "--no-deps" not in machine.commands[1]
    assert str(ENVIRONMENTS / "sglang/cuda.txt") in machine.commands[1]
    (site,) = link.glob("lib/python*/site-packages")
    assert list(site.iterdir()) == []
    assert "not run that kind yet" in said[-1]


def test_what_is_there_is_not_built_again(tmp_path: Path) -> None:
    prepare(tmp_path, FakeMachine())
    machine, said = FakeMachine(), list[str]()
    prepare(tmp_path, machine, said)
    assert machine.commands == []
    assert said[0].startswith("already prepared: ")


@pytest.mark.parametrize("step", ["venv", "pip", "-c"])
def test_a_failure_tells_what_was_said_and_leaves_no_environment(tmp_path: Path, step: str) -> None:
    with pytest.raises(PreflightError, match=r"No matching distribution") as caught:
        prepare(tmp_path, FakeMachine(fails=step))
    assert "run the same command again" in str(caught.value)
    assert not (tmp_path / link_name("sglang", "cpu")).exists()
    machine = FakeMachine()
    prepare(tmp_path, machine)
    assert machine.steps == ["venv", "pip", "proof"]


def test_what_an_interrupted_build_left_is_thrown_away(tmp_path: Path) -> None:
    folder = tmp_path / f"sglang-{fingerprint('sglang', 'cpu')}"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib/half").touch()
    prepare(tmp_path, FakeMachine())
    assert not (folder / "lib/half").exists()


def test_two_at_once_build_it_once(tmp_path: Path) -> None:
    inside, go_on, waits = threading.Event(), threading.Event(), threading.Event()
    first = FakeMachine()

    def slow(command: Sequence[str], on_line: Tell) -> Finished:
        inside.set()
        assert go_on.wait(timeout=30)
        return first(command, on_line)

    def tell(text: str) -> None:
        if "waiting" in text:
            waits.set()

    args = ("sglang", tmp_path)
    one = threading.Thread(target=prepare_server, args=(*args, tell, "cpu", slow))
    one.start()
    assert inside.wait(timeout=30)
    second = FakeMachine()
    other = threading.Thread(target=prepare_server, args=(*args, tell, "cpu", second))
    other.start()
    assert waits.wait(timeout=30)
    go_on.set()
    one.join()
    other.join()
    assert first.steps == ["venv", "pip", "proof"]
    assert second.commands == []


def test_a_new_lock_moves_the_link_and_a_folder_in_its_place_is_not_touched(
    tmp_path: Path,
) -> None:
    link = tmp_path / link_name("sglang", "cpu")
    link.symlink_to("sglang-of-an-older-lock")
    prepare(tmp_path, FakeMachine())
    assert link.resolve().name == f"sglang-{fingerprint('sglang', 'cpu')}"
    link.unlink()
    link.mkdir()
    with pytest.raises(PreflightError, match="expected a link or nothing"):
        prepare(tmp_path, FakeMachine())
    assert link.is_dir()


def test_progress_is_told_in_steps(tmp_path: Path) -> None:
    said: list[str] = []
    prepare(tmp_path, FakeMachine(), said)
    assert "  25 packages fetched" in said
    assert "  50 packages fetched" in said
    assert "  60 packages fetched, unpacking" in said


def test_lmdeploy_on_a_cpu_is_labelled_as_a_stand_in(tmp_path: Path) -> None:
    said: list[str] = []
    prepare(tmp_path, FakeMachine(), said, name="lmdeploy")
    assert "engine class is a STAND-IN" in said[-1]


# ------------------------------------------------------------------ kinds and locks


def test_the_kind_is_that_of_the_machine_unless_it_is_named(tmp_path: Path) -> None:
    gpu, none = tmp_path, tmp_path / "nvidia0"
    assert device_kind("auto", gpu) == "cuda"
    assert device_kind("auto", none) == "cpu"
    assert device_kind("cpu", gpu) == "cpu"
    assert device_kind("cuda", none) == "cuda"
    with pytest.raises(PreflightError, match="expected one of auto, cpu, cuda, got 'tpu'"):
        device_kind("tpu", none)


def test_the_other_kind_does_not_take_the_machines_link(tmp_path: Path) -> None:
    gpu, none = tmp_path, tmp_path / "nvidia0"
    assert link_name("sglang", "cuda", gpu) == link_name("sglang", "cpu", none) == "sglang"
    assert link_name("sglang", "cpu", gpu) == "sglang-cpu"


def test_kinds_and_servers_have_folders_of_their_own() -> None:
    found = {fingerprint(name, kind) for name in NAMES for kind in ("cpu", "cuda")}
    assert len(found) == 4


@pytest.mark.parametrize("name", NAMES)
def test_a_cpu_lock_pins_everything_exactly_and_names_no_build_and_no_place(name: str) -> None:
    text = (ENVIRONMENTS / name / "cpu.txt").read_text()
    pins = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(pins) > 50
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin) for pin in pins)


@pytest.mark.parametrize("name", NAMES)
def test_both_kinds_install_the_version_that_the_projects_extra_names(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (extra,) = project["project"]["optional-dependencies"][name]
    assert (ENVIRONMENTS / name / "cuda.txt").read_text().split() == [extra]
    assert extra in (ENVIRONMENTS / name / "cpu.txt").read_text().splitlines()


# ------------------------------------------------------------------ the import hook


def in_python(folder: Path, script: str) -> str:
    (folder / "opd_import_hooks.py").write_bytes(
        (ENVIRONMENTS / "opd_import_hooks.py").read_bytes()
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_hook_runs_around_its_module_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "hooked.py").write_text("print('the module')")
    (tmp_path / "other.py").write_text("print('another')")
    script = (
        "from opd_import_hooks import around_import\n"
        "around_import('hooked', before=lambda: print('before'),\n"
        "              after=lambda module: print('after', module.__name__))\n"
        "import other, hooked, hooked"
    )
    assert in_python(tmp_path, script).split("\n")[:-1] == [
        *("another", "before", "the module", "after hooked")
    ]


def test_a_hooked_module_that_is_not_there_is_still_not_there(tmp_path: Path) -> None:
    script = (
        "from importlib.util import find_spec\nfrom opd_import_hooks import around_import\n"
        "around_import('nowhere')\nprint(find_spec('nowhere'))"
    )
    assert in_python(tmp_path, script) == "None\n"


def test_a_commands_output_is_told_line_by_line_and_kept() -> None:
    said: list[str] = []
    script = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"
    finished = run_command([sys.executable, "-uc", script], said.append)
    assert sorted(said) == ["one\n", "two\n"]
    assert finished.returncode == 3
    assert set(finished.output.split()) == {"one", "two"}
