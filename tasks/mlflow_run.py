"""A run as MLflow is to keep it: its params and its tags."""

from __future__ import annotations

import hashlib
import json
import platform

from prefect.runtime import deployment

from opd_core.tracking.mlflow_sink import (
    DIRECTORY_TAG,
    KIND_TAG,
    RUN_TAG,
    MlflowRun,
    artifact_root,
    flatten_params,
    tracking_uri,
)
from opd_core.tracking.sink import RunStatus
from opd_core.training.links import read_links
from tasks.environment import THE_STUDENT, RunRecord, the_teacher
from tasks.links import mlflow_description, prefect_page
from tasks.provenance import git_commit

RUN_KIND = "run"
"""The value of ``opd.kind``."""
STATUS_TAG, ATTEMPTS_TAG = "opd.status", "opd.attempts"
MLFLOW_STATUS: dict[str, RunStatus] = {"completed": "FINISHED", "cancelled": "KILLED"}


def recipe_hash(run: RunRecord) -> str:
    """Hash of the resolved recipe."""
    return hashlib.sha256(json.dumps(run.config.resolved()).encode()).hexdigest()[:12]


def mlflow_status(status: str) -> RunStatus:
    """MLflow's word for a summary's status."""
    return MLFLOW_STATUS.get(status, "FAILED")


def mlflow_run(run: RunRecord, *, uri: str | None = None, over: bool = True) -> MlflowRun:
    """The run as MLflow is to keep it, by default where its recipe says. Its flow, for which it is
    not ``over``, tells one thing more: its deployment in Prefect."""
    config, prefect = run.config, _prefect_page(run)
    uri = uri or tracking_uri(config.tracking, run.directory.parent)
    return MlflowRun(
        tracking_uri=uri,
        artifact_root=artifact_root(uri),
        experiment=config.tracking.experiment,
        run_name=run.run_id,
        params=flatten_params(config.resolved()),
        tags=_tags(run, prefect)
        | ({} if over else {"prefect.deployment_id": str(deployment.id or "")}),
        began_at_s=run.history.attempts[0].started_at,
        over=over,
        description=mlflow_description(run, prefect),
    )


def _prefect_page(run: RunRecord) -> str:
    """The page of the latest attempt's flow run: as its flow knew it, which another process may
    not."""
    flow_run_id, known = run.history.attempts[-1].flow_run_id, read_links(run.directory).prefect
    of_this_attempt = flow_run_id and known.endswith(flow_run_id)
    return known if of_this_attempt else prefect_page(flow_run_id)


def _tags(run: RunRecord, prefect: str) -> dict[str, str]:
    tags = {
        RUN_TAG: run.run_id,
        KIND_TAG: RUN_KIND,
        ATTEMPTS_TAG: str(len(run.history.attempts)),
        "opd.recipe": run.config.name,
        "opd.recipe_hash": recipe_hash(run),
        DIRECTORY_TAG: str(run.directory),
        "opd.host": platform.node(),
        "prefect.flow_run_id": run.history.attempts[-1].flow_run_id,
        "prefect.flow_run_url": prefect,  # also an empty one: that of an earlier attempt is over
    }
    if (forked_from := run.history.forked_from) is not None:
        tags["opd.forked_from"] = forked_from.run_id
        tags["opd.forked_at_step"] = str(forked_from.train_step)
    return dict(run.config.tracking.tags) | tags | _made_of(run)


def _made_of(run: RunRecord) -> dict[str, str]:
    """Only what was recorded: MLflow may know of an older run what its directory does not tell."""
    opd, fingerprints = run.config.opd, run.history.fingerprints
    keys = {"opd.student_fingerprint": THE_STUDENT} | {
        f"opd.teacher_fingerprint.{teacher.name}": the_teacher(teacher.name)
        for teacher in (opd.teachers if opd else ())
    }
    found = {tag: fingerprints[key] for tag, key in keys.items() if key in fingerprints}
    commit = git_commit(run.directory)
    return found | ({"git.commit": commit} if commit else {})
