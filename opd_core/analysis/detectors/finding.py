"""What a detector is told of a run's recipe, and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

Level = Literal["note", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A known failure that a run shows, e.g. ``engine_gap`` from train step 12 on.

    ``evidence`` holds the numbers and their train steps, ``cause`` what they mean, ``cure`` what to
    do, with the recipe's keys. ``train_step`` is the first one after which it was seen.
    """

    name: str
    train_step: int
    level: Level
    evidence: str
    cause: str
    cure: str

    def __str__(self) -> str:
        return (
            f"{self.name} (train step {self.train_step}): {self.cause}. Seen: {self.evidence}. "
            f"To do: {self.cure}"
        )


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What detectors must know of the recipe. ``scored``: there are teachers; the task weight of a
    run without them is 1. ``exact``: student and teachers all compute in float32."""

    scored: bool
    exact: bool
    judged: bool
    task_adv_weight: float
    opd_adv_weight: float
    kl_clamp: float | None
    max_new_tokens: int | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """From a recipe as plain data (``config.json``); keys that an older one lacks have their
        defaults."""
        opd, task = config.get("opd"), config.get("task") or {}
        return cls(
            scored=opd is not None,
            exact=opd is not None and _dtypes(config, opd) == {"float32"},
            judged=bool(task.get("judge") or task.get("batch_judge")),
            task_adv_weight=1.0 if opd is None else opd.get("task_adv_weight", 0.0),
            opd_adv_weight=0.0 if opd is None else opd.get("opd_adv_weight", 1.0),
            kl_clamp=None if opd is None else opd.get("kl_clamp"),
            max_new_tokens=(config.get("sampling") or {}).get("max_new_tokens"),
        )


def _dtypes(config: Mapping[str, Any], opd: Mapping[str, Any]) -> set[str | None]:
    """Those of the student and of all teachers; None where a server has its own."""
    launches = [
        replica.get("launch") or {}
        for teacher in opd.get("teachers", ())
        for replica in teacher.get("replicas") or [teacher]
    ]
    dtypes = {launch.get("dtype") for launch in launches}
    return dtypes | {(config.get("student") or {}).get("dtype", "float32")}
