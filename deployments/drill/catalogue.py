"""The moments of a run and the ways to end it: one list for ``opd drill`` and for the tests."""

from __future__ import annotations

from dataclasses import dataclass

QUICK = (
    "training.steps=100000",
    "training.checkpoint_every=1",
    "data.evaluation_rows=16",
    "evaluation.samples=1",
)
"""A run that comes soon to each moment, has something to go on from, and does not end by itself."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A part of a run. ``settings`` make it come soon, and last."""

    name: str
    meaning: str
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """A way to end a run, or to try: ``survived`` are those after which it goes on by design."""

    name: str
    meaning: str
    settings: tuple[str, ...] = ()
    survived: bool = False


MOMENTS = (
    Moment("before", "the supervisor watches, no teacher was started yet"),
    Moment("loading", "the teacher's process runs and does not answer yet"),
    Moment("readiness", "the teacher answers and is being proven"),
    Moment("sampling", "answers are sampled and scored"),
    Moment("training", "the student's weights are being changed"),
    Moment("weight sync", "the sampling engines take the new weights"),
    Moment("checkpoint", "a checkpoint is begun"),
    Moment(
        "evaluation",
        "held-out prompts are answered",
        ("evaluation.every=1", "data.evaluation_rows=64"),
    ),
    Moment("teardown", "the run is over and is being ended", ("training.steps=2",)),
)

ENDINGS = (
    Ending("kill-flow", "SIGKILL to the flow process"),
    Ending("interrupt", "SIGINT to it, as Ctrl-C sends it"),
    Ending("terminate", "SIGTERM to it"),
    Ending("hangup", "SIGHUP to it, as a closed terminal sends it"),
    Ending("cancel", "cancelled in Prefect"),
    Ending("deadline", "the run's time is over (run.deadline_s)", ("run.deadline_s=45",)),
    Ending("kill-supervisor", "SIGKILL to the supervisor"),
    Ending("kill-both", "SIGKILL to flow and supervisor; `opd reap` ends the rest"),
    Ending("kill-teacher", "SIGKILL to the teacher", survived=True),
    Ending(
        "stop-teacher",
        "SIGSTOP to the teacher: it hangs",
        ("opd.teachers.0.hang_limit_s=8",),
        survived=True,
    ),
    Ending("kill-actor", "SIGKILL to the training actor", survived=True),
    Ending("kill-ray-head", "SIGKILL to the Ray head's first process", survived=True),
    Ending("kill-raylet", "SIGKILL to the raylet", survived=True),
    Ending("kill-gcs", "SIGKILL to Ray's control store", survived=True),
)


def moment_named(name: str) -> Moment:
    """The moment of this name, also with ``-`` for its spaces. Raises KeyError."""
    return {moment.name: moment for moment in MOMENTS}[name.replace("-", " ")]


def ending_named(name: str) -> Ending:
    """The ending of this name. Raises KeyError."""
    return {ending.name: ending for ending in ENDINGS}[name]
