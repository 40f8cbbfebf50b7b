"""Where a run begins: anew, from what its own directory holds (resume), or from another's
checkpoint (fork); and which settings may change on the way.

A resumed run is one run: its numbers must be those of a run that was never interrupted. So a
setting may change only if it changes no number of a train step; anything else needs a run of its
own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from opd_core.config import ExperimentConfig, ServerConfig
from opd_core.errors import ConfigError
from opd_core.recipe import load_recipe, parse_config
from opd_core.tracking.journal import read_all
from opd_core.tracking.mlflow_sink import flatten_params
from opd_core.training.attempts import COMPLETED, RunHistory, check_not_running, read_history
from opd_core.training.files import CONFIG_FILE, JOURNAL_FILE
from opd_core.training.forks import checkpoint_to_fork, name_of

FREE: dict[str, tuple[str, ...]] = {
    "where the run lives, what it costs, and who is told of it": (
        "description",
        "cost*",
        "devices.*",
        "ray.*",
        "run.*",
        "tracking.*",
    ),
    "what is measured beside training": ("training.teacher_gradient_every",),
    "what is kept, and how often a dead job is started again": (
        "training.checkpoint_every",
        "training.keep_checkpoints",
        "training.keep_every",
        "training.export_checkpoints",
        "training.max_restarts",
    ),
    "when it ends, and when it is measured: train steps do not depend on it": (
        "training.steps",
        "training.stop_when*",
        "evaluation.every",
    ),
    "limits of patience: what ends within them is the same": (
        "task.judge_timeout_s",
        "task.max_groups_per_step",
        "opd.failure_budget.*",
        "opd.teachers.*.request_timeout_s",
        "opd.teachers.*.max_retry_per_sample",
        "opd.teachers.*.max_concurrency",
        "opd.teachers.*.max_tokens_in_flight",
        "opd.teachers.*.adaptive",
        "opd.teachers.*.target_latency_s",
        "opd.teachers.*.hedge",
        "opd.teachers.*.away_limit_s",
        "opd.teachers.*.hang_limit_s",
        "opd.teachers.*.canary_every",
        "opd.teachers.*.launch.startup_limit_s",
        "opd.teachers.*.launch.max_restarts",
        "sampling.max_restarts",
        "sampling.server.startup_limit_s",
        "sampling.server.max_restarts",
    ),
    "how a teacher is reached and what room it gets; its model is frozen and checked": (
        "opd.teachers.*.api_key",
        "opd.teachers.*.endpoint",
        "opd.teachers.*.launch.port",
        "opd.teachers.*.launch.memory_fraction",
        "opd.teachers.*.launch.context_length",
    ),
    "how weights reach the student's servers, and what room those get": (
        "sampling.weight_sync",
        "sampling.sync_folder",
        "sampling.server.memory_fraction",
        "sampling.server.context_length",
    ),
}
"""Settings that change no number, by the reason why."""

ROUNDING: dict[str, tuple[str, ...]] = {
    "the student's side: sums are taken in another order, or by other kernels": (
        "student.devices",
        "student.cpu_threads",
        "sampling.actors",
        "sampling.max_rows",
        "sampling.devices",
        "sampling.server.python",
        "sampling.server.tp_size",
        "sampling.server.prefill_tokens",
        "sampling.server.cpu_threads",
        "sampling.server.extra_args",
        "sampling.server.env*",
        "training.actors",
        "training.shard_ranks",
        "training.backend",
        "training.packing",
        "training.micro_batch_tokens",
        "training.logprob_chunk_tokens",
        "training.gradient_checkpointing",
    ),
    "the teachers' side: the same model, served in another way": (
        "opd.score_store",
        "opd.teachers.*.launch.devices",
        "opd.teachers.*.launch.python",
        "opd.teachers.*.launch.tp_size",
        "opd.teachers.*.launch.prefill_tokens",
        "opd.teachers.*.launch.cpu_threads",
        "opd.teachers.*.launch.extra_args",
        "opd.teachers.*.launch.env*",
    ),
}
"""Settings that may change the last bits of a number and nothing more: refused where the experiment
is to be deterministic."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What to run, and the run directory to go on in (``resume``) or to begin from (``fork``)."""

    config: ExperimentConfig
    resume: Path | None = None
    fork: Path | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that is not what it was; values as a recipe writes them, ``-`` where it was not
    there."""

    key: str
    before: str
    now: str


def plan_run(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    *,
    resume: str = "",
    fork: str = "",
) -> RunPlan:
    """Find out what is to be run; nothing is touched.

    With ``resume`` or ``fork`` (a run directory, or a run id under the run root) that run's own
    ``config.json`` is the recipe, and ``recipe`` says only where the run root is. Raises
    :class:`ConfigError` for a run that is not there, is alive, or cannot go on with these settings,
    :class:`~opd_core.errors.DataError` for a journal that cannot be read.
    """
    if resume and fork:
        raise ConfigError("expected --resume or --fork, got both: a run goes on, or begins anew")
    if not (name := resume or fork):
        return RunPlan(load_recipe(recipe, overrides))
    run_dir = find_run(name, recipe, overrides)
    source = run_dir / CONFIG_FILE
    if resume:
        history = read_history(run_dir)
        check_not_running(history)
        config = load_recipe(source, overrides)
        text = source.read_text(encoding="utf-8")
        check_resume(run_dir, history, parse_config(json.loads(text), source=str(source)), config)
        return RunPlan(config, resume=run_dir)
    config = load_recipe(source, overrides)
    _check_fork(run_dir, config)
    return RunPlan(config, fork=run_dir)


def find_run(name: str, recipe: str | Path, overrides: Sequence[str]) -> Path:
    """The directory as it is named, else the run of that id under the recipe's run root.

    Raises :class:`ConfigError`.
    """
    if Path(name).is_dir():
        return Path(name).absolute()
    where = [override for override in overrides if override.startswith("run.root=")]
    root = load_recipe(recipe, where).run.root_dir
    if not (root / name).is_dir():
        raise ConfigError(
            f"no run {name!r}: expected a run directory, or the id of a run in {root}"
        )
    return root / name


def check_resume(
    run_dir: Path, history: RunHistory, before: ExperimentConfig, now: ExperimentConfig
) -> None:
    """Raise :class:`ConfigError` if the run cannot go on with the settings ``now``."""
    changed = changes(before, now)
    refused = {change: why for change in changed if (why := _objection(change, before)) is not None}
    if refused:
        lines = [f"  {c.key}: {c.before} → {c.now}{why}" for c, why in refused.items()]
        settings = " ".join(f"--set '{c.key}={c.now}'" for c in refused if c.now != "-")
        raise ConfigError(
            f"run {history.run_id} cannot go on: this would change its numbers:\n"
            + "\n".join(lines)
            + "\nleave them as they were, or begin a new run from its newest checkpoint: "
            f"opd run --fork {name_of(run_dir)} {settings}".rstrip()
        )
    steps = now.training.steps
    further = steps > before.training.steps or now.training.stop_when != before.training.stop_when
    trained, stop = _trained_steps(run_dir), before.training.stop_when
    if history.attempts[-1].status == COMPLETED and not further:
        on = f"raise them: --set training.steps={2 * before.training.steps}"
        if stop is not None and trained < before.training.steps:
            on = f"it stopped at its target ({stop.metric}): --set training.stop_when=null"
        raise ConfigError(
            f"run {history.run_id} has completed after {trained} of {before.training.steps} train "
            f"steps; to train on, {on}"
        )
    if trained > steps:
        raise ConfigError(
            f"training.steps: {steps} is below the {trained} train steps that run "
            f"{history.run_id} has trained: name {trained} or more"
        )


def changes(before: ExperimentConfig, now: ExperimentConfig) -> list[Change]:
    """Every setting that differs, in the order of a recipe."""
    old, new = _settings(before), _settings(now)
    return [
        Change(key, old.get(key, "-"), new.get(key, "-"))
        for key in old | new
        if old.get(key) != new.get(key)
    ]


def _settings(config: ExperimentConfig) -> dict[str, str]:
    """Every setting by its key, also where servers sample with all defaults (``server: null``)."""
    sampling = config.sampling
    if sampling.by_servers and sampling.server is None:
        sampling = sampling.model_copy(update={"server": ServerConfig()})
    return flatten_params(config.model_copy(update={"sampling": sampling}).resolved())


def _objection(change: Change, before: ExperimentConfig) -> str | None:
    """Why this setting may not change, in parentheses where that has to be explained; None if it
    may."""
    schedule = before.training.schedule
    if change.key == "training.steps" and schedule != "constant":
        return f" (schedule: {schedule}, so the learning rate of every step depends on it)"
    if _listed(change.key, FREE):
        return None
    if not _listed(change.key, ROUNDING):
        return ""
    return " (deterministic: true, and it may change last bits)" if before.deterministic else None


def _listed(key: str, table: dict[str, tuple[str, ...]]) -> bool:
    return any(fnmatchcase(key, pattern) for patterns in table.values() for pattern in patterns)


def _trained_steps(run_dir: Path) -> int:
    return sum("time/step_s" in record.metrics for record in read_all(run_dir / JOURNAL_FILE))


def _check_fork(run_dir: Path, config: ExperimentConfig) -> None:
    if (reached := checkpoint_to_fork(run_dir).train_step) >= config.training.steps:
        raise ConfigError(
            f"the newest checkpoint of {run_dir.name} is of train step {reached}, so a run of "
            f"{config.training.steps} has nothing left to train: raise training.steps"
        )
