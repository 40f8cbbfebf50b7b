"""A headless Chromium, and pages in it that note whatever should not have happened."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = (
    "the browser tests need a Chromium and found none: install one (on Debian or Ubuntu: "
    "apt-get install chromium), or name its program in OPD_CHROMIUM"
)
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DESKTOP, PHONE = (1280, 800), (390, 844)


@dataclass
class Opened:
    """A page, and what it did that a page of ours does not do."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    @property
    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        width: int = self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        return width


OpenPage = Callable[..., Opened]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for a file's tests, and no longer: playwright's event loop keeps asynchronous
    tests from running. A missing one is a failure: a skipped test would tell nobody."""
    found = (os.environ.get("OPD_CHROMIUM"), *map(shutil.which, NAMES))
    path = next((path for path in found if path), None)
    if path is None:
        pytest.fail(MISSING, pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """``open_page(path, size=DESKTOP, scheme="light")``: touch is on where the window is a
    phone's."""
    contexts = []

    def opened(
        path: Path, size: tuple[int, int] = DESKTOP, scheme: Literal["light", "dark"] = "light"
    ) -> Opened:
        width, height = size
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            has_touch=size == PHONE,
            is_mobile=size == PHONE,
        )
        contexts.append(context)
        one = Opened(context.new_page())
        one.page.on("console", lambda message: one.complaints.append(message.text))
        one.page.on("pageerror", lambda error: one.complaints.append(str(error)))
        one.page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith(("file:", "data:"))
                else one.complaints.append(request.url)
            ),
        )
        one.page.goto(path.as_uri())
        return one

    yield opened
    for context in contexts:
        context.close()
