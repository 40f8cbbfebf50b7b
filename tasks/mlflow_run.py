"""A run as MLflow is to keep it: its params and its tags."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from pathlib import Path

from prefect.runtime import deployment

from opd_core.preflight import PreflightReport
from opd_core.tracking.mlflow_sink import (
    RUN_TAG,
    MlflowRun,
    artifact_root,
    flatten_params,
    tracking_uri,
)
from opd_core.tracking.sink import RunStatus
from tasks.environment import RunRecord

KIND_TAG, RUN_KIND = "opd.kind", "run"
STATUS_TAG, ATTEMPTS_TAG = "opd.status", "opd.attempts"
MLFLOW_STATUS: dict[str, RunStatus] = {"completed": "FINISHED", "cancelled": "KILLED"}


def recipe_hash(run: RunRecord) -> str:
    """Hash of the resolved recipe."""
    return hashlib.sha256(json.dumps(run.config.resolved()).encode()).hexdigest()[:12]


def git_commit() -> str:
    """The commit of the code, with ``+changes`` if the working tree differs; ``unknown``
    outside."""
    root = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def mlflow_status(status: str) -> RunStatus:
    """MLflow's word for a summary's status."""
    return MLFLOW_STATUS.get(status, "FAILED")


def mlflow_run(
    run: RunRecord, checked: PreflightReport | None = None, uri: str | None = None
) -> MlflowRun:
    """The run as MLflow is to keep it, by default where its recipe says. Without ``checked`` (the
    flow is at its end) the run is over, and what only the flow knew stays as it is in MLflow."""
    config = run.config
    uri = uri or tracking_uri(config.tracking, run.directory.parent)
    return MlflowRun(
        tracking_uri=uri,
        artifact_root=artifact_root(uri),
        experiment=config.tracking.experiment,
        run_name=run.run_id,
        params=flatten_params(config.resolved()),
        tags=_tags(run) | (_tags_of_the_flow(checked) if checked is not None else {}),
        began_at_s=run.history.attempts[0].started_at,
        over=checked is None,
    )


def _tags(run: RunRecord) -> dict[str, str]:
    tags = {
        RUN_TAG: run.run_id,
        KIND_TAG: RUN_KIND,
        ATTEMPTS_TAG: str(len(run.history.attempts)),
        "opd.recipe": run.config.name,
        "opd.recipe_hash": recipe_hash(run),
        "opd.run_directory": str(run.directory),
        "opd.host": platform.node(),
        "prefect.flow_run_id": run.history.attempts[-1].flow_run_id,
    }
    if (forked_from := run.history.forked_from) is not None:
        tags["opd.forked_from"] = forked_from.run_id
        tags["opd.forked_at_step"] = str(forked_from.train_step)
    return tags


def _tags_of_the_flow(checked: PreflightReport) -> dict[str, str]:
    tags = {
        "opd.student_fingerprint": checked.student.fingerprint if checked.student else "",
        "git.commit": git_commit(),
        "prefect.deployment_id": str(deployment.id or ""),
    }
    return tags | {
        f"opd.teacher_fingerprint.{name}": facts.fingerprint
        for name, facts in checked.teachers.items()
    }
