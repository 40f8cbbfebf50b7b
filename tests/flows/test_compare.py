"""Runs are compared from Prefect's UI: what is asked, what the flow run shows, what it leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.settings import PREFECT_API_URL, temporary_settings
from pydantic import ValidationError

from flows.compare import Axis, CompareRequest, compare
from opd_core.analysis.comparison import Target
from opd_core.analysis.outcome import AXES
from tests.tasks.compared_runs import write_arms


def test_a_request_asks_for_what_the_comparison_takes_for_granted() -> None:
    assert CompareRequest(runs=["a", "b"]).target == Target()
    assert get_args(Axis) == AXES
    asked = CompareRequest(runs=["a", "b"], metric="entropy", axis="money", at=2.5, margin=0.1)
    assert asked.target == Target("entropy", "money", 2.5, 0.1)


@pytest.mark.parametrize(
    "odd", [{"runs": ["a"]}, {"axis": "hours"}, {"margin": 0}, {"at": "inf"}, {"seed": 1}]
)
def test_an_odd_request_is_refused_before_anything_is_read(odd: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CompareRequest.model_validate({"runs": ["a", "b"]} | odd)


def test_a_password_does_not_become_a_parameter_of_a_flow_run() -> None:
    with pytest.raises(ValidationError, match="MLFLOW_TRACKING_PASSWORD") as caught:
        CompareRequest(runs=["a", "b"], mlflow_uri="http://me:secret@host:5000")
    assert "secret" not in str(caught.value)


@pytest.fixture
def client(prefect_api: str) -> Iterator[SyncPrefectClient]:
    with (
        temporary_settings({PREFECT_API_URL: prefect_api}),
        get_client(sync_client=True) as client,
    ):
        yield client


@pytest.mark.slow
def test_a_flow_run_shows_the_verdict_and_leads_to_the_page(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    names = write_arms(tmp_path, mlflow=False)
    state = compare(CompareRequest(runs=names, root=str(tmp_path)), return_state=True)
    told = state.result()
    flow_run_id = state.state_details.flow_run_id
    assert flow_run_id is not None
    run = client.read_flow_run(flow_run_id)
    assert run.name == "eval/accuracy of tiny-1 against tiny-2 and 2 more"
    assert run.state is not None
    assert run.state.is_completed()
    of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
    shown = {each.key: str(each.data) for each in client.read_artifacts(artifact_filter=of_run)}
    page = Path(told["directory"]) / "comparison.html"
    assert page.is_file()
    assert told["sentences"][0] in shown["comparison"]
    assert "| tiny-slow | 2 |" in shown["comparison"]
    assert "no compared run is tracked in MLflow" in shown["comparison"]
    assert page.as_uri() in shown["comparison-page"]
    assert json.dumps(told)


@pytest.mark.slow
def test_an_unknown_run_fails_the_flow_run_with_what_there_is(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    write_arms(tmp_path)
    state = compare(
        CompareRequest(runs=["tiny-1", "tiny-3"], root=str(tmp_path)), return_state=True
    )
    assert state.is_failed()
    assert "no run 'tiny-3'" in (state.message or "")
    assert "tiny-2" in (state.message or "")
    assert not (tmp_path / "comparisons").exists()
