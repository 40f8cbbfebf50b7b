"""The rehearsal of endings: what it sees from outside, what it does, what it says."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli import app
from deployments.drill.catalogue import ENDINGS, MOMENTS, ending_named, moment_named
from deployments.drill.rehearsal import DrillReport
from deployments.drill.resuming import why_not_resumable
from deployments.drill.striking import DrillError, strike
from deployments.drill.watching import FIRST_STEP, Leftovers, RunView, run_in
from opd_core.lifecycle.ledger import LEDGER_FILE, Ledger
from opd_core.lifecycle.records import Receipt
from opd_core.training.files import TEACHERS_FILE
from opd_core.training.phase import PHASES, tell_phase

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


class Scene:
    """A run directory whose ledger a test writes, and processes that play its parts."""

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "runs" / "tiny-1"
        self.directory.mkdir(parents=True)
        (self.directory / "run.json").write_text("{}")
        self.run = RunView(self.directory)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ledger = Ledger.open(self.directory / LEDGER_FILE, "tiny-1")

    def process(self, **environment: str) -> int:
        self.processes.append(subprocess.Popen(SLEEP, env={**os.environ, **environment}))
        return self.processes[-1].pid

    def begin(self, owner: int = 0, supervisor: int = 0) -> None:
        pids = {"owner_pid": owner, "supervisor_pid": supervisor}
        self.ledger.append("run_started", run_id="tiny-1", **pids)

    def order(self, kind: str, port: int = 1, scratch: tuple[Path, ...] = ()) -> None:
        folders = [str(path) for path in scratch]
        self.ledger.append("child_starting", name=kind, kind=kind, ports=[port], scratch=folders)

    def started(self, kind: str, pid: int) -> None:
        self.ledger.append("child_started", name=kind, kind=kind, pid=pid)

    def close(self) -> None:
        self.ledger.close()
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.close()


@pytest.fixture
def healthy_port() -> Iterator[int]:
    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Healthy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def moments_of(run: RunView) -> set[str]:
    return {moment.name for moment in MOMENTS if run.reached(moment.name)}


def test_the_moments_of_a_start_are_told_apart(scene: Scene, healthy_port: int) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens there
        silent = unused.getsockname()[1]
        assert moments_of(scene.run) == set()
        scene.begin()
        assert moments_of(scene.run) == {"before"}
        scene.order("ray")
        assert moments_of(scene.run) == {"before"}
        scene.order("teacher", silent)
        assert moments_of(scene.run) == set()
        scene.started("teacher", 1)
        assert moments_of(scene.run) == {"loading"}
    (scene.directory / TEACHERS_FILE).write_text("{}")
    assert moments_of(scene.run) == set()


def test_a_teacher_that_answers_is_being_proven(scene: Scene, healthy_port: int) -> None:
    scene.begin()
    scene.order("teacher", healthy_port)
    scene.started("teacher", 1)
    assert moments_of(scene.run) == {"readiness"}


@pytest.mark.parametrize("phase", PHASES)
def test_the_phases_of_a_train_step_are_moments(scene: Scene, phase: str) -> None:
    tell_phase(scene.directory, phase, FIRST_STEP - 1)  # type: ignore[arg-type]
    assert moments_of(scene.run) == set()
    tell_phase(scene.directory, phase, FIRST_STEP)  # type: ignore[arg-type]
    assert moments_of(scene.run) == {phase}
    scene.ledger.append("teardown_begun", cause="completed")
    assert moments_of(scene.run) == {phase, "teardown"}


def test_the_look_finds_what_is_left_and_nothing_else(scene: Scene, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        scene.begin()
        scene.order("ray", port, (scratch,))
        of_the_run = scene.process(OPD_RUN_ID="tiny-1")
        scene.process(OPD_RUN_ID="tiny-11")
        left = scene.run.leftovers()
        assert [each.split()[0] for each in left.processes] == [str(of_the_run)]
        assert (left.ports, left.folders) == ((port,), (str(scratch),))
    os.kill(of_the_run, signal.SIGKILL)  # a zombie is nothing
    os.waitid(os.P_PID, of_the_run, os.WEXITED | os.WNOWAIT)
    scratch.rmdir()
    assert scene.run.leftovers() == Leftovers()


def test_a_process_in_the_rays_folder_is_of_the_run(scene: Scene, tmp_path: Path) -> None:
    scene.order("ray", scratch=(tmp_path / "opd-ray-1",))
    argument = f"--temp-dir={tmp_path / 'opd-ray-1'}"
    scene.processes.append(subprocess.Popen([*SLEEP, argument]))
    assert list(scene.run.processes()) == [scene.processes[-1].pid]


@pytest.mark.parametrize(
    ("ending", "signum"),
    [
        ("kill-flow", signal.SIGKILL),
        ("interrupt", signal.SIGINT),
        ("terminate", signal.SIGTERM),
        ("hangup", signal.SIGHUP),
    ],
)
def test_a_signal_goes_to_the_flow_alone(scene: Scene, ending: str, signum: signal.Signals) -> None:
    ready = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); print(flush=True); "
    flow = subprocess.Popen(
        [sys.executable, "-c", f"{ready} time.sleep(60)"], stdout=subprocess.PIPE
    )
    scene.processes.append(flow)
    assert flow.stdout is not None
    with flow.stdout:
        flow.stdout.readline()
        scene.begin(flow.pid, scene.process())
        strike(ending, scene.run)
        assert flow.wait(10) == -signum
    assert scene.processes[-1].poll() is None


def test_flow_and_supervisor_die_together(scene: Scene) -> None:
    scene.begin(scene.process(), scene.process())
    strike("kill-both", scene.run)
    assert [process.wait(10) for process in scene.processes] == [-signal.SIGKILL] * 2


def test_the_newest_teacher_is_stopped_or_killed(scene: Scene) -> None:
    scene.started("teacher", scene.process())
    scene.started("teacher", scene.process())
    strike("stop-teacher", scene.run)
    stopped = os.waitid(os.P_PID, scene.processes[1].pid, os.WSTOPPED | os.WEXITED)
    assert stopped is not None
    assert stopped.si_status == signal.SIGSTOP
    strike("kill-teacher", scene.run)
    assert scene.processes[1].wait(10) == -signal.SIGKILL
    assert scene.processes[0].poll() is None


@pytest.mark.parametrize(
    "ending", ["kill-teacher", "kill-ray-head", "kill-actor", "kill-gcs", "kill-raylet"]
)
def test_what_does_not_run_cannot_be_killed(scene: Scene, ending: str) -> None:
    with pytest.raises(DrillError, match="yet"):
        strike(ending, scene.run)


def test_a_folder_without_a_run_cannot_go_on(scene: Scene) -> None:
    assert "config.json" in why_not_resumable(scene.directory)
    assert run_in(scene.directory.parent / "nowhere") is None


def test_only_a_run_that_left_and_lost_nothing_is_clean() -> None:
    receipt = Receipt("tiny-1", "owner died", True, 1.0, (), (), (), ())
    report = DrillReport("kill-flow", "sampling", receipt=receipt, settled=True)
    assert report.clean
    faults = {
        "receipt": None,
        "left": Leftovers(ports=(1,)),
        "settled": False,
        "not_resumable": "it is gone",
    }
    for name, value in faults.items():
        good = getattr(report, name)
        setattr(report, name, value)
        assert not report.clean, name
        assert json.loads(json.dumps(report.to_json()))["clean"] is False
        setattr(report, name, good)


def test_the_catalogue_is_shown_and_its_names_are_understood() -> None:
    shown = CliRunner().invoke(app, ["drill", "--list"])
    assert shown.exit_code == 0
    for ending in ENDINGS:
        assert ending.name in shown.output
        assert ending_named(ending.name) is ending
    for moment in MOMENTS:
        written = moment.name.replace(" ", "-")
        assert written in shown.output
        assert moment_named(written) is moment
    for wrong in (["drill", "kill-joy"], ["drill", "kill-flow", "--moment", "noon"]):
        refused = CliRunner().invoke(app, wrong)
        assert refused.exit_code == 2
        assert "--list" in refused.output


@pytest.mark.long
def test_a_whole_drill(tmp_path: Path) -> None:
    """On Prefect's temporary server, as it is the first time; that must end with the run too."""
    places = {"XDG_STATE_HOME": "state", "OPD_LEASES": "leases", "PREFECT_HOME": "prefect"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    environment |= {name: str(tmp_path / place) for name, place in places.items()}
    environment |= {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "deployments.cli", "drill", "--json"]
    held = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert held.returncode == 0, held.stdout + held.stderr
    report = json.loads(held.stdout)
    assert report["clean"]
    assert report["receipt"]["cause"] == "owner died"
    assert report["resumes_from"] > 0
    assert "an independent look finds: nothing" in held.stderr
    assert not list(tmp_path.glob("opd-drill-*"))
