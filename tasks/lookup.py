"""Finding runs by whatever people call them: a directory, a run id, MLflow's own id of a run."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from opd_core.config import TrackingConfig
from opd_core.errors import ConfigError
from opd_core.tracking.mlflow_comparison import tags_of
from opd_core.tracking.mlflow_sink import DIRECTORY_TAG, RUN_TAG, bound_http_waits, tracking_uri
from opd_core.tracking.shipper import short_error, without_credentials
from opd_core.training.files import RUN_FILE

MLFLOW_ID = re.compile(r"[0-9a-f]{32}")
NEAREST = 5
MOST_LETTERS = 200


def find_runs(names: Sequence[str], root: Path, mlflow_uri: str | None = None) -> list[Path]:
    """The directory of each run, in order: a run directory, the id of a run in ``root``, or
    MLflow's id of a run, which is looked up at ``mlflow_uri`` (None: ``$MLFLOW_TRACKING_URI``,
    else SQLite in ``root``).

    Raises :class:`ConfigError` for the first that is not there; it lists the nearest names.
    """
    return [_find(name, root, mlflow_uri) for name in names]


def expanded(name: str) -> Path:
    """The path with ``~`` resolved, where there is such a user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _is_run(directory: Path) -> bool:
    try:
        return (directory / RUN_FILE).is_file()
    except OSError:  # longer than a name may be, or not to be looked into
        return False


def _find(name: str, root: Path, mlflow_uri: str | None) -> Path:
    for directory in (expanded(name), root / name):
        if _is_run(directory):
            return directory.absolute()
    if MLFLOW_ID.fullmatch(name):
        return _find_by_mlflow(name, root, mlflow_uri)
    known = sorted(path.parent.name for path in root.glob(f"*/{RUN_FILE}"))
    nearest = difflib.get_close_matches(name, known, NEAREST, cutoff=0.4)
    there = f"the nearest are: {', '.join(nearest)}" if nearest else f"it holds {len(known)} runs"
    raise ConfigError(
        f"no run {name[:MOST_LETTERS]!r}: expected a run directory, the id of a run in "
        f"{root.absolute()}, or an MLflow run id; {there}"
    )


def _find_by_mlflow(name: str, root: Path, mlflow_uri: str | None) -> Path:
    named = mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI") or None
    uri = tracking_uri(TrackingConfig(mlflow_uri=named), root)
    place = f"MLflow at {without_credentials(uri)}"
    bound_http_waits()
    try:
        tags = tags_of(uri, name)
    except Exception as error:
        raise ConfigError(
            f"run {name}: {place} does not answer ({short_error(error)}): name the run by its id "
            "or its directory"
        ) from None
    told, run_id = tags.get(DIRECTORY_TAG), tags.get(RUN_TAG)
    if not tags or not (told or run_id):
        raise ConfigError(
            f"{place} knows no run {name} of this project: expected MLflow's id of a "
            "tracked run; if it lies in another MLflow, name that one"
        )
    for directory in (Path(told or ""), root / (run_id or "")):
        if _is_run(directory):
            return directory.absolute()
    raise ConfigError(
        f"run {name} is {run_id} in {told}, which is not on this machine: compare where it is, or "
        f"copy the directory into {root.absolute()}"
    )
