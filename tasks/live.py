"""A run as Prefect shows it while it goes on: progress, curves, servers, links, its processes'
complaints.

All of it is done on a thread of its own from what stands in the run directory, so the stages of the
run neither wait for it nor fail with it. Prefect's API hears of it at most every twenty seconds.
"""

from __future__ import annotations

import base64
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opd_core.analysis.live_curve import curve_svg
from opd_core.analysis.run_data import Series
from opd_core.scoring.state import read_state
from opd_core.tracking.journal import JournalReader
from opd_core.tracking.shipper import short_error
from opd_core.training.files import JOURNAL_FILE, LOGS_FOLDER, SCORING_FILE
from opd_core.training.links import Links
from tasks.board import Board, Shown
from tasks.console import log
from tasks.forwarding import LogForwarder
from tasks.health import health_rows
from tasks.links import find_links, report_markdown, run_markdown
from tasks.session import Session

LOOK_EVERY_S, SHOW_EVERY_S = 2.0, 20.0
FINISH_S = 10.0
"""The end of a run waits no longer for Prefect's API, which may be away."""
RUN_KEY, PROGRESS_KEY, CURVES_KEY = "run", "progress", "curves"
HEALTH_KEY, REPORT_KEY = "servers", "report"
"""Prefect's keys of the artifacts."""
KL, ACCURACY = "opd_reverse_kl", "eval/accuracy"
LATENCY, STEP_S = "teacher/latency_s_mean", "time/step_s"
WATCHED = (KL, ACCURACY, LATENCY, STEP_S)
RAY_LOGS, RAY_FILES = "session_latest/logs", ("gcs_server.out", "raylet.out")
GREEN = "#1a7f37"

FindPlace = Callable[[], tuple[str, str]]
"""MLflow's ids of the run and of its experiment, empty as long as it has none."""


