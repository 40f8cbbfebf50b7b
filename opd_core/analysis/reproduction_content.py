"""Whether what differs between an original and its reruns makes them another experiment.

A path tells nothing: other content at the same path is drift, which a verdict is about. Another
path that leads to other content is a change that somebody made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from opd_core.analysis.differences import CONTENT, DATA, MODELS, NO_EFFECT, NOT_RECORDED, RECIPE
from opd_core.analysis.outcome import Difference
from opd_core.analysis.run_data import RunData

LAUNCH = "opd.teachers.*.launch"
"""Told as one difference where a server was launched in one run and not in another."""
PLACE = ("launch", "endpoint", "backend")
"""Settings of a server that say where it is and how it is spoken to."""


def by_content(differences: Sequence[Difference], original: RunData) -> tuple[Difference, ...]:
    """The differences, those of the recipe first: paths and teachers judged by what is there.

    A path is a change of the recipe if what it leads to has another fingerprint. A teacher that was
    launched and is external now is one if both fingerprints are known and differ; else where it is
    served has no effect.
    """
    differ = {
        each.key: {value for _, value in each.values}
        for each in differences
        if each.kind in (DATA, MODELS)
    }
    moved = {
        each.key.removesuffix("launch") for each in differences if fnmatchcase(each.key, LAUNCH)
    }
    teachers = dict(enumerate(map(_name, _teachers(original))))

    def kind(each: Difference) -> str:
        prefix, _, last = each.key.rpartition(".")
        found = differ.get(_fingerprint_of(each.key, teachers), set())
        if f"{prefix}." in moved and last in PLACE:
            return RECIPE if found and NOT_RECORDED not in found else NO_EFFECT
        path = any(fnmatchcase(each.key, pattern) for pattern in CONTENT)
        return RECIPE if found and path and each.kind == NO_EFFECT else each.kind

    told = [replace(each, kind=kind(each)) for each in differences]
    return tuple(sorted(told, key=lambda each: each.kind != RECIPE))


def unknown_teachers(runs: Iterable[RunData]) -> list[str]:
    """Teachers with an external server whose fingerprint a run does not know, each once."""
    return list(
        dict.fromkeys(
            _name(teacher)
            for run in runs
            for teacher in _teachers(run)
            if _name(teacher) not in run.fingerprints
            and any(server.get("launch") is None for server in _servers(teacher))
        )
    )


def _fingerprint_of(key: str, teachers: Mapping[int, str]) -> str:
    """Whose fingerprint tells what a path leads to, or which model a teacher is."""
    if key.startswith("opd.teachers."):
        return teachers.get(int(key.split(".")[2]), "")
    return "the student" if key == "student.model" else key


def _teachers(run: RunData) -> list[Mapping[str, Any]]:
    return (run.config.get("opd") or {}).get("teachers") or []


def _servers(teacher: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return teacher.get("replicas") or [teacher]


def _name(teacher: Mapping[str, Any]) -> str:
    """As its fingerprint is named."""
    return f"teacher {teacher.get('name')!r}"
