"""The command of a private Ray head: loopback only, own ports, own temp dir, own token.

``ray stop`` is machine-wide and never used: the head is ended by a signal to it alone.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opd_core.config import ExperimentConfig

PORT_FLAGS = (
    "--port",
    "--dashboard-port",
    "--ray-client-server-port",
    "--node-manager-port",
    "--object-manager-port",
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--runtime-env-agent-port",
    "--metrics-export-port",
)
"""One reserved port for each; two clusters on a host must share none of them."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class HeadCommand:
    """How to start the head, and where its Jobs API will answer. ``env`` holds no secret: the token
    is in a file that only this user can read."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    dashboard: str


def head_command(
    config: ExperimentConfig, ports: tuple[int, ...], temp_dir: Path, token_file: Path
) -> HeadCommand:
    """The head for a run; ``ports`` as many as :data:`PORT_FLAGS`."""
    gpus = [device for device in config.training_devices if not device.startswith("cpu")]
    cpus = config.ray.num_cpus or config.training.actors + config.sampling_actors + 1
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    argv += ["--node-ip-address", LOOPBACK, "--dashboard-host", LOOPBACK]
    for flag, port in zip(PORT_FLAGS, ports, strict=True):
        argv += [flag, str(port)]
    argv += ["--min-worker-port", "0", "--max-worker-port", "0"]  # any free ones
    argv += ["--num-cpus", str(cpus), "--num-gpus", str(len(gpus))]
    argv += ["--object-store-memory", str(config.ray.object_store_mb * 2**20)]
    argv += ["--temp-dir", str(temp_dir), "--disable-usage-stats", "--log-color", "false"]
    env = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_process_group_cleanup_enabled": "1",
        # Else Ray takes 127.0.0.1 for the host's own address and listens there, or everywhere.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Else SIGTERM waits half a minute for a job that is being ended anyway.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "OMP_NUM_THREADS": str(config.student.cpu_threads),
    }
    return HeadCommand(tuple(argv), env, f"http://{LOOPBACK}:{ports[1]}")


def write_token(path: Path) -> str:
    """A fresh token in a file of mode 0600."""
    token = secrets.token_hex(32)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(token)
    return token
