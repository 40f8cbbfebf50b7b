"""Comparing runs: found, compared, written down as files, told to MLflow and to Prefect.

The files come first: whatever happens to MLflow, a comparison that was made is not lost.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact

from opd_core.analysis.comparison import Comparison, Reference, Target, compare
from opd_core.analysis.comparison_charts import comparison_charts
from opd_core.analysis.comparison_page import comparison_page
from opd_core.analysis.comparison_text import comparison_markdown, title
from opd_core.analysis.comparison_words import slug
from opd_core.analysis.run_data import RunData, load_run_data
from opd_core.errors import ConfigError
from opd_core.tracking.mlflow_comparison import publish
from opd_core.tracking.mlflow_sink import bound_http_waits
from opd_core.training.evaluation_records import read_evaluation
from opd_core.whole_file import write_whole
from tasks.console import announce, warn
from tasks.links import mlflow_experiment
from tasks.lookup import expanded, find_runs
from tasks.mlflow_compared import tracked_comparison

FOLDER = "comparisons"
JSON_FILE, PAGE_FILE, MARKDOWN_FILE = "comparison.json", "comparison.html", "comparison.md"
ARTIFACT, PAGE_ARTIFACT = "comparison", "comparison-page"
"""Prefect's keys of the verdict with its table, and of the link to the page."""
MAX_ARMS_IN_NAME = 60
CHART_LINK = re.compile(r"^!\[.*\]\(([\w-]+\.svg)\)$", re.M)
"""A line of a comparison's markdown."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison that was made. ``lacking`` says what MLflow does not have, and why;
    ``mlflow_page`` is its page on MLflow's server, if there is one."""

    comparison: Comparison
    directory: Path
    mlflow_run_id: str | None = None
    lacking: tuple[str, ...] = ()
    mlflow_page: str = ""

    @property
    def page(self) -> Path:
        """The page to read."""
        return self.directory / PAGE_FILE

    def to_json(self) -> dict[str, Any]:
        """The verdicts and where everything else lies."""
        pairs = self.comparison.pairs
        return {
            "verdicts": {pair.label: pair.verdict for pair in pairs},
            "sentences": [pair.sentence for pair in pairs],
            "directory": str(self.directory),
            "mlflow_run_id": self.mlflow_run_id,
            "lacking": list(self.lacking),
        }


def compare_runs(
    names: Sequence[str],
    target: Target,
    *,
    references: Sequence[str] = (),
    out: Path | None = None,
    root: Path = Path("runs"),
    mlflow: bool = True,
    mlflow_uri: str | None = None,
) -> Compared:
    """Compare runs and keep what was found.

    Args:
        names: run ids in ``root``, run directories, or MLflow run ids, which are looked up at
            ``mlflow_uri`` (None: SQLite in ``root``). The first one's arm is the baseline.
        references: ``LABEL=FILE`` each, the file an evaluation's record.
        out: folder for the files; None is a new one in ``<run root>/comparisons``.
        mlflow: whether the runs' MLflow is told.

    Raises:
        ConfigError: fewer than two runs, an unknown one, runs that cannot be compared at this
            target, or a folder that cannot be written.
        DataError: a file of a run that cannot be read.
    """
    if len(names) < 2:
        raise ConfigError(f"expected two runs at least, to compare with each other, got {[*names]}")
    runs = [load_run_data(directory) for directory in find_runs(names, root, mlflow_uri)]
    comparison = compare(runs, target, [_reference(given) for given in references])
    try:
        directory = expanded(str(out)).absolute() if out else _place(comparison, runs)
        _write(comparison, runs, directory)
    except OSError as error:
        raise ConfigError(f"out: expected a folder that can be written, got {error}") from None
    if not mlflow:
        return Compared(comparison, directory)
    compared = _tell_mlflow(comparison, runs, directory)
    for what in compared.lacking:
        warn(what)
    return compared


