"""Everything that a run would do, from its configuration alone.

Commands come from the builders that a run uses. Where a run takes a free port the command says port
0; what is only known at its start (date, id, temporary folder) is written in capitals.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from opd_core.config import ExperimentConfig
from opd_core.planning.cards import Cards
from opd_core.planning.files import Written, run_directory, written_files
from opd_core.planning.items import size
from opd_core.planning.memory import Device, ReadShape, estimate
from opd_core.planning.shapes import read_shape
from opd_core.planning.tokens import Tokens, count_tokens
from opd_core.serving.commands import server_command
from opd_core.serving.servers import Server, run_servers, student_servers, teacher_servers
from opd_core.training.head import PORT_FLAGS, head_command
from opd_core.training.jobs import job_command

FREE_PORT = 0
"""Stands for one that is free when the run starts."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process that the run starts, in the words of its command; ``env`` is what its environment
    has besides the run's own, secrets as references."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is known of a run before it starts. ``models`` says where each model's size is from;
    ``order`` is what happens after what."""

    name: str
    models: dict[str, str]
    leased: tuple[str, ...]
    order: tuple[str, ...]
    processes: tuple[Process, ...]
    devices: tuple[Device, ...]
    host_at_start: str
    tokens: Tokens
    directory: str
    files: tuple[Written, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """What does not fit, by device."""
        return tuple(
            f"{device_name(device)}: {problem}"
            for device in self.devices
            for problem in device.problems
        )


def make_plan(config: ExperimentConfig, cards: Cards, read: ReadShape = read_shape) -> Plan:
    """The plan of a run; ``cards`` are the devices' memory, ``read`` finds a model's size."""
    shape = read(config.student.model)
    return Plan(
        name=config.name,
        models=_models(config, read),
        leased=config.leased_devices,
        order=_order(config),
        processes=_processes(config),
        devices=estimate(config, cards, read),
        host_at_start=_host_at_start(config, read),
        tokens=count_tokens(config),
        directory=run_directory(config),
        files=written_files(config, shape.parameters if shape else 0),
    )


def device_name(device: Device) -> str:
    """``GPU 7``, ``GPU 0 of the cluster``, ``host``."""
    if device.name == "cpu":
        return "host" if device.here else "the cluster's hosts"
    return f"GPU {device.name}" + ("" if device.here else " of the cluster")


def _models(config: ExperimentConfig, read: ReadShape) -> dict[str, str]:
    paths = {"student": config.student.model}
    paths |= {server.who: server.launch.model for server in teacher_servers(config.opd)}
    found = {who: (path, read(path)) for who, path in paths.items()}
    return {
        who: f"{shape.parameters:,} parameters: {shape.source}"
        if shape
        else f"size unknown: {path} has no config.json that can be read"
        for who, (path, shape) in found.items()
    }


def _processes(config: ExperimentConfig) -> tuple[Process, ...]:
    found = [_server(server, config) for server in run_servers(config)]
    if config.ray.address is None:
        ports = (FREE_PORT,) * len(PORT_FLAGS)
        temp_dir = Path("TEMPORARY-FOLDER")
        head = head_command(config, ports, temp_dir, temp_dir / "token")
        gpus = config.training_devices
        found.insert(0, Process("ray-head", head.argv, dict(head.env), gpus, ports))
    job = job_command(sys.executable, run_directory(config))
    return (*found, Process("student (Ray job)", job))


def _server(server: Server, config: ExperimentConfig) -> Process:
    keyed = {t.name for t in (config.opd.teachers if config.opd else ()) if t.api_key is not None}
    port = server.port or FREE_PORT
    command = server_command(
        server.backend,
        server.launch,
        name=server.teacher or "student",
        port=port,
        keyed=server.teacher in keyed,
        sampling=server.sampling,
    )
    devices = server.launch.devices
    return Process(server.child, command.argv, dict(command.env), devices, (port,))


def _order(config: ExperimentConfig) -> tuple[str, ...]:
    teachers, samplers = teacher_servers(config.opd), student_servers(config)
    leased = ", ".join(config.leased_devices) or "none"
    address = config.ray.address
    steps = [
        f"devices locked on this host: {leased}",
        "checks: models, tokenizers, data, functions, devices and their memory, ports, disk",
        f"Ray: the cluster at {address}" if address else "Ray: a private head on loopback starts",
    ]
    if started := [server.child for server in (*teachers, *samplers)]:
        steps.append(f"servers start together: {', '.join(started)}")
    if teachers:
        limit = max(server.launch.startup_limit_s for server in teachers)
        steps.append(f"every teacher healthy within {limit:,.0f} s, and proven to score")
    if config.opd and len(teachers) < sum(len(t.all_replicas) for t in config.opd.teachers):
        steps.append("external teachers answer, and are proven to score")
    if samplers:
        limit = max(server.launch.startup_limit_s for server in samplers)
        steps.append(f"the student's servers healthy within {limit:,.0f} s")
    actors = f"{config.training.actors} training actors"
    if config.sampling_actors:
        actors += f" and {config.sampling_actors} sampling actors"
    steps.append(f"the student's job is submitted; {actors} load it")
    if config.data.evaluation and config.task.judged:
        every = config.evaluation.every
        often = f", then every {every} train steps" if every else " and at the end"
        steps.append(f"evaluation at the start{often}, {config.evaluation.samples} samples each")
    steps.append(f"{config.training.steps} train steps; then report, and everything is ended")
    return tuple(steps)


def _host_at_start(config: ExperimentConfig, read: ReadShape) -> str:
    """Each training actor loads the whole student on its host before it is sharded."""
    shape, actors = read(config.student.model), config.training.actors
    if shape is None:
        return "unknown"
    each = 4 * shape.parameters
    return (
        f"{size(actors * each)} of host memory while the student is loaded in fp32 "
        f"(training.actors {actors} x {size(each)})"
    )
