"""The servers that a run starts: one record for a teacher's, and for one that samples the student.

A server of the student loads the student as it was before training. What it samples counts only
after the training job has given it its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from opd_core.config import (
    CONTEXT_MARGIN,
    Backend,
    ExperimentConfig,
    LaunchConfig,
    OPDConfig,
    OPDTeacherConfig,
    ServerConfig,
)
from opd_core.config.values import Dtype

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class SamplingRole:
    """What a server is told because it samples: the sequences that it decodes together, and
    whether the student trains on its devices too."""

    max_rows: int
    shares_devices: bool


@dataclass(frozen=True, slots=True)
class Server:
    """One server. ``teacher`` None samples the student; ``port`` None takes a free one."""

    teacher: str | None
    number: int
    backend: Backend
    launch: LaunchConfig
    port: int | None = None
    sampling: SamplingRole | None = None

    @property
    def kind(self) -> Literal["teacher", "student"]:
        """Whose side it is on."""
        return "student" if self.teacher is None else "teacher"

    @property
    def child(self) -> str:
        """Its process: ``teacher-NAME`` and ``teacher-NAME-1``, or ``student-0``."""
        if self.teacher is None:
            return f"student-{self.number}"
        return f"teacher-{self.teacher}" + (f"-{self.number}" if self.number else "")

    @property
    def who(self) -> str:
        """Its name in a message."""
        if self.teacher is None:
            return f"student server {self.number}"
        return f"teacher {self.teacher!r}" + (f" replica {self.number}" if self.number else "")

    @property
    def settings(self) -> str:
        """Where a recipe says how it is launched."""
        return "sampling.server" if self.teacher is None else "launch"

    @property
    def endpoint(self) -> str:
        """Where it answers, once it has a port."""
        return f"http://{HOST}:{self.port}"


def teacher_servers(opd: OPDConfig | None) -> tuple[Server, ...]:
    """Every teacher server that the run starts, in the order of the recipe."""
    return tuple(
        Server(
            teacher.name,
            number,
            replica.backend,
            replica.launch,
            urlsplit(replica.endpoint).port if replica.endpoint else replica.launch.port,
        )
        for teacher in (opd.teachers if opd else ())
        for number, replica in enumerate(teacher.all_replicas)
        if replica.launch is not None
    )


def student_servers(config: ExperimentConfig) -> tuple[Server, ...]:
    """The servers that sample the student; none where sampling actors do."""
    sampling = config.sampling
    if sampling.engine == "transformers":
        return ()
    role = SamplingRole(sampling.max_rows, shares_devices=config.shares_gpus)
    return tuple(
        Server(None, number, sampling.engine, student_launch(config, number), sampling=role)
        for number in range(sampling.actors)
    )


def run_servers(config: ExperimentConfig) -> tuple[Server, ...]:
    """Every server that the run starts: the teachers' in the order of the recipe, then the
    student's."""
    return (*teacher_servers(config.opd), *student_servers(config))


def student_launch(config: ExperimentConfig, number: int) -> LaunchConfig:
    """How server ``number`` of the student is launched.

    It gets the ``number``-th ``tp_size`` of ``sampling.devices``, or of the student's devices where
    it shares them with training. Without a context length of its own it gets what a rollout needs,
    without a dtype the student's; LMDeploy has no float32 and gets bfloat16 in its place.
    """
    sampling, student = config.sampling, config.student
    given = sampling.server or ServerConfig()
    backend: Backend = "lmdeploy" if sampling.engine == "lmdeploy" else "sglang"
    dtype = "bfloat16" if backend == "lmdeploy" else student.dtype
    own = (sampling.devices or student.devices)[number * given.tp_size :][: given.tp_size]
    return LaunchConfig.model_validate(
        {
            **given.model_dump(),
            "model": student.model,
            "devices": own if student.gpus else ("cpu",),
            "dtype": given.dtype or dtype,
            "context_length": given.context_length or needed_context(config, backend),
        }
    )


def served_context(teacher: OPDTeacherConfig, model: int) -> int:
    """Tokens that every launched replica of a teacher holds: the least that is named, else the
    ``model``'s own."""
    named = (replica.launch.context_length for replica in teacher.all_replicas if replica.launch)
    return min(filter(None, named), default=model)


def scoring_dtype(teacher: OPDTeacherConfig) -> Dtype:
    """Of a teacher's numbers: float32 where all its servers say so, else the coarsest."""
    named = {replica.launch and replica.launch.dtype for replica in teacher.all_replicas}
    return "float32" if named == {"float32"} else "bfloat16"


def needed_context(config: ExperimentConfig, backend: Backend) -> int:
    """Tokens that a server must be able to hold: a rollout, and what the backend keeps back."""
    return config.rollout_tokens + CONTEXT_MARGIN[backend]
