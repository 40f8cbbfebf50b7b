"""Signs of life of a server during a run: its health, and that it answers when asked.

Neither is enough alone. A health check can time out under long prefills while the server works,
and can say "ok" while nothing is scored any more.
"""

from __future__ import annotations

import threading
import time

import httpx

from opd_core.config import Backend
from opd_core.scoring.state import ReplicaState, ScoringState
from opd_core.serving.readiness import HEALTH_PATH, PROBE_TIMEOUT_S

PROBE_EVERY_S = 5.0
HANG_LIMIT_S = 300.0
"""How long a server that samples the student may be without health."""
HEALTH_WITHOUT_ENGINE: frozenset[Backend] = frozenset({"lmdeploy"})
"""Backends whose health may be asked for while the student trains. SGLang's samples a token: that
breaks a server which is taking in weights or has given its memory away. It ends by itself when its
engine dies, and when a forward hangs; LMDeploy does not, and tells what it knows of its engine."""


class HealthWatch:
    """Asks one server for its health, one probe at a time, on a thread of its own."""

    def __init__(self, endpoint: str, backend: Backend, *, every_s: float = PROBE_EVERY_S) -> None:
        self.healthy_at = time.time()
        """When it last said that it is well, in seconds since the epoch."""
        self._url = endpoint + HEALTH_PATH[backend]
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"health {endpoint}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more; does not wait for a probe under way."""
        self._stop.set()

    def _run(self) -> None:
        with httpx.Client(trust_env=False, timeout=PROBE_TIMEOUT_S) as http:
            while not self._stop.wait(self._every_s):
                try:
                    if http.get(self._url).status_code == 200:
                        self.healthy_at = time.time()
                except httpx.HTTPError:
                    continue


class Diagnosis:
    """What is wrong with one replica, judged from its signs over time.

    ``hang_limit_s`` bounds how long each sign may be missing.
    """

    def __init__(self, replica: int, hang_limit_s: float) -> None:
        self._replica = replica
        self._limit_s = hang_limit_s
        self._changed_before = 0
        self._away_since: float | None = None

    def begin(self, state: ScoringState | None) -> None:
        """A new server: what was known of the one before does not count against it."""
        self._away_since = None
        if state is not None:
            self._changed_before = state.replicas[self._replica].changed

    def __call__(self, now: float, healthy_at: float, state: ScoringState | None) -> str:
        """Why the server has to be started again, or "". Times are seconds since the epoch."""
        seen = state.replicas[self._replica] if state else ReplicaState()
        silent_s = now - max(healthy_at, seen.progress_at)
        if silent_s > self._limit_s:
            return f"hangs: no sign of life for {silent_s:.0f} s"
        if seen.changed > self._changed_before:
            return f"has changed: {seen.away or 'its canaries gave other numbers'}"
        if not seen.away:
            self._away_since = None
            waiting_s = (state.told_at if state else 0.0) - seen.progress_at
            if seen.in_flight and waiting_s > self._limit_s:
                return f"hangs: no answer for {waiting_s:.0f} s, though its health says ok"
            return ""
        self._away_since = self._away_since or now
        if now - self._away_since > self._limit_s:
            return f"does not score: {seen.away}"
        return ""
