"""``opd probe``: ask an endpoint whether one can distil from it, and show what was found."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from pydantic import ValidationError
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from opd_core.config import OPDTeacherConfig
from opd_core.errors import ConfigError, PreflightError, ServingError
from opd_core.preflight.facts import load_tokenizer
from opd_core.serving.probe import ProbeReport, probe

KEY = re.compile(r"env:([A-Za-z_]\w*)")
STYLE = {"pass": "green", "warn": "yellow", "fail": "bold red", "unknown": "dim"}


def probe_endpoint(
    url: str,
    *,
    backend: str,
    tokenizer: str,
    key: str | None = None,
    max_concurrency: int = 32,
    context: int = 4096,
    as_json: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> bool:
    """Probe ``url`` and print the report; whether one can distil from it.

    Raises :class:`ConfigError` for arguments that cannot be used and :class:`PreflightError` where
    nobody answers.
    """
    api_key = _read_key(key, environ)
    config = _read_config(url, backend, max_concurrency)
    loaded = _load(tokenizer)
    status = Console(stderr=True).status(f"probing {url}") if not as_json else nullcontext()
    with status as shown:
        work = probe(
            config,
            loaded,
            api_key=api_key,
            max_concurrency=max_concurrency,
            context_limit=context,
            telling=lambda what: shown.update(f"probing {url}: {what}") if shown else None,
        )
        try:
            report = asyncio.run(work)
        except ServingError as error:
            raise PreflightError(str(error)) from None
    if as_json:
        print(report.to_json())
    else:
        show(report, Console(highlight=False))
    return report.usable


def show(report: ProbeReport, console: Console) -> None:
    """The report for people."""
    title = Text(f"{report.endpoint} ({report.backend}), {report.seconds:.0f} s")
    table = Table("check", "", "found", title=title, title_justify="left", box=SIMPLE_HEAD)
    for check in report.checks:
        found = check.found + (f"\n→ {check.advice}" if check.advice else "")
        table.add_row(check.name, Text(check.verdict, STYLE[check.verdict]), Text(found))
    console.print(table)
    if report.levels:
        names = ("at once", "requests/s", "tokens/s", "p50 s", "p95 s", "errors")
        levels = Table(*names, box=SIMPLE_HEAD)
        for level in report.levels:
            rates = (f"{level.requests_per_s:.1f}", f"{level.tokens_per_s:.0f}")
            times = (f"{level.p50_s:.3f}", f"{level.p95_s:.3f}")
            levels.add_row(str(level.concurrency), *rates, *times, str(level.errors))
        console.print(levels)
    if report.usable:
        console.print("One can distil from this endpoint.", style="green")
    else:
        failed = ", ".join(check.name for check in report.checks if check.verdict == "fail")
        console.print(f"One cannot distil from this endpoint: {failed}.", style="bold red")


def _read_key(key: str | None, environ: Mapping[str, str]) -> str | None:
    if key is None:
        return None
    named = KEY.fullmatch(key)
    if named is None:
        raise ConfigError("--key names where the key is kept, as env:NAME; it is never written")
    value = environ.get(named[1])
    if not value:
        raise ConfigError(f"--key {key}: the environment variable {named[1]} is not set")
    return value


def _read_config(url: str, backend: str, max_concurrency: int) -> OPDTeacherConfig:
    fields = {"endpoint": url, "backend": backend, "max_concurrency": max_concurrency}
    try:
        return OPDTeacherConfig.model_validate({"name": "probed", **fields})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{first['loc'][-1] if first['loc'] else url}: {first['msg']}") from None


def _load(tokenizer: str) -> Any:
    try:
        return load_tokenizer(tokenizer)
    except Exception as error:  # the readers of these files raise whatever they like
        said = str(error).splitlines()[0]
        raise ConfigError(f"--tokenizer {tokenizer}: cannot be read ({said})") from None
