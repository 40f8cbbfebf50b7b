"""What a run was made with: code, packages and machine of each of its attempts."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import opd_core
from opd_core.config import ExperimentConfig
from opd_core.lifecycle.gpu_memory import ask_driver
from opd_core.training.files import PROVENANCE_FILE
from opd_core.whole_file import write_whole

PACKAGES = (
    "opd-lab",
    "torch",
    "transformers",
    "tokenizers",
    "peft",
    "numpy",
    "ray",
    "prefect",
    "mlflow",
    "math-verify",
)
SERVERS = ("sglang", "lmdeploy")
LIMIT_S = 10.0
MOST_READ = 8 << 20
"""Bytes of untracked files whose content is looked at."""
CPU_FACTS = Path("/proc/cpuinfo")


def add_provenance(directory: Path, config: ExperimentConfig, started_at: float) -> None:
    """Add the attempt that began at ``started_at`` (unix time) to ``provenance.json``."""
    file = directory / PROVENANCE_FILE
    attempts = [*_earlier(file), provenance(config, started_at)]
    write_whole(file, json.dumps({"attempts": attempts}, indent=2, ensure_ascii=False))


def provenance(config: ExperimentConfig, started_at: float) -> dict[str, Any]:
    """Code, packages and machine of this process. What cannot be found out is empty."""
    folder = Path(opd_core.__file__).parent
    return {
        "started_at": started_at,
        "git_commit": _git(folder, "rev-parse", "HEAD").decode().strip(),
        "git_changes": uncommitted_changes(folder, apart=config.run.root_dir),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": _cpu(),
        "gpus": [row[0] for row in ask_driver("name", LIMIT_S)],
        "packages": _versions(PACKAGES, sys.path) | _server_versions(config),
    }


def uncommitted_changes(folder: Path, *, apart: Path) -> str:
    """A hash of what the working tree around ``folder`` has beyond its commit: changes, and files
    that are neither tracked nor ignored, without those in ``apart``; empty where there is nothing.
    Of files that do not fit into ``MOST_READ`` bytes only the name counts."""
    changes = [_git(folder, "diff", "HEAD")]
    names = _git(folder, "ls-files", "--others", "--exclude-standard", "-z", ":/").split(b"\0")
    left = MOST_READ
    for name in sorted(filter(None, names)):
        path = Path(os.path.realpath(folder / os.fsdecode(name)))
        if not path.is_relative_to(os.path.realpath(apart)):
            changes += [name, content := _content(path, left)]
            left -= len(content)
    return hashlib.blake2b(b"\0".join(changes), digest_size=8).hexdigest() if any(changes) else ""


def _content(path: Path, at_most: int) -> bytes:
    """Nothing of a file that is larger, or cannot be read."""
    try:
        small = path.is_file() and path.stat().st_size <= at_most
        return path.read_bytes() if small else b""
    except OSError:
        return b""


def git_commit(directory: Path) -> str:
    """The commit of the code in the run's latest attempt, with ``+changes`` if the working tree
    differed; ``unknown`` outside of one, empty where nothing was recorded."""
    attempts = _earlier(directory / PROVENANCE_FILE)
    if not attempts:
        return ""
    commit, changes = attempts[-1]["git_commit"], attempts[-1]["git_changes"]
    return (commit[:12] or "unknown") + ("+changes" if changes else "")


def _earlier(file: Path) -> list[Any]:
    """Those of earlier attempts; none if the file is not what it should be."""
    try:
        return list(json.loads(file.read_bytes())["attempts"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _git(folder: Path, *command: str) -> bytes:
    """What git says of the code's working tree; nothing where there is none."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},  # look, and leave the index alone
        )
    except (OSError, subprocess.SubprocessError):
        return b""
    return done.stdout if done.returncode == 0 else b""


def _cpu() -> str:
    try:
        lines = CPU_FACTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _versions(names: tuple[str, ...], path: list[str]) -> dict[str, str]:
    """Those that are installed there."""
    found = (
        (name, next(iter(metadata.distributions(name=name, path=path)), None)) for name in names
    )
    return {name: package.version for name, package in found if package is not None}


def _server_versions(config: ExperimentConfig) -> dict[str, str]:
    """Of the servers, in the environments of the interpreters that launch them."""
    versions: dict[str, str] = {}
    for python in _interpreters(config):
        libraries = Path(python).absolute().parent.parent.glob("lib/python3*/site-packages")
        versions |= _versions(SERVERS, [str(library) for library in libraries])
    return versions


def _interpreters(config: ExperimentConfig) -> Iterator[str]:
    servers = [
        r.launch for t in (config.opd.teachers if config.opd else ()) for r in t.all_replicas
    ]
    for server in (*servers, config.sampling.server):
        if server is not None and server.python is not None:
            yield server.python
