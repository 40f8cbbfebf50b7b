"""Secrets, from where a recipe says that they are kept. They live in memory and in environments of
processes only: no file, argument, parameter or log has them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from opd_core.config import ExperimentConfig, OPDTeacherConfig
from opd_core.config.values import KEY_REFERENCE
from opd_core.errors import PreflightError
from opd_core.scoring.asking import checked_key
from opd_core.serving.servers import Server, run_servers

Reference = tuple[str, str]
"""Which setting refers to a secret, as a message begins; ``env:NAME`` or ``block:NAME``."""


def references(config: ExperimentConfig) -> tuple[Reference, ...]:
    """Every secret that a run needs."""
    teachers = config.opd.teachers if config.opd else ()
    keys = (each for teacher in teachers for each in _of_key(teacher))
    return (*keys, *_of_servers(run_servers(config)))


def missing_secrets(config: ExperimentConfig, *, in_blocks: bool = True) -> list[str]:
    """Every secret that is not where the recipe says, a line for each. Without ``in_blocks`` those
    in a Prefect block are not looked for, and Prefect is not imported."""
    problems: list[str] = []
    for where, reference in references(config):
        if in_blocks or not reference.startswith("block:"):
            try:
                find_secret(reference, where)
            except PreflightError as error:
                problems.append(str(error))
    return problems


def resolve_key(teacher: OPDTeacherConfig) -> str | None:
    """The teacher's API key from where its reference says it is kept.

    Raises :class:`PreflightError` if it is not there, :class:`~opd_core.errors.ConfigError` if no
    HTTP header can carry it.
    """
    if teacher.api_key is None:
        return None
    said = teacher.api_key.get_secret_value()
    plain = not KEY_REFERENCE.fullmatch(said)  # from Python only
    return checked_key(teacher.name, said if plain else find_secret(said, _whose_key(teacher)))


def find_secrets(servers: Iterable[Server]) -> dict[str, str]:
    """What the environments of these servers refer to, by reference. Raises
    :class:`PreflightError` for the first that is not there."""
    return {reference: find_secret(reference, where) for where, reference in _of_servers(servers)}


def find_secret(reference: str, where: str) -> str:
    """The value of ``env:NAME`` or ``block:NAME``; ``where`` says which setting refers to it.

    Raises :class:`PreflightError` if it is not there, or empty.
    """
    kind, _, name = reference.partition(":")
    return _of_block(name, where) if kind == "block" else _of_variable(name, where)


def _of_variable(name: str, where: str) -> str:
    if not os.environ.get(name):
        raise PreflightError(
            f"{where} 'env:{name}': the environment variable {name} is not set, or empty"
        )
    return os.environ[name]


def _of_block(name: str, where: str) -> str:
    from prefect.blocks.system import Secret

    try:
        value = str(Secret.load(name).get())  # type: ignore[union-attr]
    except ValueError as error:
        raise PreflightError(
            f"{where} 'block:{name}': no such Prefect Secret block ({error})"
        ) from None
    if not value:
        raise PreflightError(f"{where} 'block:{name}': the Prefect Secret block {name} is empty")
    return value


def _of_key(teacher: OPDTeacherConfig) -> Iterator[Reference]:
    said = teacher.api_key.get_secret_value() if teacher.api_key else ""
    if KEY_REFERENCE.fullmatch(said):
        yield _whose_key(teacher), said


def _whose_key(teacher: OPDTeacherConfig) -> str:
    return f"teacher {teacher.name!r}: api_key"


def _of_servers(servers: Iterable[Server]) -> Iterator[Reference]:
    for server in servers:
        for name, value in server.launch.env.items():
            if KEY_REFERENCE.fullmatch(value):
                yield f"{server.who}: {server.settings}.env.{name}", value
