"""What is to be run, and the run directory."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from opd_core.config import ExperimentConfig
from opd_core.errors import ConfigError
from opd_core.lifecycle.settling import SETTLE_S
from opd_core.preflight import PreflightReport
from opd_core.preflight.facts import fingerprint
from opd_core.recipe import load_recipe
from opd_core.training.attempts import (
    Attempt,
    RunHistory,
    await_ending,
    continue_run,
    end_leftovers,
    find_flow_run,
)
from opd_core.training.files import CONFIG_FILE, LOGS_FOLDER
from opd_core.training.forks import ForkPoint, fork_run
from opd_core.training.lineage import RunPlan, plan_run
from opd_core.whole_file import write_whole
from tasks.cards import write_cards
from tasks.console import announce
from tasks.hooks import try_again
from tasks.provenance import add_provenance

MARGIN_S = 30.0


@dataclass(frozen=True)
class RunRecord:
    """One run: what it does, where everything of it lies, and which attempt this is."""

    run_id: str
    directory: Path
    config: ExperimentConfig
    history: RunHistory

    def log(self, name: str) -> Path:
        """The log file of one of its processes."""
        return self.directory / LOGS_FOLDER / f"{name}.log"


def plan_experiment(
    recipe: str, overrides: Sequence[str] = (), resume: str = "", fork: str = ""
) -> RunPlan:
    """What is to be run. A flow run that is tried again goes on in the directory of its first try.

    Raises :class:`~opd_core.errors.ConfigError`.
    """
    if flow_run.id:
        try_again(str(flow_run.id))
    try:
        plan = plan_run(recipe, overrides, resume=resume, fork=fork)
    except ConfigError:  # what a first try forked from may be gone, or have trained on
        if (tried := _tried_before(load_recipe(recipe))) is None:
            raise
        plan = plan_run(recipe, resume=str(tried))
    else:
        if plan.resume is None and (tried := _tried_before(plan.config)) is not None:
            plan = plan_run(recipe, resume=str(tried))
    if plan.resume is not None:
        teardown_s = plan.config.run.teardown_s
        await_ending(plan.resume, teardown_s + SETTLE_S + MARGIN_S, _tell_wait(plan.resume))
        end_leftovers(plan.resume, teardown_s)
    return plan


def _tell_wait(run_dir: Path) -> Callable[[float], None]:
    told = False

    def waiting(seconds: float) -> None:
        nonlocal told
        if not told:
            announce(f"waiting until the last attempt of {run_dir.name} has ended")
        told = True

    return waiting


def _tried_before(config: ExperimentConfig) -> Path | None:
    """Where an earlier try of this Prefect flow run lies."""
    tried = find_flow_run(config.run.root_dir, str(flow_run.id)) if flow_run.id else None
    if tried is not None:
        announce(f"this flow run was tried before: it goes on in {tried}")
    return tried


@task(name="open run directory", cache_policy=NO_CACHE)
def open_run(plan: RunPlan, checked: PreflightReport) -> RunRecord:
    """Create ``<root>/<name>-<id>/``, or take up that of ``plan.resume``, with the resolved
    recipe, the provenance of this attempt and the pair check cards in it.

    Raises :class:`~opd_core.errors.ConfigError` or :class:`~opd_core.errors.PreflightError` for a
    run that cannot be continued.
    """
    config, flow_run_id = plan.config, str(flow_run.id or "")
    fingerprints = find_fingerprints(config, checked)
    if plan.resume is not None:
        directory, teardown_s = plan.resume, config.run.teardown_s
        history = continue_run(directory, fingerprints, flow_run_id, teardown_s)
        announce(f"continuing run {history.run_id}, attempt {len(history.attempts)}")
    else:
        run_id = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        directory = config.run.root_dir / run_id
        directory.mkdir(parents=True)
        forked_from = _fork(plan.fork, directory) if plan.fork else None
        history = RunHistory(run_id, (Attempt.begin(flow_run_id),), fingerprints, forked_from)
        history.write(directory)
    (directory / LOGS_FOLDER).mkdir(exist_ok=True)
    run = RunRecord(history.run_id, directory, config, history)
    write_config(run)
    add_provenance(directory, config, history.attempts[-1].started_at)
    write_cards(directory, checked.cards)
    return run


def _fork(source: Path, directory: Path) -> ForkPoint:
    try:
        point = fork_run(source, directory)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    announce(f"beginning from train step {point.train_step} of run {point.run_id}")
    return point


THE_STUDENT = "the student"


def the_teacher(name: str) -> str:
    """What a teacher's fingerprint is of."""
    return f"teacher {name!r}"


def find_fingerprints(config: ExperimentConfig, checked: PreflightReport) -> dict[str, str]:
    """Of all that a run is made of and that lies here: its models and its data. The weights behind
    an external server are not known."""
    found = {the_teacher(name): facts.fingerprint for name, facts in checked.teachers.items()}
    if checked.student is not None:
        found[THE_STUDENT] = checked.student.fingerprint
    data = {"data.train": config.data.train, "data.evaluation": config.data.evaluation}
    return found | {key: fingerprint([Path(file)]) for key, file in data.items() if file}


def write_config(run: RunRecord) -> None:
    """Write the resolved recipe: what was run, every default spelled out, no key in it."""
    text = json.dumps(run.config.resolved(), indent=2, ensure_ascii=False)
    write_whole(run.directory / CONFIG_FILE, text)
