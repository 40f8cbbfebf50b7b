"""The servers that a run starts, and those that it does not."""

from __future__ import annotations

from opd_core.config import ExperimentConfig
from opd_core.serving.servers import Server, student_servers, teacher_servers


def launches(config: ExperimentConfig) -> list[Server]:
    """Every server that this run starts: the teachers' in the order of the recipe, then the
    student's."""
    return [*teacher_servers(config.opd), *student_servers(config)]


def external_teachers(config: ExperimentConfig) -> list[str]:
    """Names of the teachers with a server that this run does not start."""
    return [
        teacher.name
        for teacher in (config.opd.teachers if config.opd else ())
        if any(replica.launch is None for replica in teacher.all_replicas)
    ]
