"""The machine: devices that exist, are free and large enough, room on disk and in shared memory."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from opd_core.config import ExperimentConfig
from opd_core.lifecycle.gpu_memory import Gpu, read_gpus
from opd_core.planning.cards import Cards, read_cards
from opd_core.planning.files import WEIGHTS_ON_DISK, checkpoints, served_bytes
from opd_core.planning.memory import estimate
from opd_core.planning.plan import device_name
from opd_core.planning.shapes import shape_on_disk
from opd_core.preflight.report import PreflightReport
from opd_core.serving.servers import teacher_servers

BUSY_GPU_MIB = 1024
"""Memory in use on a device above this is somebody else's work (a bare context takes less)."""
SHARED_MEMORY = Path("/dev/shm")


def check_devices(config: ExperimentConfig, report: PreflightReport) -> None:
    """Every GPU that is named exists, holds nobody's memory, is given once, and is of use; and
    every device of this host has the memory that a run needs on it, by the estimate of `opd
    plan`."""
    _check_gpus(config, report)
    any_gpu = any(_gpus(config.leased_devices))
    # A model that is not here is told by the model check.
    for device in estimate(config, read_cards() if any_gpu else Cards(), shape_on_disk):
        report.problems += [f"{device_name(device)}: {problem}" for problem in device.problems]


def _check_gpus(config: ExperimentConfig, report: PreflightReport) -> None:
    if config.shares_gpus and (idle := config.training_gpus - config.training.actors) > 0:
        report.warnings.append(
            f"student.devices: nothing trains on {idle} of the {config.training_gpus} GPUs, which "
            "training and its servers share: raise training.actors, name fewer, or give servers "
            "GPUs of their own (sampling.devices)"
        )
    wanted: list[tuple[str, str]] = []
    if config.ray.address is None:  # on an existing cluster the student's GPUs are elsewhere
        wanted += [("student", device) for device in _gpus(config.student.devices)]
    for server in teacher_servers(config.opd):  # the student's have theirs out of the student's
        devices = _gpus(server.launch.devices)
        if devices and len(devices) < server.launch.tp_size:
            report.problems.append(
                f"{server.who}: tp_size {server.launch.tp_size} needs as many devices, "
                f"got {', '.join(devices)}"
            )
        wanted += [(server.who, device) for device in devices]
    if not wanted:
        return
    present = read_gpus()
    owner: dict[Gpu, str] = {}
    for who, device in wanted:
        if device.startswith("MIG-"):
            report.warnings.append(f"{who}: MIG device {device!r} is taken on trust")
            continue
        gpu = next((gpu for gpu in present if device in (gpu.index, gpu.uuid)), None)
        if gpu is None:
            there = ", ".join(gpu.index for gpu in present) or "none"
            report.problems.append(f"{who}: no GPU {device!r} on this host (there: {there})")
            continue
        if gpu in owner:
            report.problems.append(
                f"{who}: GPU {device} is the same as that of {owner[gpu]} "
                f"({gpu.index}, {gpu.uuid}): give each its own"
            )
        elif (gpu.used_mib or 0) > BUSY_GPU_MIB:
            report.problems.append(
                f"{who}: GPU {device} already holds {gpu.used_mib} MiB of somebody's memory; "
                "wait, or choose another device"
            )
        owner.setdefault(gpu, who)


def _gpus(devices: Sequence[str]) -> list[str]:
    return [device for device in devices if not device.startswith("cpu")]


def lock_names(devices: Sequence[str]) -> tuple[str, ...]:
    """One name for each device, sorted: the UUID of a GPU, however it is named; what is no GPU of
    this host keeps its name."""
    uuids = {gpu.index: gpu.uuid for gpu in (read_gpus() if _gpus(devices) else ())}
    return tuple(sorted({uuids.get(device, device) for device in devices}))


