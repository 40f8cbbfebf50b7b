"""The queue before one model: many threads submit, one thread loads it and runs the batches.

It knows nothing of HTTP and nothing of torch: callers submit, and wait on futures.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

import numpy as np

from opd_core.errors import OPDError
from opd_core.serving.embedded.requests import (
    Model,
    RequestRefused,
    ScoreRequest,
    ScoreResult,
    check_request,
)

logger = logging.getLogger(__name__)

# A batch mixes lengths up to this ratio, or up to this length: less padding, same order.
LENGTH_RATIO = 2
SHORT_LENGTH = 64


class QueueFull(OPDError):
    """As many sequences wait as the queue may hold; try again later."""


class ScorerUnavailable(OPDError):
    """The model is still loading, failed to load, or the scorer is stopping."""


class ScoringFailed(OPDError):
    """The forward of this request's batch failed, or gave a number that is not finite."""


@dataclass(frozen=True, slots=True)
class ScorerStats:
    """Counts since the start; ``waiting`` and ``running`` are sequences at this moment."""

    waiting: int
    running: int
    batches: int
    failed_batches: int
    sequences: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    request: ScoreRequest
    future: Future[ScoreResult]


def choose_batch(lengths: Sequence[int], *, max_tokens: int) -> list[int]:
    """Indices of the sequences that go into the next forward, shortest first.

    ``lengths`` (tokens) stand in order of arrival. The first is always chosen, so none waits for
    ever; then those nearest to it in length, while rows x longest stays within ``max_tokens``
    (a sequence longer than that goes alone) and lengths differ at most by ``LENGTH_RATIO``.
    """
    chosen = [0]
    shortest = longest = lengths[0]
    for index in sorted(range(1, len(lengths)), key=lambda i: abs(lengths[i] - lengths[0])):
        low, high = min(shortest, lengths[index]), max(longest, lengths[index])
        fits = high * (len(chosen) + 1) <= max_tokens
        if fits and high <= max(SHORT_LENGTH, LENGTH_RATIO * low):
            chosen.append(index)
            shortest, longest = low, high
    return sorted(chosen, key=lambda i: lengths[i])


