"""Looks after the servers while the student trains: a dead, hung or changed one that the run
launched is started again, and the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from opd_core.scoring.state import ScoringState, read_state
from opd_core.serving.life import (
    HANG_LIMIT_S,
    HEALTH_WITHOUT_ENGINE,
    Diagnosis,
    HealthWatch,
)
from opd_core.serving.servers import Server
from opd_core.training.files import SCORING_FILE
from tasks.console import announce, warn
from tasks.samplers import restart_sampler
from tasks.servers import death
from tasks.session import Session
from tasks.teacher import restart_teacher


class _Watched:
    """One launched server, under the name of its process."""

    def __init__(self, session: Session, server: Server) -> None:
        self.child, self.teacher = server.child, server.teacher
        limit_s = session.teacher(server).hang_limit_s if server.teacher else HANG_LIMIT_S
        self.diagnose = Diagnosis(server.number, limit_s)
        self.begin(server, None)

    def begin(self, server: Server, state: ScoringState | None) -> None:
        asked = server.teacher is not None or server.backend in HEALTH_WITHOUT_ENGINE
        self._health = HealthWatch(server.endpoint, server.backend) if asked else None
        self.diagnose.begin(state)

    def illness(self, state: ScoringState | None) -> str:
        now = time.time()
        return self.diagnose(now, self._health.healthy_at if self._health else now, state)

    def close(self) -> None:
        if self._health:
            self._health.close()


class ServerWatch:
    """Watches every server of a run: call :meth:`turn` often, and :meth:`close` at the end.

    ``children`` are the processes that it looks after.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._watched = [
            _Watched(session, server)
            for server in session.servers.values()
            if server.child not in session.given_up
        ]
        self.children = frozenset(session.servers)
        self._away: dict[str, str] = {}

    def close(self) -> None:
        """Ask no server for its health any more."""
        for watched in self._watched:
            watched.close()

    def turn(self, still_alive: Callable[[], None]) -> None:
        """Look once, and start again what has to be. ``still_alive`` is called while a server
        loads. Raises :class:`~opd_core.errors.ServingError` for one that cannot be helped and that
        the run needs."""
        states: dict[str, ScoringState] = {}
        with suppress(OSError, ValueError):  # the next turn reads it
            states = read_state(self._session.run.directory / SCORING_FILE)
        self._tell_away(states)
        for watched in self._watched:
            server = self._session.servers[watched.child]
            state = states.get(watched.teacher or "")
            if why := death(self._session, server) or watched.illness(state):
                watched.close()
                restart = restart_teacher if server.teacher else restart_sampler
                restart(self._session, server, why, still_alive)
                if watched.child in self._session.given_up:
                    self._watched.remove(watched)
                else:
                    watched.begin(self._session.servers[watched.child], state)
                return  # minutes may have passed: the others are judged by what is true then

    def _tell_away(self, states: dict[str, ScoringState]) -> None:
        """Say once when the training job loses a teacher, and when it has it back."""
        away = {
            name: state.replicas[0].away
            for name, state in states.items()
            if all(replica.away for replica in state.replicas)
        }
        for name in away.keys() - self._away.keys():
            warn(f"teacher {name!r} is away: {away[name]}; its rollouts wait on disk")
        for name in self._away.keys() - away.keys():
            announce(f"teacher {name!r} is scoring again")
        self._away = away
