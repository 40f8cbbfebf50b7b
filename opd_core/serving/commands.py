"""Launch commands of the servers, one builder per backend.

A key never shows in argv: the server is then started through ``keyed_launch.py``, which appends it
inside the process. A launched server always binds to loopback.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from opd_core.config import Backend, LaunchConfig
from opd_core.lifecycle.records import StopSignal
from opd_core.serving.servers import HOST, SamplingRole

START_RACE: dict[Backend, str] = {"lmdeploy": "PyTorch ZMQ engine process is not alive"}
"""What a server says when it lost a race within its own start and would do well at another try
(seen in one of six starts of LMDeploy 0.18.0 on a busy machine)."""
KEYED_LAUNCH = Path(__file__).with_name("keyed_launch.py")
CPU_POOL_TOKENS = 32768
"""Tokens in SGLang's KV cache on a CPU, or one context if that is longer."""
CPU_POOL_LIMIT = 2 * CPU_POOL_TOKENS
"""As many at most for the rows that a server samples; what finds no room there waits."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How a server is started and how it likes to be stopped."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    stop_signal: StopSignal = "SIGTERM"
    grace_s: float = 15.0


def server_command(
    backend: Backend,
    launch: LaunchConfig,
    *,
    name: str,
    port: int,
    keyed: bool = False,
    sampling: SamplingRole | None = None,
) -> ServerCommand:
    """The command that serves ``launch.model`` as ``name`` on loopback ``port``.

    With ``keyed`` the server asks for the key in its environment variable ``OPD_API_KEY``; with
    ``sampling`` it samples the student (the embedded one only scores).
    """
    build = {"sglang": _sglang, "lmdeploy": _lmdeploy, "embedded": _embedded}[backend]
    module, flags, key_flag = build(launch, name, port, sampling)
    python = launch.python or sys.executable
    start = [python, "-m", module]
    if keyed and key_flag:
        start = [python, str(KEYED_LAUNCH), module, key_flag]
    # At level info it logs its arguments, the key among them. The last one counts.
    quiet = ("--log-level", "warning") if keyed and backend == "sglang" else ()
    return ServerCommand(
        argv=(*start, *flags, *launch.extra_args, *quiet),
        env={
            **_device_env(backend, launch),
            **(_sampling_env(backend, launch) if sampling else {}),
            **launch.env,
        },
        # SGLang drains for as long as requests come after SIGTERM; SIGINT ends it in seconds.
        stop_signal="SIGINT" if backend == "sglang" else "SIGTERM",
        grace_s=15.0 if backend == "embedded" else 30.0,
    )


def uses_gpu(launch: LaunchConfig) -> bool:
    """Whether the server's devices are GPUs."""
    return not launch.devices[0].startswith("cpu")


Built = tuple[str, list[str], str]
"""A server's module, its flags, and the flag of its key."""


def _sglang(launch: LaunchConfig, name: str, port: int, sampling: SamplingRole | None) -> Built:
    flags = ["--model-path", launch.model, "--served-model-name", name]
    flags += ["--host", HOST, "--port", str(port), "--tp-size", str(launch.tp_size)]
    flags += _given("--dtype", launch.dtype)
    flags += _given("--context-length", launch.context_length)
    flags += _given("--mem-fraction-static", launch.memory_fraction)
    flags += _given("--chunked-prefill-size", launch.prefill_tokens)
    # Ids in, ids out. Its warm-up would send a text, and end the server if that has no tokens.
    flags += ["--skip-tokenizer-init"]
    context, rows = launch.context_length or 0, 0
    if sampling is not None:
        rows = sampling.max_rows
        # The plain policy: nothing of the model's own generation config.
        flags += ["--max-running-requests", str(rows), "--sampling-defaults", "openai"]
        if sampling.shares_devices:  # it gives its memory away while the student trains
            flags += ["--enable-memory-saver"]
    if not uses_gpu(launch):
        # Without --sleep-on-idle an idle scheduler keeps a whole core busy; without a number of
        # tokens the KV cache takes most of the machine's memory.
        pool = max(CPU_POOL_TOKENS, min(rows * context, CPU_POOL_LIMIT), context)
        flags += ["--device", "cpu", "--attention-backend", "torch_native"]
        flags += ["--sampling-backend", "pytorch", "--sleep-on-idle"]
        flags += ["--max-total-tokens", str(pool)]
    return "sglang.launch_server", flags, "--api-key"


def _lmdeploy(launch: LaunchConfig, name: str, port: int, sampling: SamplingRole | None) -> Built:
    # Only the PyTorch engine in raw_logprobs mode gives normalised input logprobs.
    flags = ["serve", "api_server", launch.model, "--model-name", name]
    flags += ["--server-name", HOST, "--server-port", str(port)]
    flags += ["--backend", "pytorch", "--logprobs-mode", "raw_logprobs"]
    flags += ["--tp", str(launch.tp_size)]
    if launch.tp_size > 1 and sampling is None:  # its default is Ray
        flags += ["--distributed-executor-backend", "mp"]
    flags += _given("--dtype", launch.dtype)
    flags += _given("--session-len", launch.context_length)
    flags += _given("--cache-max-entry-count", launch.memory_fraction)
    flags += _given("--max-prefill-token-num", launch.prefill_tokens)
    rows = None if uses_gpu(launch) else 8  # it asks CUDA for its default
    if sampling is not None:
        rows = sampling.max_rows
        # The plain policy: nothing of the model's own generation config.
        flags += ["--enable-abort-handling", "--generation-config", "lmdeploy"]
    flags += _given("--max-batch-size", rows)
    if not uses_gpu(launch):
        flags += ["--disable-metrics"]  # the CPU stand-in of its engine has none
    return "lmdeploy", flags, "--api-keys"


def _embedded(launch: LaunchConfig, name: str, port: int, sampling: SamplingRole | None) -> Built:
    flags = ["--model-path", launch.model, "--served-model-name", name]
    flags += ["--host", HOST, "--port", str(port)]
    flags += ["--device", "cuda" if uses_gpu(launch) else "cpu"]
    flags += _given("--dtype", launch.dtype)
    flags += _given("--context-length", launch.context_length)
    flags += _given("--max-running-tokens", launch.prefill_tokens)
    return "opd_core.serving.embedded", flags, ""  # reads OPD_API_KEY itself


def _given(flag: str, value: object) -> list[str]:
    return [] if value is None else [flag, str(value)]


def _sampling_env(backend: Backend, launch: LaunchConfig) -> dict[str, str]:
    if backend == "sglang":  # else its logprobs are of what the temperature made
        return {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    if uses_gpu(launch):  # only this executor takes weights; a Ray of its own, not the trainer's
        return {"LMDEPLOY_EXECUTOR_BACKEND": "ray", "RAY_ADDRESS": "local"}
    return {}


def _device_env(backend: Backend, launch: LaunchConfig) -> dict[str, str]:
    env = {"CUDA_VISIBLE_DEVICES": ",".join(launch.devices) if uses_gpu(launch) else ""}
    if backend == "sglang" and not uses_gpu(launch):
        env["SGLANG_USE_CPU_ENGINE"] = "1"  # else it takes the Triton branch
        env["OMP_NUM_THREADS"] = "1"  # its processes fight over cores, many times slower
    if launch.cpu_threads is not None:
        env["OMP_NUM_THREADS"] = str(launch.cpu_threads)
    return env
