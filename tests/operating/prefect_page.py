"""Prefect's pages as a person uses them: what is clicked, typed and read. Nothing here knows the
API."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

SOON_MS = 60_000
TAKEN_MS = 20_000
"""For a page to show what the server knows; the machine may be busy with a run."""


class PrefectPage:
    """One browser tab, and the folder that pictures go to."""

    def __init__(self, page: Page, ui_url: str, pictures: Path) -> None:
        self.page, self.ui_url, self.pictures = page, ui_url, pictures
        page.set_default_timeout(SOON_MS)
        expect.set_options(timeout=SOON_MS)

    def open_form(self, deployment: str) -> None:
        """From the front page to a deployment's form, by clicks only."""
        self.page.goto(self.ui_url)
        self.page.get_by_role("link", name="Deployments", exact=True).click()
        self.page.get_by_role("link", name=deployment, exact=True).first.click()
        self.page.get_by_role("button", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Custom run").click()
        expect(self.page.get_by_role("button", name="Submit")).to_be_visible()

    def field(self, title: str) -> Locator:
        """The input below a title; Prefect adds to the titles whether a field is required."""
        return self.page.get_by_label(re.compile(rf"^{re.escape(title)}( \(Optional\))?$"))

    def part(self, title: str) -> Locator:
        """All that belongs to a field: title, description, inputs, complaints."""
        label = self.page.locator("label", has_text=re.compile(rf"^{re.escape(title)}( \(|$)"))
        return self.page.locator("div.group").filter(has=label).last

    def choose(self, title: str, choice: str) -> None:
        """Choose in a list."""
        self.page.get_by_role("button", name=f"Select {title}").click()
        self.page.get_by_role("option", name=choice, exact=True).click()

    def add(self, title: str, text: str) -> None:
        """One more item of a list."""
        part = self.part(title)
        part.get_by_role("button", name="Add item").click()
        part.locator("textarea").last.fill(text)

    def submit(self) -> None:
        """Send the form off."""
        self.page.get_by_role("button", name="Submit").click()

    def follow(self) -> str:
        """After a form was taken: to the page of its run, by the link that is offered; its id. A
        form that still checks what was typed last does not take the first click."""
        link = self.page.get_by_role("link", name="View run")
        submit = self.page.get_by_role("button", name="Submit")
        try:
            expect(link.first).to_be_visible(timeout=TAKEN_MS)
        except AssertionError:
            submit.click()
        link.first.click()
        self.page.wait_for_url(re.compile(r"/flow-run/[0-9a-f-]{36}"))
        return re.findall(r"[0-9a-f-]{36}", self.page.url)[0]

    def open_run(self, flow_run_id: str) -> None:
        """The page of a run."""
        self.page.goto(f"{self.ui_url}/v2/runs/flow-run/{flow_run_id}")

    def expect_state(self, name: str, within_ms: float) -> None:
        """Wait until the page of a run, which keeps itself up to date, shows a state."""
        badge = "[data-slot=badge]"  # in the page's head: a tab below may list the tasks' states
        head = self.page.locator(f"{badge}:not([role=tabpanel] {badge})")
        expect(head.get_by_text(name, exact=True)).to_be_visible(timeout=within_ms)

    def open_artifact(self, key: str) -> None:
        """From the page of a run to one of its artifacts."""
        self.page.get_by_role("tab", name="Artifacts").click()
        exactly = self.page.get_by_text(key, exact=True)
        self.page.get_by_role("tabpanel").get_by_role("link").filter(has=exactly).click()
        expect(self.page.get_by_role("tab", name="Raw")).to_be_visible()

    def picture(self, name: str, height: int = 800) -> None:
        """What is in the window now, ``height`` pixels of it."""
        self.page.set_viewport_size({"width": 1280, "height": height})
        self.page.screenshot(path=self.pictures / f"{name}.png", animations="disabled")
        self.page.set_viewport_size({"width": 1280, "height": 800})
