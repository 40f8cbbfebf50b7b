"""The commands about runs that are over: which was better, what happened, where is it tracked."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from deployments.doors import SetOption, fail, find_recipe, guarded
from opd_core.recipe import run_root

RunArgument = Annotated[str, typer.Argument(help="Run id or directory")]


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN…", help="Run ids, directories or MLflow run ids; first the baseline's"
        ),
    ],
    metric: Annotated[
        str, typer.Option(help="What is to be better, e.g. opd_reverse_kl")
    ] = "eval/accuracy",
    axis: Annotated[
        str,
        typer.Option(help="steps, student_tokens, teacher_tokens, device_seconds or money"),
    ] = "student_tokens",
    at: Annotated[
        float | None,
        typer.Option(min=0, help="Where on the axis; else the farthest point that all reached"),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(help="A smaller difference is none that matters; of shares 0.02, else none"),
    ] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL=FILE", help="A further line: an evaluation from `opd eval`"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for page, markdown, plots and JSON")
    ] = None,
    root: Annotated[
        Path | None, typer.Option(help="Where runs lie that are named by id; $OPD_RUNS, else runs")
    ] = None,
    mlflow: Annotated[
        bool, typer.Option(help="Keep the comparison in the runs' MLflow, and tag them")
    ] = True,
    mlflow_uri: Annotated[
        str | None, typer.Option(help="MLflow in which run ids are looked up")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only")] = False,
) -> None:
    """Say which runs were better, how sure that is, and in what they differ.

    Runs that differ in their seed only are one arm; the first run's arm is the baseline.
    """
    from deployments.comparing import compare as compare_and_show
    from opd_core.analysis.comparison import Target

    guarded(
        lambda: compare_and_show(
            runs,
            Target(metric, axis, at, margin),
            references=reference or [],
            out=out,
            root=root or Path(run_root()),
            mlflow=mlflow,
            mlflow_uri=mlflow_uri,
            as_json=as_json,
        )
    )


def report(run: RunArgument, overrides: SetOption = None) -> None:
    """Write a run's report, one page to read anywhere, and say where it is."""
    from opd_core.analysis.report import write_report
    from opd_core.training.lineage import find_run

    directory = guarded(lambda: find_run(run, find_recipe("tiny"), overrides or []))
    typer.echo(str(guarded(lambda: write_report(directory))))


def sync(
    run: RunArgument,
    overrides: SetOption = None,
    mlflow_uri: Annotated[
        str | None, typer.Option(help="Another MLflow to bring the run into")
    ] = None,
) -> None:
    """Bring everything of an ended run to where it is tracked; nothing is there twice.

    Exit status 1: something is lacking still.
    """
    from tasks.console import TERMINAL
    from tasks.sync import sync_run

    TERMINAL.lines = True
    done = guarded(partial(sync_run, run, find_recipe("tiny"), overrides or [], mlflow_uri))
    typer.echo("\n".join(done.lines()))
    if not done.complete:
        raise typer.Exit(1)


def evaluate(
    model: Annotated[
        str,
        typer.Argument(help="A model's directory, student, teacher, teacher:NAME, or a run"),
    ],
    recipe: Annotated[
        str | None, typer.Option(help="Recipe with the questions; of a run: its own")
    ] = None,
    overrides: SetOption = None,
    out: Annotated[Path | None, typer.Option(help="File for what each question came to")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON last")] = False,
) -> None:
    """Measure a model's held-out accuracy as a run measures its student's."""
    from tasks.console import TERMINAL
    from tasks.evaluation import evaluate_model

    TERMINAL.lines = not as_json
    path, tiny = find_recipe(recipe) if recipe else None, find_recipe("tiny")
    measure = partial(evaluate_model, model, path, overrides or [], default_recipe=tiny, out=out)
    found = guarded(measure)
    if as_json:
        told = found.evaluation.metrics() | {"file": str(found.file)}
        typer.echo(json.dumps(told))
    else:
        typer.echo("\n".join(found.lines()))


def receipt(run: RunArgument, overrides: SetOption = None) -> None:
    """Show what a run started, how each process ended, and that nothing is left."""
    from opd_core.lifecycle.receipt_text import receipt_text
    from opd_core.lifecycle.records import read_receipt
    from opd_core.training.lineage import find_run

    directory = guarded(lambda: find_run(run, find_recipe("tiny"), overrides or []))
    found = read_receipt(directory)
    if found is None:
        fail(f"{directory} holds no receipt: the run lives, or died; see `opd reap --dry-run`", 1)
    typer.echo(receipt_text(found))
