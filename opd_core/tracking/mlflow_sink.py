"""One MLflow run, kept by one thread through a client with its own tracking URI.

Owns: finding or creating the run, params, metrics, tags, artifacts, status. Does not own: when
anything is sent and what happens on failure; that is the shipper's. The global tracking URI and the
"active run" of MLflow's fluent API are never touched.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd_core.config import TrackingConfig
from opd_core.errors import ConfigError
from opd_core.tracking.journal import JournalRecord
from opd_core.tracking.names import Point, accepted_name, finite_points
from opd_core.tracking.sink import Artifact, Ending, RunStatus

KIND_TAG, DIRECTORY_TAG = "opd.kind", "opd.run_directory"
RUN_TAG = "opd.run_id"
"""The tag by which a run is found again; give it in ``MlflowRun.tags``."""
DESCRIPTION_TAG = "mlflow.note.content"
COMPLETE_TAG = "opd.complete"
"""``true`` once a run has all that its ending names."""

# MLflow allows 1000 metrics a call and 1 MB a request; half as many stay below 1 MB even with the
# longest names in any script.
POINTS_PER_CALL = 500
PARAMS_PER_CALL = 100
MAX_PARAM_LENGTH = 6000
MAX_TAG_LENGTH = 8000
SQLITE = "sqlite:///"


@dataclass(frozen=True, slots=True)
class MlflowRun:
    """Which run to create, or to go on with: one that carries the same ``opd.run_id`` tag in the
    experiment is taken up again. ``artifact_root`` is used when the experiment is created; None
    leaves it to the server. ``began_at_s`` is its start in unix time, None is now; a run that is
    ``over`` is not called running again. ``description`` is shown above the run; one that is there
    already stays, since a person may have written it."""

    tracking_uri: str
    artifact_root: Path | None
    experiment: str
    run_name: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    began_at_s: float | None = None
    over: bool = False
    description: str = ""


def tracking_uri(config: TrackingConfig, run_root: Path) -> str:
    """MLflow's tracking URI: the configured one, or SQLite in ``run_root``.

    Raises:
        ConfigError: a run root that cannot be written in a SQLite URL.
    """
    if config.mlflow_uri is not None:
        return config.mlflow_uri
    database = str(run_root.expanduser().resolve() / "mlflow.db")
    if set(database) & set("%?#"):
        raise ConfigError(
            f"run.root: expected a path without '%', '?' and '#', which a SQLite URL cannot hold, "
            f"got {database!r}: use another root, or name a server in tracking.mlflow_uri"
        )
    return SQLITE + database


def artifact_root(uri: str) -> Path | None:
    """Where an experiment that is created keeps its artifacts: beside SQLite's database. None where
    a server knows a place."""
    path, _, _ = uri.removeprefix(SQLITE).partition("?")
    return Path(path).parent / "mlartifacts" if uri.startswith(SQLITE) and path else None


def flatten_params(config: Mapping[str, Any]) -> dict[str, str]:
    """A resolved config as MLflow params: dotted keys, values as they stand in a recipe.

    ``{"opd": {"teachers": [{"name": "t"}]}, "devices": ["0", "1"]}`` becomes
    ``{"opd.teachers.0.name": "t", "devices": '["0", "1"]'}``.
    """
    return dict(_leaves("", config))


def _leaves(key: str, value: Any) -> Iterator[tuple[str, str]]:
    nested = isinstance(value, list | tuple) and any(isinstance(v, Mapping) for v in value)
    if isinstance(value, Mapping) and (value or not key):
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}" if key else str(name), item)
    elif nested:
        for index, item in enumerate(value):
            yield from _leaves(f"{key}.{index}", item)
    else:
        plain = isinstance(value, str)
        yield key, value if plain else json.dumps(value, ensure_ascii=False, default=str)


def bound_http_waits(environ: MutableMapping[str, str] = os.environ) -> None:
    """Defaults for this process, where the environment does not say otherwise: MLflow gives up on a
    silent server within about a minute instead of many, sends no telemetry, and leaves standard
    output alone.

    MLflow reads them from the environment of the whole process, so this belongs into a program's
    start, before the first sink is created.
    """
    environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
    environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
    environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")


def connect(uri: str) -> Any:
    """An ``MlflowClient`` for ``uri`` only. It takes seconds: import, SQLite's first schema."""
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def find_run(run: MlflowRun) -> Any:
    """The run as it stands in MLflow; None where there is none. Nothing of it is made.

    Raises:
        ConfigError: the experiment was deleted in MLflow.
    """
    with _first_use(run.tracking_uri):
        client = connect(run.tracking_uri)
        experiment = client.get_experiment_by_name(run.experiment)
    if experiment is None:
        return None
    return find_tagged(client, _active(experiment, run), run.tags.get(RUN_TAG))


