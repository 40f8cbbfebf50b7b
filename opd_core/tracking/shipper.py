"""Brings the journal to the sinks, in the background of the flow process.

Each sink has a thread of its own that creates it, sends to it and closes it, so that one which is
slow, away or broken disturbs neither the others nor the caller. Nothing here ever raises into the
run: what did not arrive is reported, and the journal remains the truth.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from opd_core.tracking.journal import JournalReader, JournalRecord
from opd_core.tracking.sink import Ending, Sink

logger = logging.getLogger(__name__)

SinkFactory = Callable[[], Sink]

RECORDS_PER_BATCH = 100
CLOSING_RETRY_S = 1.0
PROGRESS_S = 0.2
_CREDENTIALS = re.compile(r"://[^/\s]*@")


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a sink is behind: ``records`` were read from the journal and have not arrived, the
    oldest of them ``seconds`` ago."""

    records: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SinkReport:
    """What one sink has got so far.

    ``complete``: every record of the journal and the ending arrived, known only after
    :meth:`Shipper.close`. ``failed_attempts`` counts calls that raised (creation, batch, ending);
    ``last_error`` is the most recent one, also where a retry succeeded. ``left_out`` names what
    the ending asked for and nobody could give. ``cpu_s`` is what the sink's thread has computed, in
    seconds of one core; a call that still runs is not in it.
    """

    shipped: int
    lag: Lag
    failed_attempts: int
    last_error: str | None
    dropped_values: int
    left_out: tuple[str, ...]
    reference: str | None
    complete: bool
    cpu_s: float


@dataclass(frozen=True, slots=True)
class ShippingReport:
    """``records_read`` counts the journal's records; ``journal_error`` says why reading stopped."""

    records_read: int
    journal_error: str | None
    sinks: Mapping[str, SinkReport]

    @property
    def complete(self) -> bool:
        """Whether the whole journal and the ending arrived everywhere."""
        return self.journal_error is None and all(sink.complete for sink in self.sinks.values())

    @property
    def lag(self) -> Lag:
        """That of the sink whose oldest lacking record has waited longest."""
        lags = (sink.lag for sink in self.sinks.values())
        return max(lags, key=lambda lag: (lag.seconds, lag.records), default=Lag())


