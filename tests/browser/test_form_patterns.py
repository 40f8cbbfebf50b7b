"""The run form's patterns, as a browser reads them."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser

from flows.form import NO_SECRET

TEXTS = {
    "opd.teachers.0.launch.env.HF_TOKEN_2=planted-0f3c": False,
    "a=1\nextra_args:\n  - --hf-token\n  - planted-0f3c": False,
    "opd.teachers.0.api_key=env:TEACHER_KEY": True,
    "sampling.max_new_tokens=9": True,
}


@pytest.mark.slow
def test_a_browser_reads_the_pattern_against_secrets_as_the_server_does(browser: Browser) -> None:
    page = browser.new_page()
    ask = "([pattern, text]) => new RegExp(pattern, 'u').test(text)"
    assert {text: page.evaluate(ask, [NO_SECRET, text]) for text in TEXTS} == TEXTS
    assert {text: bool(re.search(NO_SECRET, text)) for text in TEXTS} == TEXTS
    page.close()
