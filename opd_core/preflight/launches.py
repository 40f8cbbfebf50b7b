"""The teacher servers that a run starts."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from opd_core.config import Backend, ExperimentConfig, LaunchConfig


@dataclass(frozen=True, slots=True)
class Launched:
    """One server that this run starts; ``port`` None takes a free one."""

    teacher: str
    who: str
    backend: Backend
    launch: LaunchConfig
    port: int | None


def launches(config: ExperimentConfig) -> list[Launched]:
    """Every server that this run starts, in the order of the recipe."""
    found = []
    for teacher in config.opd.teachers if config.opd else ():
        for number, replica in enumerate(teacher.all_replicas):
            if replica.launch is None:
                continue
            who = f"teacher {teacher.name!r}" + (f" replica {number}" if number else "")
            port = urlsplit(replica.endpoint).port if replica.endpoint else replica.launch.port
            found.append(Launched(teacher.name, who, replica.backend, replica.launch, port))
    return found


def external_teachers(config: ExperimentConfig) -> list[str]:
    """Names of the teachers with a server that this run does not start."""
    return [
        teacher.name
        for teacher in (config.opd.teachers if config.opd else ())
        if any(replica.launch is None for replica in teacher.all_replicas)
    ]
