"""The exception tree. Every message says what was expected, what came, for whom, and what to do.

OPDError
├── ConfigError            a recipe or a combination of settings is wrong (nothing was started)
├── PreflightError         the machine, a model or the data does not fit the recipe
├── DataError              a data file cannot be read (names file and line)
├── ScoringError           a teacher did not give usable scores
│   ├── TeacherRefused     the request itself is wrong for this teacher (4xx): never retried
│   ├── TeacherAnswerError an answer arrived and failed a check: it is not a number to train on
│   ├── TeacherTransient   time-out, 429, 5xx, cut connection: worth another attempt
│   └── TeacherAway        nobody answers at the endpoint: no attempt is counted
├── ServingError           a server died or did not become ready
├── SamplingError          a sampling engine could not give rollouts
│   └── SamplersLost       no server is left that samples: the job can be started again
└── TrainingError          the run cannot go on
    ├── SurvivorError      too few groups survive: carries the survivor table
    ├── ActorLost          an actor's process died: the job can be started again
    └── ClusterLost        the Ray cluster died: so it can, on another one

All of them hold only strings and numbers, so that they cross processes unharmed.
"""

from __future__ import annotations


class OPDError(Exception):
    """Base of all errors that this project raises on purpose."""


class ConfigError(OPDError):
    """A recipe, or a combination of its settings, is wrong. Nothing was started."""


class PreflightError(OPDError):
    """The machine, a model or the data does not fit the recipe. Nothing was started."""


class DataError(OPDError):
    """A data file cannot be read; the message names the file and the line or row."""


class ScoringError(OPDError):
    """A teacher did not give usable scores.

    ``cause`` is a short word for counting (``timeout``, ``http_500``, ``row_count`` …).
    """

    def __init__(self, message: str, cause: str = "scoring") -> None:
        super().__init__(message, cause)
        self.cause = cause

    def __str__(self) -> str:
        return str(self.args[0])


class TeacherRefused(ScoringError):
    """The teacher refused the request itself (400, 401, 403, 404, 413). Never retried."""


class TeacherAnswerError(ScoringError):
    """An answer arrived and failed a check (row count, ids, finiteness, sign). Never retried."""


class TeacherTransient(ScoringError):
    """Time-out, 408, 429, 5xx or a cut connection: worth another attempt.

    ``retry_after_s`` is the server's own wish, when it named one.
    """

    def __init__(
        self, message: str, cause: str = "transient", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, cause)
        self.args = (message, cause, retry_after_s)
        self.retry_after_s = retry_after_s


class TeacherAway(ScoringError):
    """Nobody answers at the endpoint (connection refused, process dead)."""


class ServingError(OPDError):
    """A server died, or did not become ready; the message carries the tail of its log."""


class SamplingError(OPDError):
    """A sampling engine could not give rollouts."""


class SamplersLost(SamplingError):
    """All servers that sample are lost; the job can go on when they have been started again."""


class TrainingError(OPDError):
    """The run cannot go on; the message says why."""


class SurvivorError(TrainingError):
    """Too few groups survive; the message carries the table of what became of them, ``counts`` the
    same as metrics."""

    def __init__(self, message: str, counts: dict[str, int] | None = None) -> None:
        super().__init__(message, counts)
        self.counts = counts or {}

    def __str__(self) -> str:
        return str(self.args[0])


class ActorLost(TrainingError):
    """The process of a sampling or training actor died; the job can go on from what is on disk."""


class ClusterLost(TrainingError):
    """The Ray cluster died or no longer answers; the job can go on from what is on disk."""