class MlflowSink:
    """A sink that writes one MLflow run. Calls are synchronous and may raise what MLflow raises.

    After a failure nobody knows what arrived: from then on points are sent only if the run's
    history lacks them (same name, train step and time). So is it from the start when a run is taken
    up again, since the journal is replayed from its first record.
    """

    def __init__(self, run: MlflowRun, connect: Callable[[str], Any] = connect) -> None:
        """Find or create experiment and run, and log the params that it lacks. A run that is taken
        up again gets the tags of now, and is told to be running unless it is over.

        Raises:
            ConfigError: the experiment was deleted in MLflow.
        """
        with _first_use(run.tracking_uri):
            self._client = connect(run.tracking_uri)
            experiment_id = _experiment(self._client, run)
        self._tag = run.tags.get(RUN_TAG)
        found = find_tagged(self._client, experiment_id, self._tag)
        self._run = found or self._client.create_run(
            experiment_id,
            start_time=_milliseconds(run.began_at_s),
            tags=_accepted(_with_description(run), MAX_TAG_LENGTH),
            run_name=run.run_name,
        )
        self._in_doubt = found is not None
        self._known: dict[str, set[tuple[int, int]]] = {}
        self._dropped = 0
        self._stored: set[Artifact] = set()
        if found is not None:
            self.set_tags({**run.tags, COMPLETE_TAG: "false"})
            if not run.over:
                self._client.update_run(self.run_id, status="RUNNING")
        self._log_params(run.params)

    @property
    def run_id(self) -> str:
        """MLflow's id of the run."""
        return str(self._run.info.run_id)

    @property
    def experiment_id(self) -> str:
        """MLflow's id of its experiment."""
        return str(self._run.info.experiment_id)

    @property
    def reference(self) -> str:
        """MLflow's id of the run."""
        return self.run_id

    @property
    def dropped(self) -> int:
        """Values that were left out because they are not finite."""
        return self._dropped

    def log(self, records: Sequence[JournalRecord]) -> None:
        """Send the records' metrics; called again after a failure, it completes what is missing."""
        points, dropped = finite_points(records)
        try:
            absent = [point for point in points if not self._arrived(point)]
            for start in range(0, len(absent), POINTS_PER_CALL):
                self._send(absent[start : start + POINTS_PER_CALL])
        except Exception:
            self._in_doubt = True
            self._known.clear()
            raise
        self._dropped += dropped

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Store a file or a directory under ``folder``; an existing one is replaced."""
        self._client.log_artifact(self.run_id, str(path), folder or None)

    def log_text(self, text: str, path: str) -> None:
        """Store ``text`` as the artifact ``path`` (with folders)."""
        self._client.log_text(self.run_id, text, path)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags; existing ones are replaced, long values are cut."""
        from mlflow.entities import RunTag

        entities = [RunTag(key, value) for key, value in _accepted(tags, MAX_TAG_LENGTH).items()]
        self._client.log_batch(self.run_id, tags=entities, synchronous=True)

    def set_status(self, status: RunStatus, at_s: float | None = None) -> None:
        """End the run in MLflow, at this unix time or now; setting another status later is
        allowed."""
        self._client.set_terminated(self.run_id, status, _milliseconds(at_s))

    def finish(self, ending: Ending) -> tuple[str, ...]:
        """Artifacts, then tags, then status, then the word that it is complete, if it is. One
        artifact that fails stops neither the others nor tags and status; its error is raised at the
        end, so that the call is repeated."""
        missing: list[str] = []
        failure: Exception | None = None
        for artifact in ending.artifacts:
            try:
                if artifact.path.exists():
                    self._store_once(artifact)
                else:
                    missing.append(f"{artifact.path}: no such file")
            except Exception as error:
                failure = error
        self.set_tags(ending.tags)
        self.set_status(ending.status, ending.at_s)
        if failure is not None:
            raise failure
        self._remove_twins()
        if ending.complete:
            self.set_tags({COMPLETE_TAG: "true"})
        return tuple(missing)

    def close(self) -> None:
        """Nothing: the client holds no connection between calls."""

    def _store_once(self, artifact: Artifact) -> None:
        if artifact not in self._stored:
            self.log_artifact(artifact.path, artifact.folder)
            self._stored.add(artifact)

    def _remove_twins(self) -> None:
        """Requests are repeated when no answer comes. A server that was only asleep has then made
        the run more than once; what nobody uses goes to MLflow's bin."""
        if not self._tag:
            return
        for twin in _tagged(self._client, self._run.info.experiment_id, self._tag):
            if twin.info.run_id != self.run_id and not twin.data.metrics:
                self._client.delete_run(twin.info.run_id)

    def _log_params(self, params: Mapping[str, str]) -> None:
        """Params cannot be changed in MLflow, so those of a run that is taken up again stay."""
        from mlflow.entities import Param

        known = self._run.data.params
        new = [
            Param(key, value)
            for key, value in _accepted(params, MAX_PARAM_LENGTH).items()
            if key not in known
        ]
        for start in range(0, len(new), PARAMS_PER_CALL):
            part = new[start : start + PARAMS_PER_CALL]
            self._client.log_batch(self.run_id, params=part, synchronous=True)

    def _send(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(p.name, p.value, p.time_ms, p.train_step) for p in points]
        self._client.log_batch(self.run_id, metrics=metrics, synchronous=True)

    def _arrived(self, point: Point) -> bool:
        if not self._in_doubt:
            return False
        if point.name not in self._known:
            history = self._client.get_metric_history(self.run_id, point.name)
            self._known[point.name] = {(metric.step, metric.timestamp) for metric in history}
        return (point.train_step, point.time_ms) in self._known[point.name]


