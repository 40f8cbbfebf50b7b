"""``opd``: run an experiment, check a recipe, end what dead runs have left, prepare models; compare
and report runs (results.py).

Exit status: 0 the run completed and left nothing; 1 it failed; 2 the recipe or the machine does not
fit and nothing was started; 130 interrupted.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Annotated, Any

import typer

from deployments import results, teachers
from deployments.doors import SetOption, fail, find_recipe, guarded
from deployments.planning import plan
from deployments.up import up
from opd_core.quiet import apply_defaults
from opd_core.recipe import RECIPES, load_recipe

app = typer.Typer(
    help="On-policy distillation as one experiment.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
RecipeArgument = Annotated[str, typer.Argument(help="A shipped recipe's name, or a YAML file")]


def main() -> None:
    """Entry point of the console script."""
    apply_defaults()
    # The terminal shows our own lines; Prefect's log goes to its API all the same.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    app()


@app.command()
def run(
    recipe: Annotated[
        str | None, typer.Argument(help="A shipped recipe's name, or a YAML file")
    ] = None,
    overrides: SetOption = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Continue a run (its id or directory) where it stopped"),
    ] = None,
    fork: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Begin a new run from a run's newest checkpoint"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary last")] = False,
) -> None:
    """Run one experiment from its checks to its report.

    With --resume or --fork the recipe is that run's own.
    """
    if recipe is None and not (resume or fork):
        fail("expected a recipe, or a run: --resume RUN, --fork RUN; see `opd recipes`", 2)
    request: dict[str, Any] = {
        "recipe_file": str(find_recipe(recipe or "tiny")),
        "overrides": overrides or [],
        "resume": resume or "",
        "fork": fork or "",
    }
    guarded(lambda: _check_plan(**request))
    guarded(lambda: _run(request, as_json))


def _run(request: dict[str, Any], as_json: bool) -> None:
    from tasks.temporary_server import ensure_prefect_api

    ensure_prefect_api()
    from flows.distill import distill
    from flows.request import DistillRequest
    from tasks.console import TERMINAL

    TERMINAL.lines, TERMINAL.summary_json = True, as_json
    distill(DistillRequest.of(**request))


@app.command()
def check(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON")] = False,
) -> None:
    """Show how each teacher fits the student, and all problems; starts nothing."""
    from deployments.checking import check as check_recipe

    path = find_recipe(recipe)
    if not guarded(lambda: check_recipe(path, overrides or [], as_json=as_json)):
        raise typer.Exit(2)


@app.command()
def probe(
    url: Annotated[str, typer.Argument(help="http://host:port of a teacher server")],
    tokenizer: Annotated[str, typer.Option(help="Directory of the student's tokenizer")],
    backend: Annotated[str, typer.Option(help="sglang, lmdeploy or embedded")] = "sglang",
    key: Annotated[str | None, typer.Option(help="Where its API key is kept: env:NAME")] = None,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Most requests at once")] = 32,
    context: Annotated[int, typer.Option(min=8, help="Longest sequence sent, in tokens")] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only")] = False,
) -> None:
    """Ask an endpoint whether one can distil from it (status 0: yes, 1: no, 2: nobody answers)."""
    from deployments.probing import probe_endpoint

    ask = partial(probe_endpoint, url, backend=backend, tokenizer=tokenizer, key=key)
    ask = partial(ask, max_concurrency=max_concurrency, context=context, as_json=as_json)
    if not guarded(ask):
        raise typer.Exit(1)


@app.command()
def drill(
    ending: Annotated[str, typer.Argument(help="How to end the run; see --list")] = "kill-flow",
    moment: Annotated[str, typer.Option(help="When to end it; see --list")] = "sampling",
    recipe: Annotated[str, typer.Option(help="A shipped recipe's name, or a file")] = "tiny",
    overrides: SetOption = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show endings and moments")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report last")] = False,
) -> None:
    """Rehearse an ending: start a cheap run, end it on purpose, show what is left of it."""
    from deployments.drill.command import drill as rehearse

    path = str(find_recipe(recipe))
    hold = partial(rehearse, ending, moment, path, overrides or [], as_json=as_json)
    if not guarded(partial(hold, show_list=show_list)):
        raise typer.Exit(1)


@app.command()
def reap(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what there is")] = False,
    forget: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Strike out a dead or distant run that cannot be settled"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only")] = False,
) -> None:
    """End what your dead runs have left on this machine, and write their final states.

    Exit status 1: something could not be ended or written.
    """
    import json

    from tasks.reaping import forget_run, reap_dead_runs

    if forget is not None:
        if why := guarded(partial(forget_run, forget)):
            fail(why, 1)
        typer.echo(f"{forget} is struck out; what lacks of its final state stays so")
        return
    report = guarded(lambda: reap_dead_runs(dry_run))
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    elif report.lines:
        from rich.console import Console

        Console(highlight=False).print(report.table())
    else:
        typer.echo("every run is settled")
    if report.left:
        raise typer.Exit(1)


for about_runs in (results.receipt, results.report, results.compare, results.sync):
    app.command()(about_runs)
app.command("eval")(results.evaluate)
app.command()(plan)
app.add_typer(teachers.app, name="teacher")
app.command()(up)


@app.command()
def automations(
    block: Annotated[
        str, typer.Argument(help="Notification block of the server, as TYPE/NAME")
    ] = "custom-webhook/opd-alerts",
) -> None:
    """Have a Prefect server notify of failed, unclean and silent runs."""
    from deployments.automations import register_automations

    for name in guarded(lambda: register_automations(block)):
        typer.echo(f"{name}: on, notifies by {block}")


@app.command()
def recipes() -> None:
    """List the shipped recipes."""
    for path in sorted(RECIPES.glob("*.yaml")):
        config = load_recipe(path)
        typer.echo(f"{path.stem:29} {config.description}")


@app.command()
def settings() -> None:
    """Print every setting of a recipe, with type, default and meaning (markdown)."""
    from deployments.settings import settings_reference

    typer.echo(settings_reference(), nl=False)


@app.command()
def prepare(
    what: Annotated[str, typer.Argument(help="smollm2, sglang or lmdeploy")],
    device: Annotated[str, typer.Option(help="Of a server: auto, cpu or cuda")] = "auto",
) -> None:
    """Fetch models and build servers' environments that the project does not ship."""
    from deployments.prepare import PREPARATIONS
    from opd_core.recipe import cache_dir

    if what not in PREPARATIONS:
        fail(f"unknown: {what!r}; there is: {', '.join(sorted(PREPARATIONS))}", 2)
    guarded(
        lambda: PREPARATIONS[what](cache_dir(), lambda text: typer.echo(text, err=True), device)
    )


def _check_plan(recipe_file: str, overrides: list[str], resume: str, fork: str) -> None:
    """A mistake in the recipe is told in milliseconds, before Prefect is imported."""
    from opd_core.training.lineage import plan_run

    plan_run(recipe_file, overrides, resume=resume, fork=fork)


if __name__ == "__main__":
    main()
