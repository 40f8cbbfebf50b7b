"""How each ending is brought about, once the flow is at its moment."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable, Mapping

from opd_core.lifecycle.ledger import LEDGER_FILE
from opd_core.lifecycle.process import is_running
from opd_core.lifecycle.reaper import reap
from tests.teardown.standins.matrix import DEADLINE_S, TEARDOWN
from tests.teardown.standins.scene import POLL_S, Scene
from tests.teardown.standins.servers import GO_ON

_A_TORN_LINE = 7


def act(scene: Scene) -> float:
    """Bring the scene's ending about; return the `time.monotonic()` from which it is timed."""
    began = time.monotonic()
    if scene.ending.name == "deadline":
        began = float((scene.folder / "began").read_text()) + DEADLINE_S
        assert time.monotonic() < began, "the moment came too late, raise DEADLINE_S"
    _ACTS[scene.ending.name](scene)
    if scene.moment == TEARDOWN:
        (scene.folder / GO_ON).touch()
    if scene.ending.settled_by == "reaper":
        _reap(scene)
    return began


def _order(what: str) -> Callable[[Scene], None]:
    return lambda scene: scene.order(what)


def _signal(name: str, signum: signal.Signals, order: str = "") -> Callable[[Scene], None]:
    """Signal one process; give the flow an order if it does not notice by itself."""

    def send(scene: Scene) -> None:
        scene.send(name, signum)
        if order:
            scene.order(order)

    return send


def _kill_worker(then: Callable[[Scene], None]) -> Callable[[Scene], None]:
    def kill(scene: Scene) -> None:
        scene.signal_worker(signal.SIGKILL)
        scene.worker_status()
        then(scene)

    return kill


def _kill_flow_and_supervisor(scene: Scene) -> None:
    # Stopped first, so that it cannot act on the other's death.
    scene.send("flow", signal.SIGSTOP)
    scene.send("supervisor", signal.SIGKILL)
    scene.send("flow", signal.SIGKILL)


def _reap(scene: Scene) -> None:
    """What the next run of this user does first. By then, no server lives without a supervisor."""
    gone = [scene.born().get(name) for name in ("flow", "supervisor", "ray", "teacher")]
    give_up_at = time.monotonic() + scene.ending.limit_s
    while any(is_running(each) for each in gone if each is not None):
        assert time.monotonic() < give_up_at, f"they live on; logs:\n{scene.logs()}"
        time.sleep(POLL_S)
    reaped = reap(scene.registry)
    assert [each.settled for each in reaped] == [True], reaped


def _fill_disk(then: Callable[[Scene], None]) -> Callable[[Scene], None]:
    def fill(scene: Scene) -> None:
        scene.leave_room(0)
        then(scene)

    return fill


def _fill_disk_for_a_while(scene: Scene) -> None:
    scene.leave_room((scene.run_dir / LEDGER_FILE).stat().st_size + _A_TORN_LINE)
    scene.order("spawn")
    scene.wait_for(scene.folder / "refusal", "the supervisor to refuse a child")
    scene.leave_room(resource.RLIM_INFINITY)
    scene.order("leave")


_ACTS: Mapping[str, Callable[[Scene], None]] = {
    "normal": _order("leave"),
    "flow raises": _order("StageFailed"),
    "task raises": _order("TaskFailed"),
    "time-out": _signal("flow", signal.SIGALRM),
    "cancel": _signal("flow", signal.SIGTERM),
    "SIGINT": _signal("flow", signal.SIGINT),
    "SIGTERM": _signal("flow", signal.SIGTERM),
    "SIGHUP": _signal("flow", signal.SIGHUP),
    "SIGKILL": _signal("flow", signal.SIGKILL),
    "terminal closed": Scene.close_terminal,
    "worker interrupted": lambda scene: scene.signal_worker(signal.SIGINT),
    "worker killed": _kill_worker(_order("leave")),
    "worker killed, guard": _kill_worker(_signal("flow", signal.SIGTERM)),
    "supervisor SIGTERM": _signal("supervisor", signal.SIGTERM),
    "supervisor killed": _signal("supervisor", signal.SIGKILL),
    "supervisor stopped": _signal("supervisor", signal.SIGSTOP, "leave"),
    "flow and supervisor killed": _kill_flow_and_supervisor,
    "teacher killed": _signal("teacher", signal.SIGKILL),
    "teacher stopped": _signal("teacher", signal.SIGSTOP, "TeacherSilent"),
    "teacher deaf": _order("leave"),
    "Ray head killed": _signal("ray", signal.SIGKILL),
    "GCS killed": _signal("gcs", signal.SIGKILL),
    "raylet killed": _signal("raylet", signal.SIGKILL),
    "actor killed": _signal("actor", signal.SIGKILL, "ActorDied"),
    "disk full": _fill_disk(_order("leave")),
    "disk full, flow killed": _fill_disk(_signal("flow", signal.SIGKILL)),
    "disk full for a while": _fill_disk_for_a_while,
    "deadline": lambda scene: None,
}
