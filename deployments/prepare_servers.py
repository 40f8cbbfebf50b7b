"""Virtual environments of the teacher servers: SGLang and LMDeploy pin their own torch.

``opd prepare sglang`` builds ``<cache>/sglang-<hash>``, whole or not at all, and points the stable
link ``<cache>/sglang`` at it; a recipe names ``$OPD_CACHE/sglang/bin/python``. The hash is over
all that goes into the environment (``deployments/environments``), so a changed lock is a new
folder, and the old one stays until somebody removes it.

For a CPU a full lock is installed, and stand-ins for the little that only CUDA builds have. For
CUDA the server is installed as it is published. That kind has not been run yet.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from opd_core.errors import PreflightError

ENVIRONMENTS = Path(__file__).with_name("environments")
GPU = Path("/dev/nvidia0")
DEVICES = ("auto", "cpu", "cuda")
TELL_EVERY = 25

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended; ``output`` is the end of what it wrote."""

    returncode: int
    output: str


Run = Callable[[Sequence[str], Tell], Finished]


@dataclass(frozen=True, slots=True)
class Server:
    """What is particular to one server: how much it installs, a proof that it is whole, a note."""

    gigabytes: float
    proof: str
    cpu_note: str


SERVERS = {
    "sglang": Server(
        gigabytes=2.3,
        proof="import torchvision, sgl_kernel, sglang.srt.server_args",
        cpu_note="on a CPU SGLang computes in plain torch: right, but slow",
    ),
    "lmdeploy": Server(
        gigabytes=2.7,
        proof="from lmdeploy.pytorch.engine import Engine; import opd_cpu_engine as stand_in; "
        "assert Engine is stand_in.CpuEngine",
        cpu_note="on a CPU LMDeploy's engine class is a STAND-IN: its command line, HTTP, RPC and "
        "processes are LMDeploy's; numbers and scheduler are not",
    ),
}


def run_command(command: Sequence[str], on_line: Tell) -> Finished:
    """Run to the end; each line of output goes to ``on_line`` as it comes."""
    last: deque[str] = deque(maxlen=30)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line)
            on_line(line)
    return Finished(process.returncode, "".join(last).strip())


def prepare_server(
    name: str, cache: Path, tell: Tell, device: str = "auto", run: Run = run_command
) -> Path:
    """Build the environment of server ``name`` if it is not there; returns its stable link.

    Two calls at once build it once. Raises :class:`PreflightError` with pip's own words.
    """
    kind = device_kind(device)
    folder = cache / f"{name}-{fingerprint(name, kind)}"
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(folder.name + ".lock"), tell):
        if (folder / ".complete").exists():
            tell(f"already prepared: {folder}")
        else:
            _build(name, kind, folder, tell, run)
            (folder / ".complete").touch()
        link = _point(cache / link_name(name, kind), folder)
    tell(f"prepared for {kind}: launch.python: {link}/bin/python")
    tell(f"note: {_note(name, kind)}")
    return link


def device_kind(device: str, gpu: Path = GPU) -> str:
    """``cpu`` or ``cuda``; ``auto`` means cuda where there is an NVIDIA device."""
    if device not in DEVICES:
        raise PreflightError(f"--device: expected one of {', '.join(DEVICES)}, got {device!r}")
    if device == "auto":
        return "cuda" if gpu.exists() else "cpu"
    return device


def link_name(name: str, kind: str, gpu: Path = GPU) -> str:
    """The server's name for the kind that suits this machine, ``NAME-KIND`` for the other one."""
    return name if kind == device_kind("auto", gpu) else f"{name}-{kind}"