@contextmanager
def _first_use(uri: str) -> Iterator[None]:
    """One process at a time: MLflow creates SQLite's schema on first use, and two that do it
    together fail with "duplicate column name"."""
    database = uri.removeprefix(SQLITE).partition("?")[0]
    if not uri.startswith(SQLITE) or database in ("", ":memory:"):
        yield
        return
    Path(database).parent.mkdir(parents=True, exist_ok=True)
    with open(f"{database}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _experiment(client: Any, run: MlflowRun) -> str:
    """Id of the experiment, created where missing."""
    found = client.get_experiment_by_name(run.experiment)
    if found is None:
        location = run.artifact_root.resolve().as_uri() if run.artifact_root else None
        try:
            return str(client.create_experiment(run.experiment, artifact_location=location))
        except Exception:
            found = client.get_experiment_by_name(run.experiment)  # another process was faster
            if found is None:
                raise
    return _active(found, run)


def _active(experiment: Any, run: MlflowRun) -> str:
    """Its id. Raises ConfigError for a deleted one."""
    if experiment.lifecycle_stage != "active":
        raise ConfigError(
            f"tracking.experiment: {run.experiment!r} is deleted in MLflow: restore it (mlflow "
            f"experiments restore --experiment-id {experiment.experiment_id}) or name another"
        )
    return str(experiment.experiment_id)


def find_tagged(client: Any, experiment_id: str, tag: str | None) -> Any:
    """The run that carries ``tag`` as its run id; None where there is none. Of several the one that
    is in use: the first with metrics."""
    runs = _tagged(client, experiment_id, tag) if tag else []
    return max(runs, key=lambda run: bool(run.data.metrics), default=None)


def _tagged(client: Any, experiment_id: str, tag: str) -> list[Any]:
    """The oldest first."""
    wanted = f"tags.`{RUN_TAG}` = '{tag}'"
    return list(client.search_runs([experiment_id], wanted, order_by=["attributes.start_time ASC"]))


def _with_description(run: MlflowRun) -> dict[str, str]:
    return dict(run.tags) | ({DESCRIPTION_TAG: run.description} if run.description else {})


def _milliseconds(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s * 1000)


def _accepted(values: Mapping[str, str], limit: int) -> dict[str, str]:
    """Under names that MLflow accepts; longer values are cut and end in an ellipsis."""
    return {
        accepted_name(key): value if len(value) <= limit else value[: limit - 1] + "…"
        for key, value in values.items()
    }