class BatchingScorer:
    """Scores sequences for callers on any thread, in batches, on a thread of its own.

    ``start`` begins loading; until that is done, and after ``close``, submitting raises
    :class:`ScorerUnavailable`. A cancelled future leaves the queue without touching its
    neighbours.
    """

    def __init__(self, *, max_running_tokens: int = 16384, max_queued_requests: int = 4096) -> None:
        """max_running_tokens: rows x longest of one forward. max_queued_requests: sequences."""
        self._max_running_tokens = max_running_tokens
        self._max_queued_requests = max_queued_requests
        self._changed = threading.Condition()
        self._waiting: list[_Job] = []
        self._running: list[_Job] = []
        self._model: Model | None = None
        self._stopping = False
        self.failure: Exception | None = None
        """Why the model thread ended, if nobody asked it to."""
        self._last_batch_at: float | None = None
        self._batches = self._failed_batches = self._sequences = self._tokens = 0
        self._thread: threading.Thread | None = None

    def start(
        self,
        load: Callable[[], Model],
        *,
        on_ready: Callable[[], None] = lambda: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """Load the model on the model thread and serve from there.

        That thread calls ``on_ready`` once requests are accepted, and ``on_failure`` if loading
        or the thread itself fails. It is a daemon: a forward cannot be interrupted and must not
        hold up an exit.
        """
        self._thread = threading.Thread(
            target=self._run, args=(load, on_ready, on_failure), name="teacher-model", daemon=True
        )
        self._thread.start()

    @property
    def model(self) -> Model:
        """The model while requests are accepted; else raises :class:`ScorerUnavailable`."""
        if self._stopping:
            raise ScorerUnavailable("The server is stopping.")
        if self._model is None:
            raise ScorerUnavailable("The model is loading.")
        return self._model

    def stats(self) -> ScorerStats:
        """Counts for an operator's eyes."""
        with self._changed:
            return ScorerStats(
                waiting=len(self._waiting),
                running=len(self._running),
                batches=self._batches,
                failed_batches=self._failed_batches,
                sequences=self._sequences,
                tokens=self._tokens,
            )

    def seconds_since_batch(self) -> float:
        """Age of the last sign of life; infinite before the first batch and after a failed one."""
        last = self._last_batch_at
        return math.inf if last is None else time.monotonic() - last

    def submit(self, requests: Sequence[ScoreRequest]) -> list[Future[ScoreResult]]:
        """Queue all requests or none; one future each, in their order.

        Raises :class:`RequestRefused`, :class:`QueueFull` or :class:`ScorerUnavailable`. A future
        may raise :class:`ScoringFailed` or :class:`ScorerUnavailable`.
        """
        facts = self.model.facts
        for row, request in enumerate(requests):
            check_request(request, facts, row=row)
        if len(requests) > self._max_queued_requests:
            raise RequestRefused(
                f"{len(requests)} sequences in one request are more than the queue holds "
                f"({self._max_queued_requests}). Send them in smaller parts."
            )
        jobs = [_Job(request, Future()) for request in requests]
        with self._changed:
            _ = self.model  # the scorer may have been closed since the first look
            self._drop_cancelled()
            if len(self._waiting) + len(jobs) > self._max_queued_requests:
                raise QueueFull("The request queue is full.")
            self._waiting.extend(jobs)
            self._changed.notify()
        return [job.future for job in jobs]

    def submit_probe(self) -> Future[ScoreResult]:
        """Queue the score of one token before all others, whether or not the queue is full."""
        ids = np.arange(2, dtype=np.int64) % self.model.facts.vocab_size
        job = _Job(ScoreRequest(ids, start=0), Future())
        with self._changed:
            _ = self.model
            self._waiting.insert(0, job)
            self._changed.notify()
        return job.future

    def close(self) -> None:
        """Refuse new requests and fail those that wait; the running batch may still finish."""
        with self._changed:
            self._stopping = True
            waiting, self._waiting = self._waiting, []
            self._changed.notify()
        _fail(waiting, ScorerUnavailable, "The server is stopping.")

    def abandon(self) -> None:
        """After ``close``: fail the requests of the running batch too, without waiting for it."""
        _fail(self._running, ScorerUnavailable, "The server is stopping.")

    def join(self, timeout_s: float) -> bool:
        """Wait for the model thread after ``close``; True if it has ended."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(
        self,
        load: Callable[[], Model],
        on_ready: Callable[[], None],
        on_failure: Callable[[], None],
    ) -> None:
        try:
            self._model = model = load()
            on_ready()
            while batch := self._take_batch():
                self._score_batch(model, batch)
        except Exception as error:
            logger.debug("the model thread ended", exc_info=True)
            self.failure = error
            self.close()
            on_failure()

    def _take_batch(self) -> list[_Job]:
        """The next batch, waiting for one; empty once the scorer is closed."""
        with self._changed:
            while not self._stopping:
                self._drop_cancelled()
                if not self._waiting:
                    self._changed.wait()
                    continue
                chosen = choose_batch(
                    [len(job.request.token_ids) for job in self._waiting],
                    max_tokens=self._max_running_tokens,
                )
                batch = [self._waiting[index] for index in chosen]
                taken = set(chosen)
                self._waiting = [j for i, j in enumerate(self._waiting) if i not in taken]
                # A client may cancel at any moment; from here on it no longer can.
                self._running = [j for j in batch if j.future.set_running_or_notify_cancel()]
                if self._running:
                    return self._running
            return []

    def _drop_cancelled(self) -> None:
        self._waiting = [job for job in self._waiting if not job.future.cancelled()]

    def _score_batch(self, model: Model, batch: list[_Job]) -> None:
        try:
            results = model.score([job.request for job in batch])
        except Exception as error:
            logger.exception("the forward of %d sequences failed", len(batch))
            with self._changed:
                self._running, self._last_batch_at = [], None
                self._failed_batches += 1
            _fail(batch, ScoringFailed, f"The forward failed: {type(error).__name__}: {error}")
            return
        with self._changed:
            self._running, self._last_batch_at = [], time.monotonic()
            self._batches += 1
            self._sequences += len(batch)
            self._tokens += sum(len(job.request.token_ids) for job in batch)
        for job, result in zip(batch, results, strict=True):
            if not _is_finite(result):
                _fail([job], ScoringFailed, "The model gave a score that is not finite.")
                continue
            with contextlib.suppress(InvalidStateError):  # abandon() came first
                job.future.set_result(result)


def _is_finite(result: ScoreResult) -> bool:
    """JSON has no NaN: it would arrive as null, which means something else there."""
    fields = (result.logprobs, result.top_logprobs, result.token_ids_logprobs)
    return all(bool(np.isfinite(field).all()) for field in fields)


def _fail(jobs: Sequence[_Job], kind: type[Exception], message: str) -> None:
    for job in jobs:
        with contextlib.suppress(InvalidStateError):  # cancelled, or already answered
            job.future.set_exception(kind(message))
