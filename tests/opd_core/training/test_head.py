"""The private Ray head: on loopback, with its own ports, its token only in a file."""

from __future__ import annotations

import stat
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from opd_core.config import ExperimentConfig
from opd_core.training.head import PORT_FLAGS, HeadCommand, head_command, write_token

PORTS = tuple(range(30001, 30001 + len(PORT_FLAGS)))


def head(**changes: Any) -> HeadCommand:
    config = ExperimentConfig.model_validate(
        {
            "name": "test",
            "student": {"model": "/m", "devices": changes.pop("devices", ["cpu"])},
            "data": {"train": "/d.jsonl"},
            "sampling": {"max_new_tokens": 16, "actors": 2, **changes.pop("sampling", {})},
            "opd": {
                "teachers": [{"name": "teacher", "endpoint": "http://127.0.0.1:1"}],
                "default_teacher": "teacher",
            },
            "training": {
                "steps": 1,
                "prompts_per_step": 1,
                "learning_rate": 1e-6,
                "actors": 3,
            },
            "ray": changes,
        }
    )
    return head_command(config, PORTS, Path("/short/ray"), Path("/short/ray/token"))


def value_of(command: HeadCommand, flag: str) -> str:
    (value,) = [b for a, b in pairwise(command.argv) if a == flag]
    return value


def test_the_head_runs_in_the_foreground_of_this_interpreter() -> None:
    argv = head().argv
    assert argv[:2] == (sys.executable, "-m")
    assert {"--head", "--block"} <= set(argv)
    assert "stop" not in argv


def test_the_head_listens_on_loopback_only() -> None:
    command = head()
    assert value_of(command, "--node-ip-address") == "127.0.0.1"
    assert value_of(command, "--dashboard-host") == "127.0.0.1"


def test_every_port_is_one_that_was_reserved() -> None:
    command = head()
    assert tuple(int(value_of(command, flag)) for flag in PORT_FLAGS) == PORTS
    assert command.dashboard == f"http://127.0.0.1:{value_of(command, '--dashboard-port')}"


@pytest.mark.parametrize("ports", [(), PORTS[:-1], (*PORTS, 1)])
def test_as_many_ports_as_flags_are_needed(ports: tuple[int, ...]) -> None:
    config = ExperimentConfig.model_validate(
        {
            "name": "test",
            "student": {"model": "/m"},
            "data": {"train": "/d.jsonl"},
            "task": {"group_size": 2, "judge": "m:f"},
            "sampling": {"max_new_tokens": 16},
            "opd": None,
            "training": {"steps": 1, "prompts_per_step": 1, "learning_rate": 1e-6},
        }
    )
    with pytest.raises(ValueError, match=r"zip\(\)"):
        head_command(config, ports, Path("/t"), Path("/t/token"))


def test_a_cpu_is_there_for_every_actor_and_the_driver() -> None:
    assert value_of(head(), "--num-cpus") == "6"
    assert value_of(head(num_cpus=9), "--num-cpus") == "9"


def test_the_cluster_sees_the_students_gpus_only() -> None:
    on_gpus = head(devices=["0", "GPU-ab", "2"])
    assert value_of(on_gpus, "--num-gpus") == "3"
    assert on_gpus.env["CUDA_VISIBLE_DEVICES"] == "0,GPU-ab,2"
    on_cpu = head(devices=["cpu:0"])
    assert value_of(on_cpu, "--num-gpus") == "0"
    assert on_cpu.env["CUDA_VISIBLE_DEVICES"] == ""


def test_servers_that_sample_have_no_actor_and_keep_their_own_gpus() -> None:
    servers = {"engine": "sglang", "actors": 1}
    beside = {"server": {"memory_fraction": 0.4}}
    shared = head(devices=["0", "1", "2"], sampling={**servers, **beside})
    assert value_of(shared, "--num-cpus") == "4"
    assert shared.env["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    apart = head(devices=["0", "1", "2", "3"], sampling={**servers, "devices": ["1"]})
    assert value_of(apart, "--num-gpus") == "3"
    assert apart.env["CUDA_VISIBLE_DEVICES"] == "0,2,3"


def test_the_object_store_is_told_in_bytes() -> None:
    assert value_of(head(object_store_mb=128), "--object-store-memory") == str(128 * 1024 * 1024)


def test_the_token_is_named_by_its_file_and_usage_is_not_reported() -> None:
    command = head()
    assert command.env["RAY_AUTH_MODE"] == "token"
    assert command.env["RAY_AUTH_TOKEN_PATH"] == "/short/ray/token"
    assert command.env["RAY_USAGE_STATS_ENABLED"] == "0"
    assert "--disable-usage-stats" in command.argv


def test_every_flag_is_one_of_the_installed_ray() -> None:
    listing = (
        "from ray.scripts.scripts import cli; "
        "print(*(name for option in cli.commands['start'].params for name in option.opts))"
    )
    python = [sys.executable, "-W", "ignore", "-c", listing]  # a process that Ray may fill
    done = subprocess.run(python, capture_output=True, text=True, check=True)
    argv = head().argv
    given = {arg for arg in argv[argv.index("start") + 1 :] if arg.startswith("--")}
    assert set(PORT_FLAGS) < given
    assert given <= set(done.stdout.split())


def test_a_token_is_fresh_and_for_this_user_only(tmp_path: Path) -> None:
    first, second = (write_token(tmp_path / name) for name in ("a", "b"))
    assert first != second
    assert len(first) == 64
    for name, token in (("a", first), ("b", second)):
        assert (tmp_path / name).read_text(encoding="utf-8") == token
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_a_token_is_never_written_over_a_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("somebody's")
    with pytest.raises(FileExistsError):
        write_token(tmp_path / "token")
    assert (tmp_path / "token").read_text() == "somebody's"
