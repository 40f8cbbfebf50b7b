"""Whether the server scores, at the price of at most one probe in the queue."""

from __future__ import annotations

import asyncio
import time

from opd_core.serving.embedded.batching import BatchingScorer, ScorerUnavailable
from opd_core.serving.embedded.requests import ScoreResult


class HealthProbe:
    """Decides whether the server scores.

    A batch that finished within ``recent_s`` is proof enough. Otherwise one token is scored
    through the queue; everybody who asks meanwhile waits for that same score, at most
    ``timeout_s``, so impatient monitors cannot pile up work on a busy server.
    """

    def __init__(self, scorer: BatchingScorer, *, timeout_s: float, recent_s: float) -> None:
        self._scorer = scorer
        self._timeout_s = timeout_s
        self._recent_s = recent_s
        self._probe: asyncio.Future[ScoreResult] | None = None

    async def alive(self) -> bool:
        """True if a batch finished lately or while this call waited."""
        try:
            _ = self._scorer.model
            if self._scorer.seconds_since_batch() < self._recent_s:
                return True
            if self._probe is None or self._probe.done():
                self._probe = asyncio.wrap_future(self._scorer.submit_probe())
        except ScorerUnavailable:
            return False
        began = time.monotonic()
        probe = self._probe
        await asyncio.wait({probe}, timeout=self._timeout_s)
        if probe.done():
            return not probe.cancelled() and probe.exception() is None
        return self._scorer.seconds_since_batch() < time.monotonic() - began
