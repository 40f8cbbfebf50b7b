"""Where a person can look at a run, and how Prefect's pages say so."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from opd_core.tracking.mlflow_sink import tracking_uri
from opd_core.tracking.shipper import without_credentials
from opd_core.training.attempts import can_go_on
from opd_core.training.files import LOGS_FOLDER, REPORT_FILE
from opd_core.training.forks import name_of
from opd_core.training.links import Links
from tasks.environment import RunRecord
from tasks.temporary_server import lasting_api


def prefect_page(flow_run_id: str) -> str:
    """The flow run in Prefect's UI (``PREFECT_UI_URL``, else beside its API); empty where no server
    outlives this process, and where Prefect cannot tell it."""
    if not (flow_run_id and lasting_api()):
        return ""
    from prefect.utilities.urls import url_for

    try:
        return without_credentials(url_for("flow-run", obj_id=flow_run_id) or "")
    except Exception:  # of a setting that is no URL, say: a run does not fail for want of a link
        return ""


def find_links(run: RunRecord, mlflow_run_id: str, experiment_id: str) -> Links:
    """The pages of the latest attempt. MLflow's have a page only on a server, and only once it has
    given these ids."""
    prefect = prefect_page(run.history.attempts[-1].flow_run_id)
    if not (mlflow_run_id and experiment_id):
        return Links(prefect=prefect)
    uri = tracking_uri(run.config.tracking, run.directory.parent)
    if not (experiment := mlflow_experiment(uri, experiment_id)):
        return Links(prefect=prefect, mlflow_run_id=mlflow_run_id)
    page = f"{experiment}/runs/{mlflow_run_id}"
    return Links(prefect, page, experiment, f"{page}/artifacts/{REPORT_FILE}", mlflow_run_id)


def mlflow_experiment(uri: str, experiment_id: str) -> str:
    """The experiment's page, on which ``/runs/ID`` is a run's; empty where there is no server."""
    if not uri.startswith("http"):
        return ""
    return f"{without_credentials(uri).rstrip('/')}/#/experiments/{experiment_id}"


def mlflow_description(run: RunRecord, prefect: str) -> str:
    """What stands above the run in MLflow; ``prefect`` is its flow run's page."""
    lines = [f"Recipe **{run.config.name}**, seed {run.config.seed}. {run.config.description}"]
    lines += [f"[Its run in Prefect]({prefect}): states, logs, receipt"] if prefect else []
    lines += [
        f"Run directory on {platform.node()}: `{run.directory}`",
        f"The report is the artifact `{REPORT_FILE}` of this run, once it has ended.",
    ]
    return "\n\n".join(lines)


def run_markdown(run: RunRecord, links: Links) -> str:
    """Prefect's page ``run``: what runs where, and where the rest of it is."""
    attempts = len(run.history.attempts)
    rows = {
        "Recipe": f"{escaped(run.config.name)}, seed {run.config.seed}",
        "Run": f"`{run.run_id}`" + (f", attempt {attempts}" if attempts > 1 else ""),
    }
    if (fork := run.history.forked_from) is not None:
        rows["Began from"] = f"train step {fork.train_step} of `{fork.run_id}`"
    pages = {name: url for name, url in links.pages.items() if url != links.prefect}
    if pages:
        rows["Pages"] = " · ".join(f"[{name}]({url})" for name, url in pages.items())
    if run.config.tracking.mlflow and not links.mlflow:
        rows["MLflow"] = _without_page(run, links)
    rows |= {
        "Directory": f"`{run.directory}` on {platform.node()}",
        "Logs": f"`{run.directory / LOGS_FOLDER}`; warnings and errors are in this run's log too",
        "Report, at any time": f"`opd report {name_of(run.directory)}`",
    }
    return listed(rows)


def _without_page(run: RunRecord, links: Links) -> str:
    uri = tracking_uri(run.config.tracking, run.directory.parent)
    if uri.startswith("http"):
        return f"{without_credentials(uri)}, no run there yet"
    which = f", run `{links.mlflow_run_id}`" if links.mlflow_run_id else ""
    return f"`mlflow ui --backend-store-uri {without_credentials(uri)}`{which}"


def report_markdown(run: RunRecord, summary: Mapping[str, Any], links: Links) -> str:
    """Prefect's page ``report``: what the run came to, and where its whole report is."""
    status = summary["status"]
    parts = [f"**{escaped(run.run_id)}: {status}**"]
    if summary["error"]:
        first, *more = str(summary["error"]).strip().splitlines()
        parts.append(escaped(first[:500]) + (" … (the rest is in the log)" if more else ""))
    rows = {
        "Held-out accuracy": _change(summary["accuracy"], percent=True),
        "opd_reverse_kl, nats/token": _change(summary["opd_reverse_kl"]),
        "Train steps": f"{summary['train_steps']} of {run.config.training.steps}"
        + (f", stopped: {escaped(summary['stopped'])}" if summary["stopped"] else ""),
        "Groups lost": ", ".join(f"{cause} {n}" for cause, n in summary["lost"].items()),
        "Servers started again": str(sum(summary["server_restarts"].values()) or ""),
        "Seconds": f"{summary['seconds'].get('total', 0):.0f}",
    }
    parts.append(listed({name: value for name, value in rows.items() if value}))
    parts += [
        f"- **{found['level']}**, train step {found['train_step']}: {escaped(found['name'])}, "
        f"{escaped(found['evidence'])}"
        for found in summary["findings"]
    ]
    where = f"`{run.directory / REPORT_FILE}`"
    parts.append(f"[The whole report]({links.report}), or {where}" if links.report else where)
    if status != "completed" and can_go_on(run.directory):
        parts.append(
            f"Go on where it stopped: a new run of this deployment with `resume` = "
            f"`{run.directory}`, or `opd run --resume {name_of(run.directory)}`"
        )
    return "\n\n".join(parts)


def listed(rows: Mapping[str, str]) -> str:
    """A line each; tables of Prefect's pages do not break long paths."""
    return "\n".join(f"- **{name}**: {value}" for name, value in rows.items())


def escaped(text: str) -> str:
    """Text as it stands, in markdown."""
    for mark in "\\`*_|<>[]":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", " ")


def _change(told: Mapping[str, Any], *, percent: bool = False) -> str:
    sides = [
        (told[side], told.get(f"{side}_stderr"))
        for side in ("before", "after")
        if told.get(side) is not None
    ]

    def said(value: float) -> str:
        return f"{100 * value:.1f} %" if percent else f"{value:.4f}"

    return " → ".join(
        said(value) + (f" ± {said(error)}" if error is not None else "") for value, error in sides
    )