def fingerprint(name: str, kind: str) -> str:
    """Names all that goes into an environment: its files, its kind, Python and machine."""
    tag = f"{kind} {platform.python_version()} {platform.machine()}"
    digest = hashlib.sha256(tag.encode())
    for file in _ingredients(name, kind):
        digest.update(f"\n{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _ingredients(name: str, kind: str) -> list[Path]:
    requirements = ENVIRONMENTS / name / f"{kind}.txt"
    return [requirements, *(_stand_ins(name) if kind == "cpu" else [])]


def _stand_ins(name: str) -> list[Path]:
    own = sorted((ENVIRONMENTS / name / "stand_ins").glob("*.py"))
    return [ENVIRONMENTS / "opd_import_hooks.py", *own]


def _build(name: str, kind: str, folder: Path, tell: Tell, run: Run) -> None:
    began = time.monotonic()
    tell(f"making {folder} with Python {platform.python_version()}")
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted build left
    _must(run([sys.executable, "-m", "venv", str(folder)], _ignore), f"no environment in {folder}")
    _install(name, kind, folder, tell, run)
    if kind == "cpu":
        _add_stand_ins(name, folder)
    tell("  proving that it imports")
    proof = SERVERS[name].proof if kind == "cpu" else "import torch"
    _must(
        run([str(folder / "bin/python"), "-c", proof], _ignore),
        f"{name} was installed but does not import",
        "on a CPU pip must find the CPU build of torch: name its index in PIP_EXTRA_INDEX_URL",
    )
    tell(f"  done in {time.monotonic() - began:.0f} s")


def _install(name: str, kind: str, folder: Path, tell: Tell, run: Run) -> None:
    requirements = ENVIRONMENTS / name / f"{kind}.txt"
    pip = [str(folder / "bin/python"), "-um", "pip", "install", "--disable-pip-version-check"]
    pip += ["--progress-bar", "off", "-r", str(requirements)]
    if kind == "cpu":  # the lock names everything; resolving would pull in what needs CUDA
        pip += ["--no-deps"]
        count = len(_pins(requirements))
        tell(f"  installing {count} packages (about {SERVERS[name].gigabytes} GB, some minutes)")
    else:
        tell(f"  installing {', '.join(_pins(requirements))} and all that it needs")
    _must(
        run(pip, _progress(tell)),
        f"pip could not install {requirements.name} of {name}",
        "check the network and pip's index settings",
    )


def _pins(requirements: Path) -> list[str]:
    lines = requirements.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _progress(tell: Tell) -> Tell:
    """Tells every so many packages, and when pip begins to unpack them."""
    fetched = 0

    def on_line(line: str) -> None:
        nonlocal fetched
        if line.startswith(("Collecting ", "Processing ")):
            fetched += 1
            if fetched % TELL_EVERY == 0:
                tell(f"  {fetched} packages fetched")
        elif line.startswith("Installing collected"):
            tell(f"  {fetched} packages fetched, unpacking")

    return on_line


def _add_stand_ins(name: str, folder: Path) -> None:
    base = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=base))
    for file in _stand_ins(name):
        shutil.copyfile(file, site / file.name)
    # Python runs this line whenever it starts here, in spawned processes too.
    (site / "opd_stand_ins.pth").write_text("import opd_stand_ins\n", encoding="utf-8")


def _must(finished: Finished, failed: str, advice: str = "see the words above") -> None:
    if finished.returncode != 0:
        raise PreflightError(
            f"{failed} (exit status {finished.returncode}):\n{finished.output[-1500:]}\n"
            f"{advice}, then run the same command again"
        )


def _ignore(line: str) -> None:
    """Nothing is told of this line."""


@contextmanager
def _lock(path: Path, tell: Tell) -> Iterator[None]:
    """Held by one process at a time; freed by the kernel however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another process prepares it; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _point(link: Path, folder: Path) -> Path:
    """Let ``link`` mean ``folder``: before and after, never nothing in between."""
    if link.exists() and not link.is_symlink():
        raise PreflightError(f"expected a link or nothing at {link}; move what is there away")
    fresh = link.with_name(f"{folder.name}.{os.getpid()}.link")
    fresh.symlink_to(folder.name)
    os.replace(fresh, link)
    return link


def _note(name: str, kind: str) -> str:
    if kind == "cpu":
        return SERVERS[name].cpu_note
    return f"{name} for CUDA is installed as published; this project has not run that kind yet"
