"""``opd plan``: everything that a run of a recipe would do, without a GPU. Starts nothing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any

import typer

from deployments.doors import SetOption, find_recipe, guarded
from opd_core.config import ExperimentConfig
from opd_core.recipe import load_recipe


def plan(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or a YAML file")],
    overrides: SetOption = None,
    card: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="GB",
            help="Memory of every GPU in 10^9 bytes; else what nvidia-smi says, else the smallest "
            "common card on which all fits",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only")] = False,
) -> None:
    """Show what a run would do: commands, devices, memory, ports, tokens, files. Needs no GPU.

    Exit status 2: something does not fit on its device.
    """
    path = find_recipe(recipe)
    config = guarded(partial(load_recipe, path, overrides or []))
    record, lines = _planned(config, card)
    typer.echo(json.dumps(record, indent=2) if as_json else "\n".join(lines))
    if record["problems"]:
        raise typer.Exit(2)


def _planned(config: ExperimentConfig, card: float | None) -> tuple[dict[str, Any], list[str]]:
    from opd_core.planning import make_plan, read_cards, smallest_card
    from opd_core.planning.cards import COMMON_CARDS_GB, GB

    smallest = smallest_card(config)
    cards, said = read_cards(card), "as named" if card else "as nvidia-smi tells"
    if card is None and not cards.by_name:
        cards = replace(cards, otherwise=(smallest or COMMON_CARDS_GB[-1]) * GB)
        said = "assumed: no nvidia-smi here; name it with --card GB"
    planned = make_plan(config, cards)
    devices = [
        asdict(device) | {"needed": device.needed, "problems": device.problems}
        for device in planned.devices
    ]
    record = asdict(planned) | {"devices": devices, "problems": planned.problems}
    record["smallest_card_gb"] = smallest
    return record, list(_lines(planned, said, smallest))


def _lines(planned: Any, said: str, smallest: int | None) -> Iterator[str]:
    yield f"PLAN OF {planned.name}: nothing is started"
    yield from _section("Models", (f"{who}: {text}" for who, text in planned.models.items()))
    order = (f"{number}. {step}" for number, step in enumerate(planned.order, 1))
    yield from _section("Order", order)
    yield from _section("Commands (port 0 is a free one)", _commands(planned))
    yield from _section(f"Memory of each device (card {said})", _memory(planned, smallest))
    yield from _section("Tokens, at most", _tokens(planned.tokens))
    yield from _section(f"Files in {planned.directory}", _files(planned.files))
    yield ""
    yield from _conclusion(planned.devices)


def _conclusion(devices: Any) -> Iterator[str]:
    for alike in _alike(devices):
        for problem in alike[0].problems:
            yield f"DOES NOT FIT: {_names(alike)}: {problem}"
    if not any(device.problems for device in devices):
        known = all(device.card and not device.unknown for device in devices)
        yield "fits, by this estimate" if known else "nothing is known not to fit"


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    yield ""
    yield title
    yield from (f"  {line}" for line in lines)


def _commands(planned: Any) -> Iterator[str]:
    for process in planned.processes:
        devices = ", ".join(process.devices)
        yield process.name + (f" on {devices}" if devices else "")
        for name, value in process.env.items():
            yield f"    {name}={shlex.quote(value)}"
        yield f"    {shlex.join(process.argv)}"


def _memory(planned: Any, smallest: int | None) -> Iterator[str]:
    from opd_core.planning.items import MOMENTS, size, total

    for alike in _alike(planned.devices):
        device = alike[0]
        yield f"{_names(alike)}: {_verdict(device)}"
        if len(device.moments) > 1:
            sums = (f"{moment} {size(total(device.at(moment)))}" for moment in device.moments)
            yield f"    at once in {', '.join(sums)}"
        for item in device.items:
            when = "" if item.moments == MOMENTS else f", in {' and '.join(item.moments)}"
            yield f"    {item.who}: {item}{when}"
        yield from (f"    {bound}" for bound in device.bounds)
        for who, rollouts in device.rollouts:
            yield f"    {who}: its KV cache holds {rollouts:.1f} rollouts of full length"
    yield planned.host_at_start
    if any(device.name != "cpu" for device in planned.devices):
        yield (
            f"the smallest common card on which all fits: {smallest} GB"
            if smallest
            else "no common card is large enough"
        )


def _verdict(device: Any) -> str:
    from opd_core.planning.items import size

    if device.card is None:
        return "its memory is not known: name it with --card GB"
    room = f"{size(device.needed)} of {size(device.card)}"
    if any(bound.broken for bound in device.bounds):
        return f"does not fit: a server's share of it is too small ({room} in all)"
    if device.problems:
        return f"does not fit: {room}"
    if device.unknown:
        return f"not known: {room} without {', '.join(device.unknown)}, whose model has no size"
    return f"fits: {room}"


def _names(alike: list[Any]) -> str:
    from opd_core.planning.plan import device_name

    return ", ".join(map(device_name, alike))


def _alike(devices: Any) -> list[list[Any]]:
    """Devices with the same on them told once."""
    groups: list[list[Any]] = []
    for device in devices:
        key = [(item.what, item.bytes) for item in device.items], device.card, device.here
        for group in groups:
            first = group[0]
            if key == ([(i.what, i.bytes) for i in first.items], first.card, first.here):
                group.append(device)
                break
        else:
            groups.append([device])
    return groups


def _tokens(tokens: Any) -> Iterator[str]:
    yield (
        f"a train step: {tokens.rollouts} rollouts x {tokens.rollout:,} = {tokens.step:,}, of "
        f"which {tokens.response:,} are sampled; the run: {tokens.run:,}"
    )
    yield (
        f"training: micro-batches of {tokens.micro_batch:,}, {tokens.micro_batches} a training "
        "actor"
    )
    for teacher in tokens.teachers:
        chunks = (
            f"a rollout in {teacher.chunks} prefill passes of {teacher.chunk:,} tokens, "
            if teacher.chunks
            else ""
        )
        yield f"teacher {teacher.name!r}: {chunks}{teacher.at_once} rollouts at once"


def _files(files: Any) -> Iterator[str]:
    from opd_core.planning.items import size

    for item in files:
        room = f", {size(item.bytes)}" if item.bytes else ""
        yield f"{item.path}: {item.what}{room}"
