"""The lab as a person uses it: in a browser, with the mouse. ``opd up`` is real, so is each run.

``OPD_PICTURES=docs/images`` keeps the pictures for the documentation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from deployments.drill.watching import RunView
from opd_core.training.files import RUN_FILE, SUMMARY_FILE
from tests.browser.conftest import DESKTOP, browser  # noqa: F401  (a fixture)
from tests.operating.lab import PROJECT, Lab
from tests.operating.prefect_page import PrefectPage
from tests.teardown.stage import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

RUN_MS = 400_000
SECRET = "planted-in-the-form"
SMALL = {"overrides": ["training.prompts_per_step=16", "evaluation.samples=1"]}
ARTIFACTS = ("run", "progress", "curves", "servers", "pair-check", "receipt", "report")


@pytest.fixture
def prefect(lab: Lab, browser: Browser, tmp_path: Path) -> Iterator[PrefectPage]:  # noqa: F811
    """A tab of one's own; it asks nobody but this machine."""
    width, height = DESKTOP
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme="light")
    context.route(re.compile(r"^https?://(?!127\.0\.0\.1[:/])"), lambda route: route.abort())
    kept = os.environ.get("OPD_PICTURES")
    yield PrefectPage(context.new_page(), lab.ui_url, PROJECT / kept if kept else tmp_path)
    context.close()


@pytest.fixture(scope="module")
def two_runs(lab: Lab) -> list[RunView]:
    """Two experiments that differ in their learning rate."""
    ids = [
        lab.start_run("distill", {"recipe": "tiny", "steps": 3, "learning_rate": rate, **SMALL})
        for rate in (5e-4, 1e-3)
    ]
    for each in ids:
        lab.wait_for(each, "Completed", within_s=600)
    return [run_of(lab, each) for each in ids]


def run_of(lab: Lab, flow_run_id: str) -> RunView:
    """The run directory of a flow run, once it is there."""

    def found() -> RunView | None:
        runs = [RunView(file.parent) for file in lab.root.glob(f"*/{RUN_FILE}")]
        return next((run for run in runs if run.flow_run_id() == flow_run_id), None)

    run = wait_until(found, f"the run directory of {flow_run_id}", 240)
    assert run is not None
    return run


def experiments(lab: Lab) -> int:
    distill = lab.deployment_id("distill")
    with lab.client() as client:
        return sum(run.deployment_id == distill for run in client.read_flow_runs())


def test_an_experiment_is_filled_in_started_and_followed_to_its_report(
    lab: Lab, prefect: PrefectPage
) -> None:
    prefect.open_form("distill")
    expect(prefect.page.get_by_role("button", name="Select Recipe")).to_have_text("tiny")
    prefect.picture("prefect-form", height=1500)
    prefect.field("Train steps").fill("3")
    prefect.add("Other settings", "training.prompts_per_step=16")
    prefect.field("Other settings as YAML").fill("evaluation:\n  samples: 1\n")
    prefect.submit()
    flow_run_id = prefect.follow()

    prefect.expect_state("Running", RUN_MS)
    expect(prefect.page.get_by_text("tiny · seed 1234").first).to_be_visible()
    prefect.page.get_by_role("tab", name="Task Runs").click()
    expect(prefect.page.get_by_text("train tiny for 3 steps")).to_be_visible(timeout=RUN_MS)
    prefect.picture("prefect-run", height=1000)
    prefect.expect_state("Completed", RUN_MS)

    for artifact in ARTIFACTS:
        prefect.open_run(flow_run_id)
        prefect.open_artifact(artifact)
        if artifact == "curves":
            prefect.picture("prefect-curves", height=900)
    run = run_of(lab, flow_run_id)
    expect(prefect.page.get_by_text(f"{run.run_id}: completed").first).to_be_visible()
    prefect.picture("prefect-report")
    config = run.json_file("config.json")
    assert config["training"]["steps"] == 3
    assert config["training"]["prompts_per_step"] == 16
    assert config["evaluation"]["samples"] == 1


def test_a_mistake_and_a_secret_are_refused_in_the_form_and_nothing_is_kept(
    lab: Lab, prefect: PrefectPage
) -> None:
    before = experiments(lab)
    prefect.open_form("distill")
    prefect.field("Learning rate").fill("-1")
    prefect.field("Devices of the student").fill("gpu0")
    prefect.add("Other settings", f"opd.teachers.0.api_key={SECRET}")
    prefect.submit()

    expect(prefect.part("Learning rate")).to_contain_text("less than or equal to the minimum of 0")
    expect(prefect.part("Devices of the student")).to_contain_text("GPU indices or UUIDs")
    refused = prefect.part("Other settings")
    expect(refused).to_contain_text("env:NAME or block:NAME in place of a key or password")
    refused.scroll_into_view_if_needed()
    prefect.picture("prefect-form-refused")
    assert experiments(lab) == before

    prefect.field("Learning rate").fill("")
    prefect.field("Devices of the student").fill("")
    refused.locator("textarea").fill("training.prompts_per_step=16")
    prefect.field("Train steps").fill("2")
    prefect.submit()  # the form is checked once more, and the complaints go
    expect(refused).not_to_contain_text("was expected")
    prefect.submit()
    flow_run_id = prefect.follow()
    lab.wait_for(flow_run_id, "Completed", within_s=400)
    kept = [*(lab.folder / "prefect").rglob("*.db*"), *lab.root.rglob("*.log"), lab.log]
    assert kept
    assert not [file for file in kept if SECRET.encode() in file.read_bytes()]


def test_a_run_is_cancelled_from_its_page_and_nothing_of_it_is_left(
    lab: Lab, prefect: PrefectPage
) -> None:
    prefect.open_form("distill")
    prefect.field("Train steps").fill("5000")
    prefect.add("Other settings", "training.prompts_per_step=16")
    prefect.submit()
    flow_run_id = prefect.follow()
    run = run_of(lab, flow_run_id)
    wait_until(lambda: run.trained_steps() > 0, "a train step", 400)

    prefect.page.get_by_role("button", name="Open menu").click()
    prefect.page.get_by_role("menuitem", name="Cancel").click()
    prefect.picture("prefect-cancel")
    prefect.page.get_by_role("button", name="Cancel Flow Run").click()
    prefect.expect_state("Cancelled", RUN_MS)
    wait_until(run.receipt, "the receipt", 120)
    receipt = run.receipt()
    assert receipt is not None
    assert receipt.clean
    assert run.leftovers().none
    assert run.json_file(SUMMARY_FILE)["status"] == "cancelled"


def test_two_runs_are_compared_by_click(
    lab: Lab, two_runs: list[RunView], prefect: PrefectPage
) -> None:
    prefect.open_form("compare")
    for run in two_runs:
        prefect.add("Runs", run.run_id)
    prefect.submit()
    flow_run_id = prefect.follow()
    prefect.expect_state("Completed", RUN_MS)
    prefect.open_run(flow_run_id)
    prefect.open_artifact("comparison")
    for run in two_runs:
        expect(prefect.page.get_by_text(run.run_id).first).to_be_visible()
    prefect.picture("prefect-compare", height=1000)
    prefect.open_run(flow_run_id)
    prefect.open_artifact("comparison-page")
    link = prefect.page.locator(f'a[href^="{lab.mlflow_url}/#/experiments/"]')
    expect(link.first).to_be_visible()
    (page,) = lab.root.glob("comparisons/*/*.html")
    prefect.page.goto(page.as_uri())
    expect(prefect.page.get_by_text("training.learning_rate").first).to_be_visible()