class Shipper:
    """Ships a journal to named sinks.

    ``sinks`` maps a name to a factory, called in the sink's thread and again if it raises. The
    journal is looked at every ``interval_s``; after a failure the same sink is tried again after
    ``retry_s``, doubled each time up to ``max_retry_s``.
    """

    def __init__(
        self,
        reader: JournalReader,
        sinks: Mapping[str, SinkFactory],
        interval_s: float = 1.0,
        *,
        retry_s: float = 1.0,
        max_retry_s: float = 30.0,
    ) -> None:
        self._feed = _Feed(reader, sinks)
        self._closing = threading.Event()
        self._given_up = threading.Event()
        waits = _Waits(interval_s, retry_s, max_retry_s, self._closing, self._given_up)
        self._lanes = [_Lane(name, make, self._feed, waits) for name, make in sinks.items()]

    def start(self) -> None:
        """Start the threads; returns at once."""
        for lane in self._lanes:
            lane.start()

    def report(self) -> ShippingReport:
        """What has arrived by now; callable at any time."""
        self._feed.read(wait=False)
        sinks = {lane.name: lane.report() for lane in self._lanes}
        return ShippingReport(self._feed.records_read, self._feed.error, sinks)

    def close(
        self,
        timeout_s: float,
        ending: Ending | None = None,
        progress: Callable[[ShippingReport], None] = lambda report: None,
    ) -> ShippingReport:
        """Ship the rest, then the ending, and stop. The journal has its last record by now.

        Failing sinks are tried again until ``timeout_s`` is over. So is a journal that cannot be
        read to its end; the sinks are told the ending meanwhile, as one that is not complete.
        Returns by then in any case and never raises; a thread that is stuck in its sink is left
        behind and ends with the process. ``progress`` is called now and then meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes:
            lane.ending = ending
        self._closing.set()
        for lane in self._lanes:
            while lane.alive and (left_s := deadline - time.monotonic()) > 0:
                lane.join(min(left_s, PROGRESS_S))
                progress(self.report())
        self._given_up.set()
        return self.report()


@dataclass(frozen=True, slots=True)
class _Waits:
    interval_s: float
    retry_s: float
    max_retry_s: float
    closing: threading.Event
    given_up: threading.Event

    def after_failures(self, count: int) -> float:
        return float(min(self.retry_s * 2 ** min(count - 1, 16), self.max_retry_s))

    def rest(self, seconds: float, *, closing: bool) -> None:
        """Wait, but not longer than the news that matters: the closing, then the end of it."""
        if closing:
            self.given_up.wait(min(seconds, CLOSING_RETRY_S))
        else:
            self.closing.wait(seconds)


class _Feed:
    """The journal read once, and for each sink the records that it still lacks."""

    def __init__(self, reader: JournalReader, names: Iterable[str]) -> None:
        self.records_read = 0
        self.error: str | None = None
        self._reader = reader
        self._lock = threading.Lock()
        # With the time of reading: after a resume the record itself may be days old.
        self._lacking: dict[str, deque[tuple[float, JournalRecord]]] = {n: deque() for n in names}

    def next_batch(self, name: str) -> tuple[list[JournalRecord], Exception | None]:
        """The oldest records that ``name`` lacks, after a look at the journal, and what that look
        has failed with."""
        error = self.read()
        with self._lock:
            return [record for _, record in islice(self._lacking[name], RECORDS_PER_BATCH)], error

    def shipped(self, name: str, count: int) -> None:
        """``name`` has got its ``count`` oldest records."""
        with self._lock:
            for _ in range(count):
                self._lacking[name].popleft()

    def lag(self, name: str) -> Lag:
        """How far ``name`` is behind. It waits for nobody: the lock is held while a file is
        read."""
        lacking = self._lacking[name]
        try:
            return Lag(len(lacking), time.monotonic() - lacking[0][0])
        except IndexError:
            return Lag()

    def read(self, *, wait: bool = True) -> Exception | None:
        """Take in what was added, without ``wait`` only if nobody else is about it; trouble with
        the journal is returned, and kept in ``error``, never raised."""
        if not self._lock.acquire(blocking=wait):
            return None
        try:
            records = self._reader.read()
            self.error = None
            self.records_read += len(records)
            now = time.monotonic()
            for lacking in self._lacking.values():
                lacking.extend((now, record) for record in records)
            return None
        except Exception as error:
            if self.error is None:
                logger.warning("metrics cannot be read from the journal: %s", error)
            self.error = short_error(error)
            return error
        finally:
            self._lock.release()


class _Lane:
    """One sink, its thread, and how far it has come."""

    def __init__(self, name: str, factory: SinkFactory, feed: _Feed, waits: _Waits) -> None:
        self.name = name
        self.ending: Ending | None = None
        self._factory = factory
        self._feed = feed
        self._waits = waits
        self._sink: Sink | None = None
        self._shipped = 0
        self._failed_attempts = 0
        self._last_error: str | None = None
        self._left_out: tuple[str, ...] = ()
        self._complete = False
        self._cpu_s = 0.0
        # A daemon: a sink that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"ship-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def report(self) -> SinkReport:
        sink = self._sink
        return SinkReport(
            shipped=self._shipped,
            lag=self._feed.lag(self.name),
            failed_attempts=self._failed_attempts,
            last_error=self._last_error,
            dropped_values=sink.dropped if sink else 0,
            left_out=self._left_out,
            reference=sink.reference if sink else None,
            complete=self._complete,
            cpu_s=self._cpu_s,
        )

    def _run(self) -> None:
        failures = 0
        while not (self._complete or self._waits.given_up.is_set()):
            # Asked before the journal is read: a record that was appended before the closing is
            # then certainly among those read.
            closing = self._waits.closing.is_set()
            try:
                wait_s = self._step(closing=closing)
                failures = self._recovered(failures)
            except Exception as error:
                failures += 1
                wait_s = self._waits.after_failures(failures)
                self._failed(error, failures, wait_s)
            self._cpu_s = time.thread_time()
            if wait_s > 0 and not self._complete:
                self._waits.rest(wait_s, closing=closing)
        if self._sink is not None:
            with contextlib.suppress(Exception):
                self._sink.close()

    def _step(self, *, closing: bool) -> float:
        """One piece of work; the answer is the wait before the next, in seconds."""
        if self._sink is None:
            self._sink = self._factory()
        batch, unread = self._feed.next_batch(self.name)
        if batch:
            self._sink.log(batch)
            self._feed.shipped(self.name, len(batch))
            self._shipped += len(batch)
            return 0.0
        if closing:
            if self.ending is not None:
                ending = replace(self.ending, complete=unread is None)
                self._left_out = self._sink.finish(ending)
            if unread is not None:
                raise unread
            self._complete = True
        return self._waits.interval_s

    def _failed(self, error: Exception, failures: int, wait_s: float) -> None:
        self._failed_attempts += 1
        self._last_error = short_error(error)
        if failures == 1:
            logger.warning(
                "%s: %s; tried again in %.1f s, the journal keeps everything",
                self.name,
                self._last_error,
                wait_s,
            )

    def _recovered(self, failures: int) -> int:
        if failures:
            logger.info("%s: works again after %d failed attempts", self.name, failures)
        return 0


def short_error(error: Exception) -> str:
    """Kind and first line; a URL loses its user and password, since this is logged and kept."""
    first_line = without_credentials(str(error).strip().partition("\n")[0])
    return f"{type(error).__name__}: {first_line}"[:500]


def without_credentials(text: str) -> str:
    """``text`` without user and password in its URLs."""
    return _CREDENTIALS.sub("://", text)
