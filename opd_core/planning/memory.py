"""The memory that a run needs on each of its devices, and whether it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from opd_core.config import ExperimentConfig
from opd_core.config.student import gpu_shares
from opd_core.planning.cards import COMMON_CARDS_GB, GB, HOST, Cards
from opd_core.planning.items import MOMENTS, Bound, Item, Moment, size, total
from opd_core.planning.serving import server_needs
from opd_core.planning.shapes import ModelShape, read_shape
from opd_core.planning.training import SAMPLER, TRAINER, sampling_items, training_items
from opd_core.serving.commands import uses_gpu
from opd_core.serving.servers import Server, student_servers, teacher_servers

SPARE = 0.02
"""Share of a device that is left to the gaps of allocators."""
ReadShape = Callable[[str], ModelShape | None]


@dataclass(frozen=True, slots=True)
class Device:
    """One device: what is on it, and what does not fit. ``card`` is its bytes, None where nobody
    knows them; ``here`` is False for one of another cluster's nodes; ``unknown`` names models of
    which the size is not known: they are not in the sums. ``rollouts`` are those of full length
    that the KV caches of its servers hold, by server."""

    name: str
    here: bool
    card: int | None
    items: tuple[Item, ...]
    bounds: tuple[Bound, ...]
    unknown: tuple[str, ...] = ()
    rollouts: tuple[tuple[str, float], ...] = ()

    @property
    def users(self) -> tuple[str, ...]:
        """Who is on it, each once."""
        return tuple(dict.fromkeys([*(item.who for item in self.items), *self.unknown]))

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The moments that differ, by what is there then."""
        trains = TRAINER in self.users
        return MOMENTS if trains else MOMENTS[:1]

    def at(self, moment: Moment) -> tuple[Item, ...]:
        """What is on it then."""
        return tuple(item for item in self.items if moment in item.moments)

    @property
    def fullest(self) -> Moment:
        """The moment that needs most."""
        return max(self.moments, key=lambda moment: total(self.at(moment)))

    @property
    def needed(self) -> int:
        """Bytes in the fullest moment."""
        return total(self.at(self.fullest))

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it does not fit, with the arithmetic and what to do; empty where it does, or where
        the card is not known."""
        found = [
            f"{bound}; {_advice(bound.who, fraction='raise')}"
            for bound in self.bounds
            if bound.broken
        ]
        if found or self.card is None:
            return tuple(found)
        spare = int(SPARE * self.card)
        if self.needed + spare <= self.card:
            return ()
        parts = sorted(self.at(self.fullest), key=lambda item: item.bytes, reverse=True)
        told = "; ".join(f"{item.who}: {item}" for item in parts)
        return (
            f"{size(self.needed)} are needed in {self.fullest}, and {size(spare)} more for gaps "
            f"between allocations, of {size(self.card)}: {told}; "
            f"{_advice(*self.users, moment=self.fullest)}",
        )


def estimate(
    config: ExperimentConfig, cards: Cards, read: ReadShape = read_shape
) -> tuple[Device, ...]:
    """Every device of the run, GPUs first; all CPU slots are one."""
    places: dict[tuple[str, bool], _Place] = {}
    for device, here, occupant in _occupants(config):
        card = cards.of(device, here=here)
        place = places.setdefault((device, here), _Place(card))
        place.add(occupant, config, read)
    found = [place.device(name, here) for (name, here), place in places.items()]
    return tuple(sorted(found, key=lambda device: (device.name == HOST, not device.here)))


def smallest_card(config: ExperimentConfig, read: ReadShape = read_shape) -> int | None:
    """GB of the smallest common card on which everything fits; None where none is large enough."""
    for gb in COMMON_CARDS_GB:
        devices = estimate(config, Cards(otherwise=gb * GB), read)
        if not any(device.problems for device in devices if device.name != HOST):
            return gb
    return None


Occupant = str | Server


class _Place:
    """A device while it is being filled."""

    def __init__(self, card: int | None) -> None:
        self.card = card
        self._items: list[Item] = []
        self._bounds: list[Bound] = []
        self._unknown: list[str] = []
        self._rollouts: list[tuple[str, float]] = []

    def add(self, occupant: Occupant, config: ExperimentConfig, read: ReadShape) -> None:
        if isinstance(occupant, Server):
            self._add_server(occupant, config, read)
            return
        shape = read(config.student.model)
        if shape is None:
            self._unknown.append(occupant)
            return
        build = training_items if occupant == TRAINER else sampling_items
        self._items += build(config, shape, gpu=config.student.gpus > 0)

    def _add_server(self, server: Server, config: ExperimentConfig, read: ReadShape) -> None:
        shape = read(server.launch.model)
        if shape is None or self.card is None:
            self._unknown.append(server.who)
            return
        needs = server_needs(server, config, shape, self.card)
        self._items += needs.items
        self._bounds += needs.bounds
        if needs.rollouts is not None:
            self._rollouts.append((server.who, needs.rollouts))

    def device(self, name: str, here: bool) -> Device:
        return Device(
            name,
            here,
            self.card,
            tuple(self._items),
            tuple(self._bounds),
            tuple(dict.fromkeys(self._unknown)),
            tuple(self._rollouts),
        )


def _occupants(config: ExperimentConfig) -> Iterator[tuple[str, bool, Occupant]]:
    """Each process that has a model, with its device and whether that is this host's."""
    here = config.ray.address is None
    for device, occupant in _actors(config):
        yield device, here, occupant
    for server in (*student_servers(config), *teacher_servers(config.opd)):
        devices = server.launch.devices if uses_gpu(server.launch) else (HOST,)
        for device in devices[: server.launch.tp_size]:
            yield device, True, server


def _actors(config: ExperimentConfig) -> Iterator[tuple[str, Occupant]]:
    """Ray gives each actor a GPU, which one is its own choice: here the first ones train. Where
    there are too few, the n-th sampling actor is beside the n-th training actor."""
    ranks, samplers = config.training.actors, config.sampling_actors
    gpus = [device for device in config.training_devices if not device.startswith("cpu")]
    if not gpus:
        yield from ((HOST, kind) for kind in [TRAINER] * ranks + [SAMPLER] * samplers)
        return
    apart = gpu_shares(len(gpus), ranks, samplers)[0] == 1.0
    first = ranks if apart else 0
    for number in range(ranks):
        yield gpus[number], TRAINER
    for number in range(samplers):
        yield gpus[first + number], SAMPLER


def _advice(*users: str, moment: Moment = "sampling", fraction: str = "lower") -> str:
    """What to do; ``fraction``: which way to move a server's share of the memory."""
    ways = []
    if any(user.startswith("teacher") for user in users):
        ways.append(
            f"{fraction} the teacher's launch.memory_fraction, divide it over more GPUs "
            "(launch.tp_size, launch.devices)"
        )
    if TRAINER in users:
        ways.append("train on more GPUs (training.actors)")
        if moment == "training":
            ways.append(
                "write training.gradient_checkpointing: true, lower training.micro_batch_tokens"
            )
    if any(user.startswith("student server") for user in users):
        ways.append(f"{fraction} sampling.server.memory_fraction, or name sampling.devices")
    if SAMPLER in users:
        ways.append("lower sampling.max_rows")
    return ", ".join([*ways, "or take larger cards"])
