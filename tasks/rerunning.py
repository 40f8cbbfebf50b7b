"""An experiment again: what is repeated, how its runs are told apart, and what they came to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact

from opd_core.analysis.comparison import Target, compare
from opd_core.analysis.reproduction import Reproduction, judge_reruns
from opd_core.analysis.reproduction_text import differences_in_words, reproduction_markdown
from opd_core.analysis.run_data import load_run_data
from opd_core.config import ExperimentConfig
from opd_core.errors import ConfigError, OPDError
from opd_core.recipe import find_recipe, load_recipe, override_key
from opd_core.tracking.mlflow_sink import connect, tracking_uri
from opd_core.training.attempts import COMPLETED, check_not_running, find_flow_run, read_history
from opd_core.training.files import CONFIG_FILE
from opd_core.whole_file import write_whole
from tasks.children import Child
from tasks.comparing import Compared, compare_runs, tell_comparison
from tasks.console import announce, warn
from tasks.links import prefect_page
from tasks.lookup import find_runs

RERUN_OF_TAG, RERUN_TAG = "opd_rerun_of", "opd_rerun"
"""MLflow's tags of a rerun: the original's run id, and the Prefect flow run that asked for it.
Without a dot, which would part the key of a setting."""
REPRODUCTION_TAG = "opd.reproduction"
"""The verdict, at MLflow's run of the comparison."""
ROOT, TAGS = "run.root", "tracking.tags"
JSON_FILE, MARKDOWN_FILE = "reproduction.json", "reproduction.md"
VERDICT_ARTIFACT = "verdict"
"""Prefect's key of the verdict with its runs and all in which they differ."""


class NotAllRan(OPDError):
    """Of the runs that were asked for, some did not complete."""


@dataclass(frozen=True, slots=True)
class Source:
    """What is repeated: a recipe's file, what it comes to with the changes, and the run directory
    that it is taken from (None: a recipe has no original)."""

    recipe: Path
    config: ExperimentConfig
    original: Path | None

    @property
    def root(self) -> Path:
        """Where the reruns' directories are."""
        return self.config.run.root_dir.absolute()

    @property
    def name(self) -> str:
        """The original's run id, or the recipe's name."""
        return self.original.name if self.original else self.config.name


def find_source(
    run: str,
    recipe: str,
    overrides: Sequence[str],
    root: Path,
    mlflow_uri: str | None = None,
) -> Source:
    """What is to be repeated: a run by its id, directory or MLflow id; without one, a recipe.

    The reruns of a run have their directories beside it, unless ``run.root`` is among the
    overrides. Raises :class:`ConfigError` for what is not there or cannot be repeated, before
    anything is started.
    """
    if not run:
        file = find_recipe(recipe).expanduser().absolute()
        return Source(file, load_recipe(file, overrides), None)
    (original,) = find_runs([run], root, mlflow_uri)
    _check_repeatable(original)
    file = original / CONFIG_FILE
    elsewhere = ROOT in map(override_key, overrides)
    beside = [] if elsewhere else [f"{ROOT}={json.dumps(str(original.parent))}"]
    return Source(file, load_recipe(file, [*overrides, *beside]), original)


def rerun_overrides(source: Source, overrides: Sequence[str], flow_run_id: str) -> list[str]:
    """The changes for each rerun: those that were asked for, where its directory is looked for
    later, and the tags by which MLflow shows what it is a rerun of, beside the recipe's own."""
    added = {ROOT: str(source.root), f"{TAGS}.{RERUN_TAG}": flow_run_id}
    if source.original is not None:
        added[f"{TAGS}.{RERUN_OF_TAG}"] = source.original.name
    kept = [each for each in overrides if override_key(each) not in added]
    return [*kept, *(f"{key}={json.dumps(value)}" for key, value in added.items())]


def check_target(source: Source, target: Target) -> None:
    """Raise :class:`ConfigError` if the original has no such metric or axis: without them there is
    no verdict, however many runs are made. A recipe has none yet."""
    if source.original is not None:
        compare([load_run_data(source.original)], target)


@dataclass(frozen=True, slots=True)
class Repeated:
    """What the reruns came to. ``compared`` is None for a recipe's only run."""

    source: Source
    children: tuple[Child, ...]
    runs: Mapping[str, Path]
    reproduction: Reproduction
    compared: Compared | None

    def to_json(self) -> dict[str, Any]:
        """The verdict and where everything else is."""
        return {
            "verdict": self.reproduction.verdict,
            "sentence": self.reproduction.sentence,
            "differences": differences_in_words(self.reproduction),
            "original": str(self.source.original or ""),
            "reruns": {child: str(run) for child, run in self.runs.items()},
            "comparison": self.compared.to_json() if self.compared else None,
        }

    @property
    def markdown(self) -> str:
        """For a person, with links to the flow runs."""
        links = {run.name: _link(child, run.name) for child, run in self.runs.items()}
        return reproduction_markdown(self.reproduction, links)


