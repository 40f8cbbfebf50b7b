"""The shell of every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from opd_core.analysis import page

SOURCES = sorted(page.TEMPLATES.iterdir())


def test_a_page_is_escaped_and_has_its_title() -> None:
    html = page.render("base.html", title="<run>")
    assert "<title>&lt;run&gt;</title>" in html
    assert '<html lang="en">' in html


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_template_asks_the_network_for_anything(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"https?://|@import|url\(|<link(?! rel=\"icon\" href=\"data:)|src=", text)


def test_a_template_that_lacks_a_value_says_so() -> None:
    with pytest.raises(UndefinedError, match="run"):
        page.render("report.html", title="T")
