"""What the commands share: how a recipe is named, and how an error ends a command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer

from opd_core.errors import ConfigError, DataError, OPDError, PreflightError

T = TypeVar("T")
RECIPES = Path(__file__).with_name("recipes")
NOTHING_STARTED = (ConfigError, PreflightError, DataError)
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting")
]


def find_recipe(name: str) -> Path:
    """A file as it is named, or a shipped recipe by its name."""
    file = Path(name)
    if file.suffix in (".yaml", ".yml") or file.exists():
        return file
    shipped = RECIPES / f"{name}.yaml"
    if not shipped.is_file():
        there = ", ".join(sorted(path.stem for path in RECIPES.glob("*.yaml")))
        fail(f"no recipe {name!r}: expected a YAML file, or one of: {there}", 2)
    return shipped


def guarded(action: Callable[[], T]) -> T:
    """What the action returns; its error becomes a line and an exit status."""
    try:
        return action()
    except NOTHING_STARTED as error:
        fail(str(error), 2)
    except OPDError as error:
        fail(str(error), 1)
    except KeyboardInterrupt:
        fail("interrupted", 130)


def fail(message: str, status: int) -> NoReturn:
    """End the command."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(status)
