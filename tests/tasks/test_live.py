"""A run is shown while it goes on, from its files, and nothing of that may fail the run."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from opd_core.tracking.journal import Journal
from opd_core.training.files import JOURNAL_FILE, SCORING_FILE
from opd_core.training.links import read_links
from tasks.board import Board, Shown
from tasks.live import LiveView
from tests.tasks.fake_session import MakeSession
from tests.tasks.test_links import SUMMARY

NOWHERE = ("", "")
WITHIN_S = 20.0


class FakeBoard:
    """Keeps the newest state of each artifact; ``fails`` raises in place of that."""

    def __init__(self) -> None:
        self.newest: dict[str, Shown] = {}
        self.tags: set[str] = set()
        self.fails = False
        self.shown = threading.Event()

    def show(self, artifacts: Iterable[Shown], tags: Iterable[str] = ()) -> None:
        self.shown.set()
        if self.fails:
            raise RuntimeError("the board is broken")
        self.newest |= {shown.key: shown for shown in artifacts}
        self.tags |= set(tags)


@contextmanager
def showing(make_session: MakeSession, board: FakeBoard, **summary: Any) -> Iterator[LiveView]:
    """A view of a session that has shown something once, and shows the summary at last."""
    view = LiveView(make_session("training.steps=60").session, cast(Board, board), lambda: NOWHERE)
    view._thread.start()
    assert board.shown.wait(WITHIN_S)
    yield view
    view.finish(summary, WITHIN_S)
    assert not view._thread.is_alive()


@pytest.fixture
def journal(make_session: MakeSession) -> Iterator[Journal]:
    with Journal(make_session().session.run.directory / JOURNAL_FILE) as journal:
        yield journal


def test_a_run_is_shown_from_its_first_moment_and_with_its_curves(
    make_session: MakeSession, journal: Journal
) -> None:
    journal.append(0, {"eval/accuracy": 0.436})
    for step in (1, 2, 3):
        journal.append(step, {"opd_reverse_kl": 0.5 / step, "time/step_s": 2.0, "loss": 1.0})
    board = FakeBoard()
    with showing(make_session, board):
        pass
    progress, curves = board.newest["progress"], board.newest["curves"]
    assert (progress.kind, progress.data) == ("progress", 5.0)
    assert progress.description == (
        "train step 3 of 60 · opd_reverse_kl 0.1667 nats/token · held-out accuracy 43.6 % at step "
        "0 · about 114 s left"
    )
    pictures = [part.split(")")[0] for part in str(curves.data).split("base64,")[1:]]
    titles = [b"opd_reverse_kl, nats per token", b"held-out accuracy"]
    for picture, title in zip(pictures, titles, strict=True):
        assert title in base64.b64decode(picture)
    assert board.newest["run"].kind == "markdown"
    assert board.newest["servers"].data[0]["state"] == "starting"
    assert board.tags == {"recipe:tiny", "seed:1234"}
    assert "report" not in board.newest  # the run said nothing at its end


def test_at_its_end_the_report_is_shown_and_servers_as_they_were_before(
    make_session: MakeSession,
) -> None:
    board = FakeBoard()
    with showing(make_session, board, **SUMMARY) as view:
        view.quiet()
        (view._session.run.directory / "scoring.json").write_text(
            json.dumps({"teacher": {"told_at": 1.0, "replicas": [{"away": "it was ended"}]}})
        )
    assert board.newest["report"].data.startswith("**tiny-1: failed**")
    assert board.newest["progress"].description.endswith("failed")
    assert board.newest["servers"].data[0]["state"] == "starting"
    assert "before they were ended" in board.newest["servers"].description


def test_what_processes_complain_of_comes_into_the_log_until_they_are_ended(
    make_session: MakeSession, caplog: pytest.LogCaptureFixture
) -> None:
    with showing(make_session, FakeBoard()) as view:
        log = view._session.run.log("student")
        log.write_text("WARNING slow\n")
        view.quiet()
        log.write_text("WARNING slow\nERROR told to end\n")
    assert [r.getMessage() for r in caplog.records] == ["student: WARNING slow"]


def test_nothing_that_breaks_in_it_reaches_the_run_and_each_is_told_once(
    make_session: MakeSession, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_session().session.run.directory
    (directory / JOURNAL_FILE).write_text("no journal\n")
    (directory / "links.json.partial").mkdir()  # the links cannot be written
    board = FakeBoard()
    board.fails = True
    with showing(make_session, board, status="completed"):
        pass
    told = [message.partition(" cannot")[0] for message in caplog.messages]
    assert sorted(told) == ["how the run goes", "the journal", "the links", "the report"]


def test_a_part_that_breaks_hides_no_other_and_is_told_once(
    make_session: MakeSession, caplog: pytest.LogCaptureFixture
) -> None:
    (make_session().session.run.directory / SCORING_FILE).write_text("no JSON")
    board = FakeBoard()
    with showing(make_session, board, **SUMMARY):
        pass
    assert list(board.newest) == ["run", "progress", "report"]
    assert [said.partition(" cannot")[0] for said in caplog.messages] == ["the servers"]


def test_the_links_are_those_of_now_before_the_report_is_written(make_session: MakeSession) -> None:
    session = make_session("tracking.mlflow_uri=http://mlflow:5000").session
    places = [NOWHERE]
    view = LiveView(session, cast(Board, FakeBoard()), lambda: places[-1])
    view.quiet()
    assert read_links(session.run.directory).mlflow == ""
    places.append(("abc", "3"))
    view.quiet()
    assert read_links(session.run.directory).mlflow.endswith("/#/experiments/3/runs/abc")


def test_a_view_that_was_never_started_ends_at_once(make_session: MakeSession) -> None:
    view = LiveView(make_session().session, cast(Board, FakeBoard()), lambda: NOWHERE)
    view.finish({})
