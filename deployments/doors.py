"""What the commands share: how a recipe is named, and how an error ends a command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer

from opd_core.errors import ConfigError, DataError, OPDError, PreflightError
from opd_core.recipe import find_recipe as recipe_file

T = TypeVar("T")
NOTHING_STARTED = (ConfigError, PreflightError, DataError)
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting")
]


def find_recipe(name: str) -> Path:
    """A file as it is named, or a shipped recipe by its name; another name ends the command."""
    return guarded(lambda: recipe_file(name))


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
