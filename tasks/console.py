"""What a person at the terminal sees: one line a stage, and a progress bar while training.

The same lines go to the Prefect run's log. Without a terminal (a worker) only the log gets them.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Self, cast

from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

PLAIN_EVERY_S = 15.0


class _Terminal(io.TextIOBase):
    """Standard error as long as somebody is there: a closed terminal, or a worker that was killed,
    must not turn a line for a person into an error of the run."""

    @property
    def _stderr(self) -> Any:
        # A live progress bar puts itself in its place meanwhile, and would write to us.
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stderr.flush()

    def isatty(self) -> bool:
        return bool(self._stderr.isatty())

    def fileno(self) -> int:
        return int(self._stderr.fileno())


CONSOLE = Console(file=cast("IO[str]", _Terminal()), highlight=False)


@dataclass(slots=True)
class Terminal:
    """What this process shows to a person; set by the command line. A worker's console shows
    Prefect's log instead."""

    lines: bool = False
    summary_json: bool = False


TERMINAL = Terminal()


def logger() -> Any:
    """The Prefect run's logger inside a run, a plain one outside."""
    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger("opd")


def announce(text: str, style: str = "") -> None:
    """Tell both the terminal and the run's log."""
    log(logging.INFO, text)
    if TERMINAL.lines:
        # A broken line could not be copied as a command.
        CONSOLE.print(text, style=style or None, markup=False, soft_wrap=True)


def warn(text: str) -> None:
    """Tell a warning to both."""
    log(logging.WARNING, text)
    if TERMINAL.lines:
        CONSOLE.print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)


def log(level: int, text: str) -> None:
    """Tell the run's log only."""
    # Prefect's console ends the process (SystemExit) when the worker that read from it was killed;
    # that must not happen in the middle of a teardown.
    with suppress(OSError, SystemExit):
        logger().log(level, text)


def print_result(text: str) -> None:
    """Print for another program. Raises OSError if that is gone, or the disk is full."""
    sys.stderr.flush()
    try:
        print(text, flush=True)
    except OSError:
        # What could not be written stays in the buffer, and would fail again at the very end.
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        raise


class TrainingProgress:
    """Progress of training: a live bar on a terminal, else a line every few seconds."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._last_line = 0.0
        self._accuracy = "-"
        self._live = TERMINAL.lines and sys.stderr.isatty()
        self._bar = Progress(
            TextColumn("train step"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("opd_reverse_kl {task.fields[kl]}  accuracy {task.fields[accuracy]}"),
            TimeRemainingColumn(),
            console=CONSOLE,
            disable=not self._live,
        )
        self._task: TaskID = self._bar.add_task("", total=steps, kl="-", accuracy="-")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def skip(self, train_step: int, metrics: Mapping[str, float]) -> None:
        """Take in a record of an earlier attempt; nothing is told of it."""
        if "eval/accuracy" in metrics:
            self._accuracy = f"{metrics['eval/accuracy']:.1%}"
            self._bar.update(self._task, accuracy=self._accuracy)
        if "time/step_s" in metrics:
            self._bar.update(self._task, completed=train_step)

    def show(self, train_step: int, metrics: Mapping[str, float]) -> None:
        """Take in one record of the journal."""
        if "eval/accuracy" in metrics:
            self._accuracy = f"{metrics['eval/accuracy']:.1%}"
            self._bar.update(self._task, accuracy=self._accuracy)
            announce(f"  step {train_step}: held-out accuracy {self._accuracy}")
        if "time/step_s" not in metrics:
            return
        kl = metrics.get("opd_reverse_kl")
        shown = "-" if kl is None else f"{kl:.3f}"
        self._bar.update(self._task, completed=train_step, kl=shown)
        now = time.monotonic()
        if not self._live and now - self._last_line > PLAIN_EVERY_S:
            self._last_line = now
            left = (self._steps - train_step) * metrics["time/step_s"]
            announce(
                f"  step {train_step}/{self._steps}  opd_reverse_kl {shown}  "
                f"accuracy {self._accuracy}  about {left:.0f} s left"
            )
