"""Whatever ends a run, at whatever moment: nothing of it is left, and nothing else is touched."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path

import pytest

from opd_core.lifecycle.handle import Supervisor
from opd_core.lifecycle.ledger import LEDGER_FILE, read_ledger
from opd_core.lifecycle.ports import reserve_ports
from opd_core.lifecycle.records import Receipt, read_receipt
from tests.teardown.report import record
from tests.teardown.standins import matrix
from tests.teardown.standins.acts import act
from tests.teardown.standins.flow import SETTLED, server_command
from tests.teardown.standins.matrix import (
    BEFORE,
    CELLS,
    ENDINGS,
    EVALUATION,
    MOMENTS,
    TEARDOWN,
    Ending,
)
from tests.teardown.standins.scene import Scene

Foreigners = Callable[..., AbstractContextManager[Callable[[], list[str]]]]

_SAMPLED = matrix.sampled()


def _mark(ending: Ending, moment: str) -> pytest.MarkDecorator:
    is_sampled = (ending.name, moment) in _SAMPLED
    return pytest.mark.slow if is_sampled else pytest.mark.teardown


_CELLS = [
    pytest.param(ending, moment, marks=_mark(ending, moment), id=f"{ending.name}-{moment}")
    for ending, moment in CELLS
]


@pytest.fixture(scope="module", autouse=True)
def reasons_in_report() -> Iterator[None]:
    """Why the other pairs are not played; after those that are, which give the table its order."""
    yield
    for ending, moment in product(ENDINGS, MOMENTS):
        if reason := matrix.applies(ending, moment):
            record("stand-ins", ending.name, moment, 0.0, 0.0, reason)


@pytest.fixture
def scene(tmp_path: Path, ending: Ending, moment: str) -> Iterator[Scene]:
    with reserve_ports(4) as reservation:
        ports = reservation.ports
    playing = Scene(tmp_path, f"standin-{uuid.uuid4().hex[:12]}", ports, ending, moment)
    yield playing
    playing.close()


@pytest.mark.parametrize(("ending", "moment"), _CELLS)
def test_nothing_is_left(ending: Ending, moment: str, scene: Scene, foreigners: Foreigners) -> None:
    teacher = server_command("teacher", scene.folder, scene.ports[1:3])
    with foreigners(scene.run_id, teacher) as not_living:
        scene.start()
        assert scene.held_locks() == ["cpu:0.lock", "cpu:1.lock"]
        began = act(scene)
        left = scene.await_nothing(began + ending.limit_s)
        seconds = time.monotonic() - began
        assert left == [], f"left after {seconds:.1f} s; logs:\n{scene.logs()}"
        assert not_living() == [], "processes that are none of the run's"
    check_receipt(scene)
    check_settled(scene)
    check_exit(scene)
    check_started_again(scene)
    record("stand-ins", ending.name, moment, seconds, ending.limit_s)


def check_receipt(scene: Scene) -> None:
    """It is right, and the flow saw the same as stands in the folder, where there was room."""
    ending, moment = scene.ending, scene.moment
    written = read_receipt(scene.run_dir)
    seen = scene.folder / "result"
    if seen.exists():
        told = Receipt.from_json(json.loads(seen.read_text()))
        assert written == told or (written is None and ending.name == "disk full")
        written = told
    assert written is not None
    assert (written.run_id, written.cause) == (scene.run_id, matrix.cause(ending, moment))
    assert (written.clean, written.survivors) == (True, ())
    ends = {end.name: (end.how, end.returncode) for end in written.children}
    assert ends == matrix.child_ends(ending, moment)
    assert 0 <= written.seconds <= ending.limit_s
    ports = {BEFORE: 1, EVALUATION: 4, TEARDOWN: 4}.get(moment, 3)
    assert [(each.port, each.free) for each in written.ports] == [
        (port, True) for port in scene.ports[:ports]
    ]
    assert len(written.scratch) == len(ends)
    assert all(each.removed for each in written.scratch)


def check_settled(scene: Scene) -> None:
    """The command ran where the flow could not, and only there."""
    by = matrix.settled_by(scene.ending, scene.moment)
    assert (scene.folder / SETTLED).exists() == (by in ("command", "reaper"))
    events = [each for each in read_ledger(scene.run_dir / LEDGER_FILE) if each.event == "settled"]
    noted = by != "nobody else" and scene.ending.name != "disk full"
    assert [each.facts["by"] for each in events] == ([by] if noted else [])


def check_exit(scene: Scene) -> None:
    """The flow left as it would have without a run to end."""
    if not scene.ending.name.startswith("worker killed"):
        expected = matrix.exit_status(scene.ending, scene.moment)
        assert scene.worker_status() & 0xFF == expected & 0xFF, scene.logs()


def check_started_again(scene: Scene) -> None:
    """The run can be started again in the same folder, and its ledger goes on."""
    ledger = scene.run_dir / LEDGER_FILE
    before = read_ledger(ledger)
    with Supervisor.start(run_dir=scene.run_dir, run_id=scene.run_id) as supervisor:
        pass
    assert supervisor.receipt is not None
    assert supervisor.receipt.clean
    after = read_ledger(ledger)
    assert after[: len(before)] == before
    events = [each.event for each in after]
    assert events.count("run_started") == events.count("receipt") == 2