def tell_comparison(compared: Compared) -> None:
    """Tell the flow run's log the verdict, and keep verdict, table and a link as its artifacts."""
    for pair in compared.comparison.pairs:
        announce(pair.sentence)
    announce(f"page: {compared.page}")
    lacking = "".join(f"\n> **Warning:** {what}\n" for what in compared.lacking)
    shown = f"[the page]({compared.mlflow_page}), or " if compared.mlflow_page else "page: "
    text = f"{comparison_markdown(compared.comparison)}{lacking}\n{shown}`{compared.page}`\n"
    name = title(compared.comparison)
    create_markdown_artifact(text, ARTIFACT, name)
    # A browser follows no link from a server's page to a file.
    link = compared.mlflow_page or compared.page.as_uri()
    create_link_artifact(link, "the comparison's page", PAGE_ARTIFACT, name)


def new_folder(path: Path) -> Path:
    """Make the folder; where there is one, as another comparison of the same second, it gets a
    number."""
    first = path
    for number in count(2):
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            path = first.with_name(f"{first.name}-{number}")
        else:
            break
    return path


def _reference(given: str) -> Reference:
    label, equals, file = given.partition("=")
    if not (label and equals and file):
        raise ConfigError(
            f"reference: expected LABEL=FILE, the file an evaluation's record, got {given!r}"
        )
    return Reference(label, read_evaluation(expanded(file)))


def _place(comparison: Comparison, runs: Sequence[RunData]) -> Path:
    """Beside the first run: named by the time and the arms."""
    arms = "-vs-".join(slug(arm.label) for arm in comparison.arms)[:MAX_ARMS_IN_NAME].strip("-")
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{arms}"
    return new_folder(runs[0].directory.parent / FOLDER / name)


def _write(comparison: Comparison, runs: Sequence[RunData], directory: Path) -> None:
    """JSON first: the rest can be made from it. Charts of an earlier comparison in this folder go
    with it."""
    directory.mkdir(parents=True, exist_ok=True)
    earlier = _charts_in(directory)
    write_whole(directory / JSON_FILE, comparison.to_json())
    charts = comparison_charts(comparison)
    for chart in charts:
        write_whole(directory / chart.file, chart.standalone())
    shown = [(chart.title, chart.file) for chart in charts]
    write_whole(directory / MARKDOWN_FILE, comparison_markdown(comparison, shown))
    directories = {run.run_id: run.directory for run in runs}
    page = comparison_page(comparison, charts, directories=directories, page_folder=directory)
    write_whole(directory / PAGE_FILE, page)
    for name in earlier - {chart.file for chart in charts}:
        (directory / name).unlink(missing_ok=True)


def _charts_in(directory: Path) -> set[str]:
    """The charts that an earlier comparison in this folder refers to."""
    if not (directory / JSON_FILE).is_file() or not (directory / MARKDOWN_FILE).is_file():
        return set()
    text = (directory / MARKDOWN_FILE).read_text(encoding="utf-8", errors="replace")
    return set(CHART_LINK.findall(text))


def _tell_mlflow(comparison: Comparison, runs: Sequence[RunData], directory: Path) -> Compared:
    """Have MLflow keep the comparison, as far as it is there."""
    files = tuple(directory / name for name in (JSON_FILE, PAGE_FILE, MARKDOWN_FILE))
    tracked = tracked_comparison(comparison, runs, files)
    if tracked is None:
        said = "no compared run is tracked in MLflow, so the comparison is not either"
        return Compared(comparison, directory, lacking=(said,))
    bound_http_waits()
    try:
        published = publish(tracked)
    except Exception as error:
        said = (
            f"MLflow at {tracked.tracking_uri} lacks the comparison "
            f"({type(error).__name__}: {error}); {directory} holds everything; compare once more "
            "when it answers"
        )
        return Compared(comparison, directory, lacking=(said,))
    lacking = tuple(
        f"run {run_id} is not in MLflow at {tracked.tracking_uri}, so it is not tagged there"
        for run_id in published.absent
    )
    experiment = mlflow_experiment(tracked.tracking_uri, published.experiment_id)
    page = f"{experiment}/runs/{published.mlflow_run_id}/artifacts/{PAGE_FILE}"
    return Compared(
        comparison, directory, published.mlflow_run_id, lacking, page if experiment else ""
    )
