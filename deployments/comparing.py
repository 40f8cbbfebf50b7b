"""``opd compare``: several runs, one verdict, at a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from opd_core.analysis.comparison import Target
from opd_core.analysis.comparison_text import comparison_text
from tasks.comparing import compare_runs
from tasks.console import TERMINAL


def compare(
    names: Sequence[str],
    target: Target,
    *,
    references: Sequence[str] = (),
    out: Path | None = None,
    root: Path,
    mlflow: bool = True,
    mlflow_uri: str | None = None,
    as_json: bool = False,
) -> None:
    """Compare runs and show what was found: verdict, table and where the page lies, or with
    ``as_json`` the whole comparison. Arguments and errors are those of
    :func:`~tasks.comparing.compare_runs`."""
    TERMINAL.lines = True  # warnings: they go to standard error
    compared = compare_runs(
        names,
        target,
        references=references,
        out=out,
        root=root,
        mlflow=mlflow,
        mlflow_uri=mlflow_uri,
    )
    if as_json:
        typer.echo(compared.comparison.to_json())
        return
    Console(highlight=False).print(comparison_text(compared.comparison))
    typer.echo(f"page: {compared.page}")
