"""Looks after the teachers while the student trains: a dead, hung or changed server that the run
launched is started again, and the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from opd_core.config import OPDTeacherConfig
from opd_core.scoring.state import ScoringState, read_state
from opd_core.serving.child import child_name
from opd_core.serving.life import Diagnosis, HealthWatch
from opd_core.training.files import SCORING_FILE
from tasks.console import announce, warn
from tasks.session import Session
from tasks.teacher import restart_replica


class _Watched:
    """One launched replica."""

    def __init__(self, session: Session, teacher: OPDTeacherConfig, number: int) -> None:
        self.teacher, self.number = teacher, number
        self.child = child_name(teacher.name, number)
        self.diagnose = Diagnosis(number, teacher.hang_limit_s)
        self._backend = teacher.all_replicas[number].backend
        self.begin(session, None)

    def begin(self, session: Session, state: ScoringState | None) -> None:
        endpoint = session.teacher_facts[self.teacher.name].endpoints[self.number]
        self.health = HealthWatch(endpoint, self._backend)
        self.diagnose.begin(state)


class TeacherWatch:
    """Watches every teacher of a run: call :meth:`turn` often, and :meth:`close` at the end.

    ``children`` are the processes that it looks after.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        opd = session.run.config.opd
        self._watched = [
            _Watched(session, teacher, number)
            for teacher in (opd.teachers if opd else ())
            for number, replica in enumerate(teacher.all_replicas)
            if replica.launch is not None
        ]
        self.children = frozenset(watched.child for watched in self._watched)
        self._away: dict[str, str] = {}

    def close(self) -> None:
        """Ask no server for its health any more."""
        for watched in self._watched:
            watched.health.close()

    def turn(self, still_alive: Callable[[], None]) -> None:
        """Look once, and start again what has to be. ``still_alive`` is called while a server
        loads. Raises :class:`~opd_core.errors.ServingError` for one that cannot be helped."""
        states: dict[str, ScoringState] = {}
        with suppress(OSError, ValueError):  # the next turn reads it
            states = read_state(self._session.run.directory / SCORING_FILE)
        self._tell_away(states)
        for watched in self._watched:
            state = states.get(watched.teacher.name)
            if why := self._illness(watched, state):
                watched.health.close()
                restart_replica(self._session, watched.teacher, watched.number, why, still_alive)
                watched.begin(self._session, state)
                return  # minutes may have passed: the others are judged by what is true then

    def _illness(self, watched: _Watched, state: ScoringState | None) -> str:
        returncode = self._session.child_exit(watched.child)
        if returncode is not None:
            return f"has died (return code {returncode})"
        return watched.diagnose(time.time(), watched.health.healthy_at, state)

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
