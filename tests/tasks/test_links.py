"""Links between Prefect, MLflow and the run directory, in both directions, without passwords."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL, temporary_settings

from opd_core.training.attempts import Attempt, RunHistory
from opd_core.training.links import Links, read_links
from tasks.environment import RunRecord
from tasks.links import find_links, prefect_page, report_markdown, run_markdown
from tasks.mlflow_run import mlflow_run
from tests.tasks.ended_run import ended_run

FLOW_RUN = "7f0f2f2e-6f55-4d19-9b22-6a4a27f2b0f5"
SERVER = "tracking.mlflow_uri=http://mlflow:5000/"
PAGE = "http://mlflow:5000/#/experiments/3/runs/abc"
SUMMARY: dict[str, Any] = {
    "status": "failed",
    "error": "TrainingError: no | room\nsecond line",
    "accuracy": {"before": 0.436, "before_stderr": 0.016, "after": 0.829, "after_stderr": None},
    "opd_reverse_kl": {"before": None, "after": None},
    "train_steps": 20,
    "stopped": "",
    "lost": {"timeout": 3},
    "server_restarts": {"teacher-a": 1, "teacher-b": 1},
    "seconds": {"total": 61.4},
    "findings": [
        {"level": "warning", "train_step": 9, "name": "student collapse", "evidence": "entropy 0.1"}
    ],
}


@contextmanager
def prefect_at(api: str | None, ui: str | None = None) -> Iterator[None]:
    with temporary_settings({PREFECT_API_URL: api, PREFECT_UI_URL: ui}):
        yield


def run_at(root: Path, *overrides: str) -> RunRecord:
    run = ended_run(root, *overrides)
    history = RunHistory("tiny-1", (Attempt(1.0, FLOW_RUN),), {})
    history.write(run.directory)
    return replace(run, history=history)


def test_prefects_page_lies_beside_its_api_or_where_the_setting_says() -> None:
    with prefect_at("http://me:pw@prefect:4200/api"):
        assert prefect_page(FLOW_RUN) == f"http://prefect:4200/runs/flow-run/{FLOW_RUN}"
        assert prefect_page("") == ""
    with prefect_at("http://inside:4200/api", "https://outside"):
        assert prefect_page(FLOW_RUN) == f"https://outside/runs/flow-run/{FLOW_RUN}"
    with prefect_at(None):
        assert prefect_page(FLOW_RUN) == ""


def test_a_page_that_prefect_cannot_tell_is_none() -> None:
    with prefect_at("http://prefect:4200/api", "http://[no"):
        assert prefect_page(FLOW_RUN) == ""


def test_mlflows_pages_are_known_once_a_server_has_given_its_ids(tmp_path: Path) -> None:
    run = run_at(tmp_path, SERVER)
    with prefect_at(None):
        assert find_links(run, "", "") == Links()
        links = find_links(run, "abc", "3")
    assert links.pages == {
        "MLflow run": PAGE,
        "MLflow experiment": "http://mlflow:5000/#/experiments/3",
        "report in MLflow": f"{PAGE}/artifacts/report.html",
    }


def test_without_an_mlflow_server_the_page_names_the_command(tmp_path: Path) -> None:
    run = run_at(tmp_path, "tracking.mlflow_uri=null")
    with prefect_at(None):
        links = find_links(run, "abc", "3")
    assert links == Links(mlflow_run_id="abc")
    said = run_markdown(run, links)
    assert f"`mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow.db`, run `abc`" in said


def test_the_page_of_a_run_links_the_others_and_names_its_directory(tmp_path: Path) -> None:
    run = run_at(tmp_path, SERVER)
    with prefect_at("http://prefect:4200/api"):
        said = run_markdown(run, find_links(run, "abc", "3"))
    assert f"[MLflow run]({PAGE})" in said
    assert f"`{run.directory}`" in said
    assert "tiny, seed 1234" in said
    assert "prefect:4200" not in said  # it is where one is


def test_mlflow_is_told_the_page_that_the_flow_knew(tmp_path: Path) -> None:
    run = run_at(tmp_path, SERVER)
    with prefect_at("http://prefect:4200/api"):
        page = prefect_page(FLOW_RUN)
        find_links(run, "abc", "3").write(run.directory)
    with prefect_at("http://another:1/api"):  # of somebody who synchronises it later
        kept = mlflow_run(run)
    assert kept.tags["prefect.flow_run_url"] == page
    assert f"({page})" in kept.description
    assert str(run.directory) in kept.description


def test_without_a_lasting_prefect_mlflow_is_told_no_page(tmp_path: Path) -> None:
    with prefect_at(None):
        kept = mlflow_run(run_at(tmp_path))
    assert kept.tags["prefect.flow_run_url"] == ""
    assert "Prefect" not in kept.description


def test_the_page_of_an_earlier_attempt_is_not_told_of_the_one_that_goes_on(tmp_path: Path) -> None:
    run = run_at(tmp_path)
    with prefect_at("http://prefect:4200/api"):
        find_links(run, "", "").write(run.directory)
    resumed = Attempt(2.0, "0b1e6d7c-0000-4000-8000-6a4a27f2b0f5")
    history = replace(run.history, attempts=(*run.history.attempts, resumed))
    with prefect_at(None):
        kept = mlflow_run(replace(run, history=history), over=False)
    assert kept.tags["prefect.flow_run_url"] == ""
    assert "Prefect" not in kept.description


@pytest.mark.parametrize("content", [None, "no JSON", '{"prefect": 7}'])
def test_links_that_cannot_be_read_are_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "links.json").write_text(content)
    assert read_links(tmp_path) == Links()


def test_the_report_says_what_the_run_came_to_and_where_the_whole_is(tmp_path: Path) -> None:
    run = run_at(tmp_path, SERVER, "training.steps=60")
    (run.directory / "batches").mkdir()
    (run.directory / "batches" / "step-000001.json").touch()
    said = report_markdown(run, SUMMARY, Links(report=f"{PAGE}/artifacts/report.html"))
    assert said.splitlines()[0] == "**tiny-1: failed**"
    assert "TrainingError: no \\| room … (the rest is in the log)" in said
    for line in (
        "- **Held-out accuracy**: 43.6 % ± 1.6 % → 82.9 %",
        "- **Train steps**: 20 of 60",
        "- **Groups lost**: timeout 3",
        "- **Servers started again**: 2",
        "- **Seconds**: 61",
        "- **warning**, train step 9: student collapse, entropy 0.1",
    ):
        assert line in said.splitlines()
    assert "opd_reverse_kl" not in said  # nothing was measured
    assert f"[The whole report]({PAGE}/artifacts/report.html)" in said
    assert f"`resume` = `{run.directory}`" in said