class LiveView:
    """Shows a session; nothing of it raises. :meth:`quiet` comes before what the run started is
    ended, :meth:`finish` after."""

    def __init__(self, session: Session, board: Board, place: FindPlace) -> None:
        self._session = session
        self._board = board
        self._place = place
        self._journal = JournalReader(session.run.directory / JOURNAL_FILE)
        self._values: dict[str, dict[int, float]] = {name: {} for name in WATCHED}
        self._links: Links | None = None
        self._finding_links = threading.Lock()
        self._summary: Mapping[str, Any] | None = None
        self._last_health: list[dict[str, str]] | None = None
        self._failed: set[str] = set()
        self._ending = threading.Event()
        self._forwarder = LogForwarder(
            self._log_files, log, (*session.keys.values(), *session.secrets.values())
        )
        context = contextvars.copy_context()  # it knows the flow run's log
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="live view", daemon=True
        )

    @classmethod
    def start(cls, session: Session, place: FindPlace) -> LiveView:
        """Begin to show; returns at once. The links are in the run directory then."""
        view = cls(session, Board.of_this_flow_run(), place)
        with view._told("the links"):
            view._find_links()
        with view._told("how the run goes"):
            view._thread.start()
        return view

    def quiet(self) -> None:
        """Look at logs and servers for the last time: how they fare when they are ended is of no
        interest. The links are those of now, for the report that is written next."""
        with self._told("the links"):
            self._find_links()
        with self._told("the logs of the run's processes"):
            self._forwarder.close()
        with self._told("the servers"):
            self._last_health = self._health()

    def finish(self, summary: Mapping[str, Any], within_s: float = FINISH_S) -> None:
        """Show what the run came to, and no more after that."""
        self._summary = summary or None
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(within_s)

    def _log_files(self) -> list[Path]:
        """Of all processes; of Ray's own many the two that tell of a node and of the cluster."""
        files = sorted((self._session.run.directory / LOGS_FOLDER).glob("*.log"))
        if self._session.cluster.temp_dir is None:
            return files
        return files + [self._session.cluster.temp_dir / RAY_LOGS / name for name in RAY_FILES]

    def _run(self) -> None:
        next_show = 0.0
        while not self._ending.is_set():
            with self._told("the logs of the run's processes"):
                self._forwarder.look()
            if time.monotonic() >= next_show:
                next_show = time.monotonic() + SHOW_EVERY_S
                self._show()
            self._ending.wait(LOOK_EVERY_S)
        self._show()

    def _show(self) -> None:
        config = self._session.run.config
        with self._told("the links"):
            self._find_links()
        with self._told("the journal"):
            self._read_journal()
        with self._told("how the run goes"):
            self._board.show(self._artifacts(), (f"recipe:{config.name}", f"seed:{config.seed}"))

    def _read_journal(self) -> None:
        """Only what is shown is kept: a long run has many metrics."""
        for record in self._journal.read():
            for name in self._values.keys() & record.metrics.keys():
                self._values[name][record.train_step] = record.metrics[name]

    def _find_links(self) -> None:
        run = self._session.run
        with self._finding_links:
            links = find_links(run, *self._place())
            if links != self._links:
                links.write(run.directory)
                self._links = links

    def _artifacts(self) -> list[Shown]:
        """Those that can be made. The report comes first: it is waited for only so long."""
        parts = {
            "the report": self._report,
            "the page of the run": self._page,
            "the progress": self._progress,
            "the curves": self._curves,
            "the servers": self._servers,
        }
        shown: list[Shown] = []
        for what, part in parts.items():
            with self._told(what):
                if (made := part()) is not None:
                    shown.append(made)
        return shown

    def _report(self) -> Shown | None:
        if self._summary is None:
            return None
        text = report_markdown(self._session.run, self._summary, self._links or Links())
        return Shown(REPORT_KEY, "markdown", text, "What the run came to")

    def _page(self) -> Shown:
        text = run_markdown(self._session.run, self._links or Links())
        return Shown(RUN_KEY, "markdown", text, "What runs, and where")

    def _progress(self) -> Shown:
        done = _train_step(Series(self._values)) / self._steps
        return Shown(PROGRESS_KEY, "progress", round(100 * done, 1), self._said())

    def _curves(self) -> Shown | None:
        if not any(self._values.values()):
            return None
        text = _drawn(Series(self._values), self._steps, self._said())
        return Shown(CURVES_KEY, "markdown", text, "How it goes")

    def _servers(self) -> Shown | None:
        rows = self._health() if self._last_health is None else self._last_health
        said = "The servers of the run" + (", before they were ended" if self._summary else "")
        return Shown(HEALTH_KEY, "table", rows, said) if rows else None

    @property
    def _steps(self) -> int:
        return self._session.run.config.training.steps

    def _said(self) -> str:
        return _state_line(Series(self._values), self._steps, self._summary)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """What goes wrong in here is of no importance to the run: it is told once."""
        try:
            yield
        except Exception as error:
            if what not in self._failed:
                self._failed.add(what)
                log(logging.WARNING, f"{what} cannot be shown: {short_error(error)}")

    def _health(self) -> list[dict[str, str]]:
        states = read_state(self._session.run.directory / SCORING_FILE)
        return health_rows(self._session, states, Series(self._values).last(LATENCY))


def _train_step(series: Series) -> int:
    """The last one that has ended; 0 before any has."""
    ended, _ = series.of(STEP_S)
    return int(ended[-1]) if ended.size else 0


def _state_line(series: Series, steps: int, summary: Mapping[str, Any] | None) -> str:
    """The state of the run in a line."""
    step = _train_step(series)
    parts = [f"train step {step} of {steps}"]
    if (kl := series.last(KL)) is not None:
        parts.append(f"opd_reverse_kl {kl:.4f} nats/token")
    if (accuracy := series.last(ACCURACY)) is not None:
        at = series.of(ACCURACY)[0][-1]
        parts.append(f"held-out accuracy {accuracy:.1%} at step {at}".replace("%", " %"))
    if summary is not None:
        parts.append(str(summary["status"]))
    elif (seconds := series.last(STEP_S)) is not None and step < steps:
        parts.append(f"about {_duration((steps - step) * seconds)} left")
    return " · ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _drawn(series: Series, until: int, said: str) -> str:
    """The line, and a picture of each curve that there is."""
    drawn = []
    for name, title, percent, colour in (
        (KL, "opd_reverse_kl, nats per token", False, "#0969da"),
        (ACCURACY, "held-out accuracy", True, GREEN),
    ):
        steps, values = series.of(name)
        if steps.size:
            points = list(zip(steps.tolist(), values.tolist(), strict=True))
            svg = curve_svg(title, points, until, percent=percent, colour=colour)
            data = base64.b64encode(svg.encode()).decode()
            drawn.append(f"![{title}](data:image/svg+xml;base64,{data})")
    return "\n\n".join((f"**{said}**", *drawn))
