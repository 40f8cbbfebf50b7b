"""Everything in which runs differ: recipe, data, models, code, versions, machine. A seed is told
with its run and is no difference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from opd_core.analysis.outcome import Difference
from opd_core.analysis.run_data import RunData
from opd_core.errors import ConfigError
from opd_core.recipe import parse_config
from opd_core.tracking.mlflow_sink import flatten_params
from opd_core.training.lineage import FREE

UNTOLD = ("seed", "description", "run.*", "tracking.*", "devices.*", "ray.*")
"""Where a run lives and who is told of it: not worth a line."""
SURROUNDINGS = (
    *(pattern for patterns in FREE.values() for pattern in patterns),
    "seed",
    "cost",
    "cost.*",
    "student.devices",
    "sampling.devices",
    "opd.teachers.*.launch.devices",
)
"""Settings that runs of one arm need not share: they change no number, or are the seed."""
LENGTH = ("training.steps", "training.stop_when*")
"""Settings that a resumed run may change and that an arm must share all the same."""
CONTENT = ("student.model", "data.train", "data.evaluation", "opd.teachers.*.launch.model")
"""Paths: what lies there is told by its fingerprint."""

Arms = Sequence[tuple[str, Sequence[RunData]]]
Finding = tuple[str, str, dict[str, str]]
"""Kind, key, and the value of each run by its id."""

RECIPE, NO_EFFECT, DATA, MODELS = "recipe", "without effect", "data", "models"
CODE, PYTHON, PACKAGES, MACHINE = "code", "python", "packages", "machine"
ABSENT, NOT_RECORDED, CLEAN, DEFAULT = "absent", "not recorded", "none", " (default)"
ANEW = "the student's model"
PROVENANCE = {
    "git_commit": (CODE, "commit"),
    "git_changes": (CODE, "uncommitted changes"),
    "python": (PYTHON, "python"),
    "platform": (MACHINE, "platform"),
    "host": (MACHINE, "host"),
    "cpu": (MACHINE, "cpu"),
    "gpus": (MACHINE, "gpus"),
}
"""Fields of an attempt in a run's provenance, and as what they are told."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A run's recipe by dotted key, values as a recipe writes them; ``explicit`` are the keys whose
    value is not the default."""

    values: dict[str, str]
    explicit: frozenset[str]

    def shown(self, key: str) -> str:
        """The value, and whether it is the default."""
        if key not in self.values:
            within = any(name.startswith(f"{key}.") for name in self.values)
            return "set" if within else ABSENT
        return self.values[key] + ("" if key in self.explicit else DEFAULT)


def settings_of(run: RunData) -> Settings:
    """The run's settings. One that its version did not know yet has today's default: that is what
    it did. A recipe that today's version refuses is taken as it stands."""
    try:
        config = parse_config(run.config, source=run.run_id)
    except ConfigError:
        values = flatten_params(run.config)
        return Settings(values, frozenset(values))
    explicit = config.model_dump(mode="json", exclude_defaults=True)
    return Settings(flatten_params(config.resolved()), frozenset(flatten_params(explicit)))


def identity(run: RunData) -> dict[str, str]:
    """What runs of one arm share: the settings that change numbers, and the content of data and
    models; where that was not recorded, their paths."""
    skipped = SURROUNDINGS + (CONTENT if run.fingerprints else ())
    settings = settings_of(run).values.items()
    return {k: v for k, v in settings if matters(k) and not _listed(k, skipped)} | {
        "begun from": run.forked_from,
        **{f"fingerprint of {what}": found for what, found in run.fingerprints.items()},
    }


def matters(key: str) -> bool:
    """Whether a setting changes numbers."""
    return _listed(key, LENGTH) or not _listed(key, SURROUNDINGS)


def code_of(run: RunData) -> tuple[str, str]:
    """The commit and the uncommitted changes that the run's attempts were made with."""
    return _recorded(run, "git_commit"), _recorded(run, "git_changes")