def judge_children(source: Source, children: Sequence[Child], target: Target) -> Repeated:
    """Compare the runs that completed with the original and judge them; the files of both are in
    the comparison's folder, and MLflow has both.

    Raises :class:`NotAllRan` if none completed, :class:`ConfigError` if a run's directory is not
    here or the runs cannot be compared.
    """
    runs = {child.flow_run_id: _directory(source, child) for child in children if child.completed}
    if not runs:
        raise NotAllRan(f"none of the {len(children)} reruns completed: {_failed(children)}")
    directories = [*([source.original] if source.original else []), *runs.values()]
    compared = None
    if len(directories) > 1:
        compared = compare_runs([*map(str, directories)], target, root=source.root)
    data = [load_run_data(directory) for directory in directories]
    comparison = compared.comparison if compared else compare(data, target)
    original, reruns = (data[0], data[1:]) if source.original else (None, data)
    reproduction = judge_reruns(original, reruns, comparison)
    repeated = Repeated(source, tuple(children), runs, reproduction, compared)
    _keep(repeated)
    return repeated


def tell_repeated(repeated: Repeated) -> None:
    """Tell the flow run's log, and keep the verdict and the comparison as its artifacts."""
    reproduction = repeated.reproduction
    announce(f"{repeated.source.name}: {reproduction.sentence}")
    if differ := differences_in_words(reproduction):
        announce(f"they differ in: {differ}")
    title = f"Reruns of {repeated.source.name}"
    create_markdown_artifact(repeated.markdown, VERDICT_ARTIFACT, title)
    if repeated.compared is not None:
        tell_comparison(repeated.compared)


@contextmanager
def failed_are_named(children: Sequence[Child]) -> Iterator[None]:
    """Around the verdict: raises :class:`NotAllRan`, with names, if a run did not complete, also
    where the others cannot be judged."""
    told = "the verdict is made of the others"
    failed = _failed(children)
    try:
        yield
    except NotAllRan:
        raise
    except Exception as error:
        if not failed:
            raise
        told = f"and the others have no verdict ({error})"
    if failed:
        raise NotAllRan(f"these of the {len(children)} reruns did not complete, {told}: {failed}")


def _failed(children: Sequence[Child]) -> str:
    return "; ".join(child.told for child in children if not child.completed)


def _check_repeatable(directory: Path) -> None:
    history = read_history(directory)
    check_not_running(history)
    status = history.attempts[-1].status
    if status != COMPLETED:
        raise ConfigError(
            f"run {history.run_id} has not completed (status: {status or 'not recorded'}): "
            "expected an original that did; to go on with it, name it as resume in the form of "
            f"distill; to run its recipe from the start, name {directory / CONFIG_FILE} as "
            "recipe_file"
        )
    if (fork := history.forked_from) is not None:
        raise ConfigError(
            f"run {history.run_id} began from train step {fork.train_step} of run {fork.run_id}: "
            "its recipe alone does not repeat it; repeat that one, or fork it again"
        )


def _directory(source: Source, child: Child) -> Path:
    found = find_flow_run(source.root, child.flow_run_id)
    if found is None:
        raise ConfigError(
            f"{child.asked.name} completed, but its directory is not in {source.root}: it ran on "
            "another machine; expected workers that share the run root (OPD_RUNS)"
        )
    return found


def _keep(repeated: Repeated) -> None:
    """Beside the comparison, and in MLflow at its run. What MLflow lacks is a warning."""
    compared = repeated.compared
    if compared is None:
        return
    files = {
        JSON_FILE: repeated.reproduction.to_json(),
        MARKDOWN_FILE: reproduction_markdown(repeated.reproduction),
    }
    for name, text in files.items():
        write_whole(compared.directory / name, text)
    if compared.mlflow_run_id is None:
        return
    tracking = repeated.source.config.tracking
    try:
        client = connect(tracking_uri(tracking, repeated.source.root))
        for key, value in _tags(repeated):
            client.set_tag(compared.mlflow_run_id, key, value)
        for name in files:
            client.log_artifact(compared.mlflow_run_id, str(compared.directory / name))
    except Exception as error:
        warn(f"MLflow lacks the verdict ({type(error).__name__}: {error}); {compared.directory}")


def _tags(repeated: Repeated) -> Iterator[tuple[str, str]]:
    if repeated.source.original is not None:
        yield RERUN_OF_TAG, repeated.source.original.name
    if verdict := repeated.reproduction.verdict:
        yield REPRODUCTION_TAG, verdict


def _link(flow_run_id: str, text: str) -> str:
    url = prefect_page(flow_run_id)
    return f"[{text}]({url})" if url else f"`{text}`"
