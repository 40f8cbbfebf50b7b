"""Command lines of the servers: the right flags, loopback only, and never a key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from opd_core.config import Backend, LaunchConfig
from opd_core.serving.commands import KEYED_LAUNCH, ServerCommand, server_command
from opd_core.serving.servers import SamplingRole

BACKENDS: tuple[Backend, ...] = ("sglang", "lmdeploy", "embedded")
KEY = "sk-not-to-be-seen"


def command(
    backend: Backend, *, keyed: bool = False, sampling: SamplingRole | None = None, **launch: Any
) -> ServerCommand:
    config = LaunchConfig(**{"model": "/models/teacher", **launch})
    return server_command(
        backend, config, name="teacher", port=13141, keyed=keyed, sampling=sampling
    )


def flags(found: ServerCommand) -> dict[str, str]:
    """Each ``--flag`` with the word after it."""
    return {a: b for a, b in pairwise((*found.argv, "")) if a.startswith("--")}


GPU: dict[str, Any] = {
    "devices": ("6", "7"),
    "tp_size": 2,
    "dtype": "bfloat16",
    "context_length": 18438,
    "memory_fraction": 0.6,
    "prefill_tokens": 4096,
}


def test_sglang_gets_its_own_names_for_every_setting() -> None:
    found = command("sglang", **GPU)
    assert found.argv[:3] == (sys.executable, "-m", "sglang.launch_server")
    assert flags(found) == {
        "--model-path": "/models/teacher",
        "--served-model-name": "teacher",
        "--host": "127.0.0.1",
        "--port": "13141",
        "--tp-size": "2",
        "--dtype": "bfloat16",
        "--context-length": "18438",
        "--mem-fraction-static": "0.6",
        "--chunked-prefill-size": "4096",
        "--skip-tokenizer-init": "",
    }


def test_sglang_on_a_cpu_is_told_so_and_sleeps_when_idle() -> None:
    found = command("sglang")
    given = flags(found)
    assert given["--device"] == "cpu"
    assert given["--attention-backend"] == "torch_native"
    assert given["--sampling-backend"] == "pytorch"
    assert "--sleep-on-idle" in given
    assert found.env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in command("sglang", devices=("0",)).env


def test_sglang_on_a_cpu_keeps_its_cache_small_but_never_below_the_context() -> None:
    assert flags(command("sglang"))["--max-total-tokens"] == "32768"
    assert flags(command("sglang", context_length=99999))["--max-total-tokens"] == "99999"
    assert "--max-total-tokens" not in command("sglang", devices=("0",)).argv


def test_sglang_on_a_cpu_computes_on_one_thread_unless_told_otherwise() -> None:
    assert command("sglang").env["OMP_NUM_THREADS"] == "1"
    assert command("sglang", cpu_threads=2).env["OMP_NUM_THREADS"] == "2"
    assert command("sglang", env={"OMP_NUM_THREADS": "3"}).env["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in command("sglang", devices=("0",)).env


def test_lmdeploy_gets_its_own_names_and_gives_normalised_logprobs() -> None:
    found = command("lmdeploy", **GPU)
    assert found.argv[:6] == (
        *(sys.executable, "-m", "lmdeploy", "serve", "api_server"),
        "/models/teacher",
    )
    assert flags(found) == {
        "--model-name": "teacher",
        "--server-name": "127.0.0.1",
        "--server-port": "13141",
        "--backend": "pytorch",
        "--logprobs-mode": "raw_logprobs",
        "--tp": "2",
        "--distributed-executor-backend": "mp",
        "--dtype": "bfloat16",
        "--session-len": "18438",
        "--cache-max-entry-count": "0.6",
        "--max-prefill-token-num": "4096",
    }


def test_lmdeploy_chooses_its_executor_itself_on_one_device() -> None:
    assert "--distributed-executor-backend" not in command("lmdeploy", devices=("0",)).argv


def test_lmdeploy_on_a_cpu_does_not_ask_cuda_for_a_batch_size() -> None:
    found = command("lmdeploy")
    assert flags(found)["--max-batch-size"] == "8"
    assert "--disable-metrics" in found.argv
    assert (
        not {"--max-batch-size", "--disable-metrics"}
        & flags(command("lmdeploy", devices=("0",))).keys()
    )


def test_the_embedded_server_gets_what_it_knows() -> None:
    launch: dict[str, Any] = {"dtype": "float32", "context_length": 512, "prefill_tokens": 4096}
    found = command("embedded", **launch)
    assert found.argv[:3] == (sys.executable, "-m", "opd_core.serving.embedded")
    assert flags(found) == {
        "--model-path": "/models/teacher",
        "--served-model-name": "teacher",
        "--host": "127.0.0.1",
        "--port": "13141",
        "--device": "cpu",
        "--dtype": "float32",
        "--context-length": "512",
        "--max-running-tokens": "4096",
    }
    assert flags(command("embedded", devices=("0",)))["--device"] == "cuda"


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_set_is_left_to_the_server(backend: Backend) -> None:
    given = flags(command(backend))
    unset = {"--dtype", "--context-length", "--session-len", "--mem-fraction-static"}
    unset |= {"--cache-max-entry-count", "--chunked-prefill-size", "--max-prefill-token-num"}
    assert not unset & given.keys()


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_server_always_listens_on_loopback(backend: Backend, keyed: bool) -> None:
    argv = command(backend, keyed=keyed).argv
    host = "--server-name" if backend == "lmdeploy" else "--host"
    assert [b for a, b in pairwise(argv) if a == host] == ["127.0.0.1"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_extra_arguments_come_last_so_that_they_win(backend: Backend) -> None:
    extra = ("--log-level", "debug")
    for keyed in {False, backend != "sglang"}:
        assert command(backend, extra_args=extra, keyed=keyed).argv[-2:] == extra


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_servers_own_interpreter_starts_it(backend: Backend) -> None:
    for keyed in (True, False):
        assert command(backend, python="/venv/bin/python", keyed=keyed).argv[0] == (
            "/venv/bin/python"
        )


# ------------------------------------------------------------------ servers that sample

APART, SHARED = SamplingRole(64, shares_devices=False), SamplingRole(64, shares_devices=True)


def added(backend: Backend, sampling: SamplingRole, **launch: Any) -> dict[str, str]:
    """The flags that a server gets because it samples."""
    alone, with_it = command(backend, **launch), command(backend, sampling=sampling, **launch)
    return {flag: flags(with_it)[flag] for flag in flags(with_it).keys() - flags(alone).keys()}


def test_sglang_samples_the_plain_policy_with_as_many_rows_as_told() -> None:
    told = {"--max-running-requests": "64", "--sampling-defaults": "openai"}
    assert added("sglang", APART, **GPU) == told
    assert added("sglang", SHARED, **GPU) == {**told, "--enable-memory-saver": ""}


def test_lmdeploy_samples_the_plain_policy_and_can_be_interrupted() -> None:
    told = {
        "--max-batch-size": "64",
        "--enable-abort-handling": "--generation-config",
        "--generation-config": "lmdeploy",
    }
    assert added("lmdeploy", APART, devices=("0",)) == told
    assert added("lmdeploy", SHARED, devices=("0",)) == told
    assert flags(command("lmdeploy", sampling=APART))["--max-batch-size"] == "64"


@pytest.mark.parametrize(
    ("context", "tokens"), [(100, "32768"), (600, "38400"), (2000, "65536"), (99999, "99999")]
)
def test_sglang_on_a_cpu_has_room_for_its_rows_within_reason(context: int, tokens: str) -> None:
    found = command("sglang", sampling=APART, context_length=context)
    assert flags(found)["--max-total-tokens"] == tokens


# ------------------------------------------------------------------ devices, signals


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_server_sees_its_devices_only(backend: Backend) -> None:
    assert command(backend, devices=("6", "GPU-ab")).env["CUDA_VISIBLE_DEVICES"] == "6,GPU-ab"
    for cpu in ("cpu", "cpu:1"):
        assert command(backend, devices=(cpu,)).env["CUDA_VISIBLE_DEVICES"] == ""


def test_threads_and_own_variables_reach_the_environment() -> None:
    env = command("embedded", cpu_threads=2, env={"LEVEL": "1"}).env
    assert env == {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2", "LEVEL": "1"}
    assert "OMP_NUM_THREADS" not in command("embedded").env


def test_sglang_is_stopped_by_an_interrupt_and_the_others_by_a_termination() -> None:
    # After SIGTERM SGLang drains without a limit, and still takes new requests.
    signals = {backend: command(backend).stop_signal for backend in BACKENDS}
    assert signals == {"sglang": "SIGINT", "lmdeploy": "SIGTERM", "embedded": "SIGTERM"}


def test_the_real_servers_get_half_a_minute_to_end() -> None:
    assert [command(backend).grace_s >= 30 for backend in BACKENDS[:2]] == [True, True]
    assert command("embedded").grace_s > 0


# ------------------------------------------------------------------ keys


@pytest.mark.parametrize(
    ("backend", "module", "flag"),
    [("sglang", "sglang.launch_server", "--api-key"), ("lmdeploy", "lmdeploy", "--api-keys")],
)
def test_a_keyed_server_is_started_through_the_key_launcher(
    backend: Backend, module: str, flag: str
) -> None:
    found = command(backend, keyed=True)
    assert found.argv[:4] == (sys.executable, str(KEYED_LAUNCH), module, flag)
    rest = [arg for arg in found.argv[4:] if arg not in ("--log-level", "warning")]
    assert rest == list(command(backend).argv[3:])


def test_the_embedded_server_reads_its_key_itself() -> None:
    assert command("embedded", keyed=True) == command("embedded")


def test_a_keyed_sglang_does_not_log_its_arguments() -> None:
    # At level info its first line is the whole of its arguments, the key among them.
    assert flags(command("sglang", keyed=True))["--log-level"] == "warning"
    assert "--log-level" not in command("sglang").argv


def test_nor_does_it_when_it_is_asked_to() -> None:
    found = command("sglang", keyed=True, extra_args=("--log-level=debug", "--log-level", "info"))
    assert found.argv[-2:] == ("--log-level", "warning")


STUB = """\
import json, os, sys
seen = {
    "name": __name__,
    "argv": sys.argv[1:],
    "cmdline": open("/proc/self/cmdline").read(),
    "key": os.environ.get("OPD_API_KEY"),
    "path": sys.path,
}
print(json.dumps(seen))
"""


def run_keyed(folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (folder / "stub_server").mkdir()
    (folder / "stub_server" / "__init__.py").touch()
    (folder / "stub_server" / "__main__.py").write_text(STUB)
    argv = [sys.executable, str(KEYED_LAUNCH), "stub_server", "--api-key", "--port", "1"]
    path = {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"]}
    return subprocess.run(argv, env=path | env, capture_output=True, text=True, check=False)


def test_the_key_reaches_the_server_but_not_its_command_line(tmp_path: Path) -> None:
    done = run_keyed(tmp_path, {"OPD_API_KEY": KEY})
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["name"] == "__main__"
    assert seen["argv"] == ["--port", "1", "--api-key", KEY]
    assert "--port\0" in seen["cmdline"]
    assert KEY not in seen["cmdline"]
    assert seen["key"] is None  # what the server starts does not inherit it
    assert str(KEYED_LAUNCH.parent) not in seen["path"]
    assert str(tmp_path) in seen["path"]


@pytest.mark.parametrize("env", [{}, {"OPD_API_KEY": ""}])
def test_a_keyed_server_does_not_start_without_its_key(tmp_path: Path, env: dict[str, str]) -> None:
    done = run_keyed(tmp_path, env)
    assert done.returncode == 1
    assert "stub_server: expected the key in the environment variable OPD_API_KEY" in done.stderr
    assert done.stdout == ""