def find_differences(arms: Arms) -> tuple[Difference, ...]:
    """All differences among the runs of these arms, each arm a label and its runs; those of the
    recipe that change numbers come first."""
    runs = list({run.run_id: run for _, runs in arms for run in runs}.values())
    found = [
        *_of_recipe(runs),
        (RECIPE, "begun from", {run.run_id: run.forked_from or ANEW for run in runs}),
        *_of_fingerprints(runs),
        *(
            (kind, key, {run.run_id: _recorded(run, field) for run in runs})
            for field, (kind, key) in PROVENANCE.items()
        ),
        *_of_packages(runs),
    ]
    return tuple(
        Difference(kind, key, _by_arm(arms, values))
        for kind, key, values in found
        if len(set(values.values())) > 1
    )


def _of_recipe(runs: Sequence[RunData]) -> list[Finding]:
    settings = {run.run_id: settings_of(run) for run in runs}
    keys = list(dict.fromkeys(key for each in settings.values() for key in each.values))
    null = {k for each in settings.values() for k, value in each.values.items() if value == "null"}
    told = [
        key
        for key in keys
        if not _listed(key, UNTOLD)
        and not null.intersection(_above(key))
        and len({each.values.get(key) for each in settings.values()}) > 1
    ]
    fingerprinted = all(run.fingerprints for run in runs)

    def changes_numbers(key: str) -> bool:
        return matters(key) and not (fingerprinted and _listed(key, CONTENT))

    return [
        (
            RECIPE if changes_numbers(key) else NO_EFFECT,
            key,
            {run_id: each.shown(key) for run_id, each in settings.items()},
        )
        for key in sorted(told, key=changes_numbers, reverse=True)
    ]


def _of_fingerprints(runs: Sequence[RunData]) -> Iterator[Finding]:
    for what in dict.fromkeys(name for run in runs for name in run.fingerprints):
        values = {run.run_id: run.fingerprints.get(what) or NOT_RECORDED for run in runs}
        yield DATA if what.startswith("data") else MODELS, what, values


def _of_packages(runs: Sequence[RunData]) -> Iterator[Finding]:
    versions = {run.run_id: _packages(run) for run in runs}
    if not all(versions.values()):  # older runs recorded none: one difference, not one a package
        recorded = {who: "recorded" if found else NOT_RECORDED for who, found in versions.items()}
        yield PACKAGES, "versions", recorded
        return
    for name in sorted({name for found in versions.values() for name in found}):
        yield PACKAGES, name, {who: found.get(name, ABSENT) for who, found in versions.items()}


def _by_arm(arms: Arms, values: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """One value an arm where its runs agree, else one a run."""
    told: list[tuple[str, str]] = []
    for label, runs in arms:
        of_runs = [(run.run_id, values[run.run_id]) for run in runs]
        agreed = len({value for _, value in of_runs}) == 1
        told += [(label, of_runs[0][1])] if agreed else of_runs
    return tuple(told)


def _packages(run: RunData) -> dict[str, str]:
    """Versions by name; of attempts that differ, one after the other."""
    found: dict[str, list[str]] = {}
    for attempt in _attempts(run):
        packages = attempt.get("packages")
        for name, version in packages.items() if isinstance(packages, dict) else ():
            found.setdefault(name, []).append(str(version))
    return {name: _in_turn(versions) for name, versions in found.items()}


def _recorded(run: RunData, field: str) -> str:
    """The field of all attempts, one after the other where they differ."""
    values = [attempt[field] for attempt in _attempts(run) if field in attempt]
    listed = [", ".join(map(str, v)) if isinstance(v, list) else str(v) for v in values]
    return _in_turn([value or CLEAN for value in listed]) if listed else NOT_RECORDED


def _attempts(run: RunData) -> list[Mapping[str, Any]]:
    """Those that can be read: a file of another version may hold anything."""
    attempts = run.provenance.get("attempts")
    if not isinstance(attempts, list):
        return []
    return [attempt for attempt in attempts if isinstance(attempt, dict)]


def _in_turn(values: Iterable[str]) -> str:
    return " → ".join(dict.fromkeys(values))


def _above(key: str) -> Iterator[str]:
    """``a`` and ``a.b`` of ``a.b.c``."""
    parts = key.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts)))


def _listed(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)