def check_room(config: ExperimentConfig, report: PreflightReport) -> None:
    """The checkpoints and the weights on their way to servers fit on disk, and Ray's object store
    in shared memory."""
    saved = report.student.fp32_bytes if report.student else 0
    number, size = checkpoints(config, saved)
    on_their_way = _on_their_way(config, report)
    needed = saved + number * size + 2**28
    told = (
        f"the student of {saved / 2**30:.1f} GiB and up to {number} checkpoints of "
        f"{size / 2**30:.1f} GiB each"
    )
    if config.sampling.sync_folder is None:
        needed += on_their_way
        if on_their_way:
            told += f", {on_their_way / 2**30:.1f} GiB of weights on their way to its servers"
    elif (free := _free(Path(config.sampling.sync_folder))) < on_their_way:
        report.problems.append(
            f"sampling.sync_folder {config.sampling.sync_folder}: {free / 2**30:.1f} GiB free, the "
            f"weights on their way to the student's servers need {on_their_way / 2**30:.1f} GiB; "
            "free some, or name another folder"
        )
    root = config.run.root_dir
    if (free := _free(root)) < needed:
        report.problems.append(
            f"{root}: {free / 2**30:.1f} GiB free, this run needs about {needed / 2**30:.1f} GiB "
            f"({told}); free some, lower training.keep_checkpoints, or set run.root"
        )
    _check_shared_memory(config, report)


def _check_shared_memory(config: ExperimentConfig, report: PreflightReport) -> None:
    if config.ray.address is not None:
        return
    store, lent = config.ray.object_store_mb * 2**20, _lent(config, report)
    if SHARED_MEMORY.exists() and (free := shutil.disk_usage(SHARED_MEMORY).free) < store + lent:
        beside, way_out = "", ""
        if lent:
            beside = f" and weights on their way to the student's servers {lent / 2**20:.0f} MiB"
            way_out = ", or write sampling.weight_sync: disk"
        report.problems.append(
            f"{SHARED_MEMORY}: {free / 2**20:.0f} MiB free, Ray's object store needs "
            f"{store / 2**20:.0f} MiB{beside}; enlarge it, or lower ray.object_store_mb{way_out}"
        )
    weights = report.student.weights_bytes if report.student else 0
    if config.sampling_actors and store < 2 * weights:
        report.warnings.append(
            f"ray.object_store_mb {config.ray.object_store_mb} holds fewer than two copies of the "
            "student's weights; weight sync may spill to disk"
        )


def _free(folder: Path) -> int:
    """Bytes free where a folder is, or will be."""
    folder = folder.absolute()
    return shutil.disk_usage(next(path for path in [folder, *folder.parents] if path.is_dir())).free


def _on_their_way(config: ExperimentConfig, report: PreflightReport) -> int:
    """Bytes of the weights that lie on disk for the student's servers, in the student's dtype."""
    if report.student is None or not config.sampling.by_servers:
        return 0
    if config.sampling.sync_by != "disk":
        return 0
    return WEIGHTS_ON_DISK * served_bytes(config, report.student.fp32_bytes)


def _lent(config: ExperimentConfig, report: PreflightReport) -> int:
    """Bytes of the weights in shared memory, from where SGLang takes them: one bucket, or the
    embedding, a model's largest tensor, where that is larger."""
    sampling, student = config.sampling, report.student
    if student is None or sampling.engine != "sglang" or sampling.sync_by != "tensor":
        return 0
    from transformers import AutoConfig  # late, as in facts: they take seconds

    from opd_core.training.weight_buckets import BUCKET_BYTES

    text = AutoConfig.from_pretrained(student.path, local_files_only=True).get_text_config()
    embedding = student.vocab_size * int(text.hidden_size) * _bytes_per_weight(config)
    return min(served_bytes(config, student.fp32_bytes), max(BUCKET_BYTES, embedding))


def _bytes_per_weight(config: ExperimentConfig) -> int:
    return 4 if config.student.dtype == "float32" else 2
