"""``opd teacher``: a teacher that is kept across runs, up until nobody has used it for a day."""

from __future__ import annotations

import json
import math
import shlex
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deployments.doors import SetOption, fail, find_recipe, guarded
from opd_core.errors import ServingError
from opd_core.lifecycle.records import read_receipt
from opd_core.serving.kept.record import KeptTeacher, kept_teachers
from opd_core.serving.kept.users import users_of

app = typer.Typer(help="Keep a teacher up across runs.", no_args_is_help=True)
HEADINGS = ("name", "state", "answers at", "model", "on", "ends")
CLOCK = "%Y-%m-%d %H:%M"


@app.command()
def up(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or a YAML file")],
    teacher: Annotated[
        str | None, typer.Option(help="Which of the recipe's teachers, if it has several")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What it is called here; else RECIPE'S NAME-TEACHER")
    ] = None,
    hours: Annotated[
        float, typer.Option(help="It ends when no run has used it for so long; up again renews")
    ] = 24.0,
    overrides: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON last")] = False,
) -> None:
    """Start a recipe's teacher and keep it, or go on keeping it; says how a run uses it."""
    from tasks.kept_teacher import keep_teacher

    if not (math.isfinite(hours) and hours > 0):
        fail(f"--hours: expected a number above 0, got {hours:g}", 2)
    keep = partial(keep_teacher, find_recipe(recipe), overrides or [], teacher=teacher, name=name)
    tell = partial(typer.echo, err=True)
    kept = guarded(lambda: keep(hours=hours, telling=tell))
    typer.echo(json.dumps(_told(kept)) if as_json else _how_to_use(kept, recipe))


@app.command()
def down(
    name: Annotated[str, typer.Argument(help="As `opd teacher list` names it")],
    force: Annotated[
        bool, typer.Option("--force", help="Also while runs use it, or if its keeper hangs")
    ] = False,
) -> None:
    """End a kept teacher; refused while runs use it."""
    from tasks.kept_teacher import end_teacher

    typer.echo(guarded(lambda: end_teacher(name, force=force)))


@app.command("list")
def list_all(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only")] = False,
) -> None:
    """Show the teachers that are kept, who uses them, and how those ended that are not any more."""
    told = guarded(lambda: [_told(kept) for kept in kept_teachers()])
    if as_json:
        typer.echo(json.dumps(told))
        return
    if not told:
        typer.echo("no teacher is kept")
        return
    table = Table(*HEADINGS, box=SIMPLE_HEAD)
    for each in told:
        table.add_row(*(Text(cell, overflow="fold") for cell in _cells(each)))
    Console(highlight=False).print(table)


def _told(kept: KeptTeacher) -> dict[str, Any]:
    """Everything there is to say of one, for JSON."""
    from tasks.kept_teacher import overrides_to_use

    alive, unreadable = kept.alive, ""
    try:
        order, state = kept.order, kept.state
    except ServingError as error:
        order, state, unreadable = None, None, str(error)
    with kept.gate():
        users = users_of(kept) if alive else ()
    phase: str = state.phase if state else "starting"
    said = state.said if state else ""
    if unreadable:
        phase, said = "unreadable", unreadable
    elif not alive and phase not in ("ended", "failed"):
        receipt = read_receipt(kept.folder)
        phase, said = "failed", f"its keeper died ({receipt.cause})" if receipt else "it was killed"
    endpoints = state.endpoints if state and alive else ()
    replicas = order.teacher.all_replicas if order else ()
    launches = [replica.launch for replica in replicas if replica.launch]
    return {
        "name": kept.name,
        "state": phase,
        "said": said,
        "endpoints": list(endpoints),
        "overrides": overrides_to_use(order, endpoints) if order and endpoints else [],
        "recipe": order.recipe if order else "",
        "model": launches[0].model if launches else "",
        "fingerprint": order.facts.fingerprint if order else "",
        "backends": [replica.backend for replica in replicas],
        "devices": [list(launch.devices) for launch in launches],
        "users": [user.run_id for user in users],
        "until": state.until if state and alive else None,
        "restarts": state.restarts if state else 0,
        "folder": str(kept.folder),
    }


def _cells(told: dict[str, Any]) -> tuple[str, ...]:
    """In the order of :data:`HEADINGS`."""
    on = [", ".join(devices) for devices in told["devices"]]
    served = [f"{backend} on {where}" for backend, where in zip(told["backends"], on, strict=True)]
    state = told["state"]
    if told["said"] and state != "ready":
        state += f": {told['said']}"
    if told["restarts"]:
        state += f" ({told['restarts']} restarts)"
    if told["users"]:
        ends = f"in use by {', '.join(told['users'])}"
    else:
        ends = time.strftime(CLOCK, time.localtime(told["until"])) if told["until"] else "-"
    endpoints = "\n".join(told["endpoints"]) or "-"
    model = "/".join(Path(told["model"]).parts[-2:])
    return told["name"], state, endpoints, model, "\n".join(served), ends


def _how_to_use(kept: KeptTeacher, recipe: str) -> str:
    from tasks.kept_teacher import key_reference

    told, order, lease = _told(kept), kept.order, kept.lease
    assert order is not None
    assert lease is not None
    key = key_reference(order)
    flags = " ".join(f"--set {shlex.quote(change)}" for change in told["overrides"])
    lines = [
        f"{kept.name} is up at {', '.join(told['endpoints'])} and {told['said']}",
        f"it ends when no run has used it for {lease.hours:g} h, and at once by: "
        f"opd teacher down {kept.name}",
        f"a run uses it by:  opd run {shlex.quote(recipe)} {flags}",
    ]
    if order.only and not order.teacher.replicas:
        lines.append(f"in Prefect's form:  teacher_endpoint  {told['endpoints'][0]}")
        if key:
            lines.append(f"                    teacher_api_key   {key}")
    else:
        lines.append("in Prefect's form:  overrides  " + "  ".join(told["overrides"]))
    return "\n".join(lines)
