"""One running server of each kind, started as a run starts it, and what was measured of it.

The embedded server needs nothing. SGLang and LMDeploy run from `opd prepare`'s environments; where
one is missing the suite fails: `make test-servers` builds them first. What was measured is told at
the end, and written to the file that OPD_SERVERS_REPORT names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from deployments.prepare_servers import link_name
from opd_core.config import Backend, LaunchConfig, OPDTeacherConfig
from opd_core.lifecycle.errors import ChildDied
from opd_core.lifecycle.handle import Supervisor
from opd_core.lifecycle.ports import reserve_ports
from opd_core.lifecycle.records import RUN_MARKER, ChildSpec
from opd_core.quiet import DEFAULTS
from opd_core.recipe import cache_dir
from opd_core.scoring.client import TeacherLogprobClient
from opd_core.scoring.facts import TeacherFacts
from opd_core.serving import servers
from opd_core.serving.child import server_child
from opd_core.serving.commands import START_RACE
from opd_core.serving.readiness import wait_until_healthy

MODEL = Path(__file__).parents[2] / "deployments/recipes/assets/tiny/teacher"
KEY = "sk-conformance-not-to-be-seen"
STARTUP_LIMIT_S = 600.0
PACKAGES = ("sglang", "lmdeploy", "torch", "transformers")
LABELS: dict[Backend, str] = {
    "embedded": "our own server",
    "sglang": "the real server on a CPU (one kernel and two operator schemas stood in for)",
    "lmdeploy": "the real HTTP, RPC and processes; its ENGINE CLASS IS A CPU STAND-IN: numerics "
    "and scheduler are not LMDeploy's",
}

REPORT = pytest.StashKey[dict[str, dict[str, Any]]]()
Measure = Callable[[str, Any], None]


@dataclass
class Server:
    """A server on its way or up, and all that a test needs to talk to it and to end it."""

    backend: Backend
    teacher: OPDTeacherConfig
    facts: TeacherFacts
    spec: ChildSpec
    supervisor: Supervisor
    began: float = field(default_factory=time.monotonic)

    @property
    def endpoint(self) -> str:
        return str(self.teacher.all_replicas[0].endpoint)

    def client(self, *, key: str | None = KEY, context_length: int = 256) -> TeacherLogprobClient:
        facts = TeacherFacts(self.facts.vocab_size, context_length)
        return TeacherLogprobClient(self.teacher, facts, api_key=key)

    def still_alive(self) -> None:
        self.supervisor.raise_if_dead()

    def processes(self) -> list[Path]:
        """What carries the run's mark now, the supervisor's own process left out."""
        mark = f"{RUN_MARKER}={self.supervisor.run_id}\0".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                marked = mark in (process / "environ").read_bytes()
            except OSError:  # gone meanwhile, or somebody else's
                continue
            if marked and process.name != str(self.supervisor.pid):
                found.append(process)
        return found


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("embedded", marks=pytest.mark.slow),
        pytest.param("sglang", marks=[pytest.mark.slow, pytest.mark.servers]),
        pytest.param("lmdeploy", marks=[pytest.mark.slow, pytest.mark.servers]),
    ],
)
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.param
    return found


@pytest.fixture(scope="session")
def python(backend: Backend) -> str:
    """The interpreter of the server's environment."""
    return interpreter(backend)


def interpreter(backend: Backend) -> str:
    """That which `opd prepare` made; the test fails where it did not."""
    if backend == "embedded":
        return sys.executable
    path = cache_dir() / link_name(backend, "cpu") / "bin/python"
    if not path.exists():
        pytest.fail(f"no environment at {path}; run: opd prepare {backend} --device cpu")
    return str(path)


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest, backend: Backend, python: str) -> Measure:
    """Notes a figure of this server for the report."""
    return report_of(request.config, backend, python, backend)


def report_of(config: pytest.Config, name: str, python: str, backend: Backend) -> Measure:
    """A part of the report, and what notes its figures."""
    entry = config.stash.setdefault(REPORT, {}).setdefault(name, {})
    entry["what"] = LABELS[backend]
    entry["versions"] = _versions(python)

    def note(name: str, value: Any) -> None:
        entry[name] = value

    return note


def _versions(python: str) -> dict[str, str]:
    script = (
        "import json, platform, sys\nfrom importlib import metadata\n"
        "found = {'python': platform.python_version()}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = metadata.version(name)\n"
        "    except metadata.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([python, "-c", script, *PACKAGES], capture_output=True, check=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


@pytest.fixture(scope="session")
def launch(
    backend: Backend, python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Server]]:
    """Starts servers as a run does, and ends at last those that a test has not ended."""
    with ExitStack() as runs:

        def start() -> Server:
            run_dir = tmp_path_factory.mktemp(f"{backend}-")
            with reserve_ports(1) as reserved:
                (port,) = reserved.ports
            config: dict[str, Any] = {
                "model": str(MODEL),
                "python": python,
                "dtype": None if backend == "lmdeploy" else "float32",
                "cpu_threads": 1,
                "env": dict(DEFAULTS),
            }
            replica = {
                "backend": backend,
                "endpoint": f"http://127.0.0.1:{port}",
                "launch": config,
            }
            teacher = OPDTeacherConfig.model_validate({"name": "teacher", "replicas": [replica]})
            spec = server_child(
                servers.Server(teacher.name, 0, backend, LaunchConfig.model_validate(config)),
                port=port,
                key=KEY,
                cwd=run_dir,
                log=run_dir / "server.log",
            )
            run_id = f"servers-{backend}-{port}"
            supervisor = runs.enter_context(Supervisor.start(run_dir=run_dir, run_id=run_id))
            server = Server(backend, teacher, _facts(), spec, supervisor)
            supervisor.spawn(spec)
            return server

        yield start


def _facts() -> TeacherFacts:
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    return TeacherFacts(config["vocab_size"], config["max_position_embeddings"])


@pytest.fixture(scope="session")
def server(launch: Callable[[], Server], backend: Backend, measured: Measure) -> Server:
    """A healthy server, one for all tests of its kind."""
    # LMDeploy's main process may close the manager through which its engine process has just told
    # its port, before that call is answered; then the engine dies, mostly on a busy machine.
    starts = 3 if backend == "lmdeploy" else 1
    for start in range(1, starts + 1):
        server = launch()
        try:
            wait_until_healthy(
                server.endpoint,
                backend,
                limit_s=STARTUP_LIMIT_S,
                still_alive=server.still_alive,
            )
            break
        except ChildDied as died:
            if start == starts or START_RACE["lmdeploy"] not in str(died):
                raise
    measured("seconds until healthy", round(time.monotonic() - server.began, 1))
    measured("starts needed", start)
    return server


@pytest.fixture(scope="session")
def transformers_logprobs() -> Callable[[Sequence[int]], torch.Tensor]:
    """ids [N] -> log-probabilities [N - 1, V] after each prefix, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()

    def logprobs(ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=torch.tensor([list(ids)])).logits[0, :-1]
        return logits.float().log_softmax(-1)

    return logprobs


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The figures, and the file that pages can cite."""
    report = config.stash.get(REPORT, {})
    for name, entry in report.items():
        terminalreporter.section(f"server: {name}", sep="-")
        for key, value in entry.items():
            terminalreporter.write_line(f"{key}: {value}")
    target = os.environ.get("OPD_SERVERS_REPORT")
    if report and target:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
