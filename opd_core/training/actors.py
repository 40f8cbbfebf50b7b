"""The loop's organs as Ray actors: sampling actors and training actors (ranks).

Ray sees batches: one call a train step for the ranks, one stream a train step for the samplers.
Weights travel through the object store by reference; the driver never holds them.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError, RayError
from torch import Tensor

from opd_core.config import ExperimentConfig
from opd_core.config.student import gpu_shares
from opd_core.errors import OPDError, SamplingError, TrainingError
from opd_core.sampling.protocol import Completion, SampleRequest
from opd_core.sampling.transformers_engine import TransformersEngine
from opd_core.training import models
from opd_core.training.batch import TrainBatch, shard
from opd_core.training.learner import Learner


class SamplingActor:
    """A copy of the student that samples."""

    def __init__(self, config: ExperimentConfig) -> None:
        torch.set_num_threads(config.student.cpu_threads)
        tokenizer = models.load_tokenizer(config.student.model)
        model = models.load_model(
            config.student.model, config.student.dtype, models.pick_device()
        ).requires_grad_(False)
        self._engine = TransformersEngine(
            model,
            end_ids=models.end_ids(model, tokenizer),
            pad_id=models.pad_id(tokenizer),
            max_rows=config.sampling.max_rows,
        )

    def ready(self) -> str:
        """The device, once the model is loaded."""
        return str(self._engine.device)

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[list[Completion]]:
        """Stream completions as they finish."""
        yield from self._engine.sample(requests)

    def load_weights(self, weights: dict[str, Tensor], policy_version: int) -> int:
        """Take over the student's weights."""
        self._engine.load_weights(weights, policy_version)
        return policy_version


class TrainingActor:
    """One rank of the learner."""

    def __init__(self, config: ExperimentConfig) -> None:
        torch.set_num_threads(config.student.cpu_threads)
        torch.manual_seed(config.seed)
        device = models.pick_device()
        model = models.load_model(config.student.model, "float32", device)
        tokenizer = models.load_tokenizer(config.student.model)
        self._learner = Learner(model, tokenizer, config.training, config.opd, config.student.dtype)

    def ready(self) -> str:
        """The device, once the model is loaded."""
        return str(self._learner.device)

    def address(self) -> str:
        """``host:port`` where rank 0 can meet the others."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    def join(self, address: str, rank: int, ranks: int) -> None:
        """Meet the other ranks: NCCL on GPUs, gloo on CPUs."""
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend, init_method=f"tcp://{address}", rank=rank, world_size=ranks
        )

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Train on this rank's part."""
        return self._learner.update(batch)

    def weights(self) -> dict[str, Tensor]:
        """The current weights, into the object store."""
        return self._learner.weights()

    def save(self, path: str) -> str:
        """Write the student in Hugging Face format."""
        return str(self._learner.save(Path(path)))


class RaySampler:
    """Sampling actors behind the :class:`~opd_core.sampling.protocol.Sampler` protocol."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors

    async def sample(self, requests: Sequence[SampleRequest]) -> AsyncIterator[list[Completion]]:
        """Completions of all actors as they finish; a group stays on one actor.

        Raises :class:`SamplingError` as soon as one actor dies or fails.
        """
        queue: asyncio.Queue[list[Completion] | Exception | None] = asyncio.Queue()

        async def pump(actor: Any, share: list[SampleRequest]) -> None:
            try:
                async for reference in actor.sample.remote(share):
                    await queue.put(await reference)
                await queue.put(None)
            except Exception as error:  # raised where the completions are read
                await queue.put(error)

        count = len(self._actors)
        shares = [[r for r in requests if r.key[0] % count == i] for i in range(count)]
        pumps = [
            asyncio.create_task(pump(actor, share))
            for actor, share in zip(self._actors, shares, strict=True)
            if share
        ]
        try:
            running = len(pumps)
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, RayError):
                    raise _sampling_error(item) from None
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()

    async def load_weights(self, weights: Any, policy_version: int) -> None:
        """Give all actors the weights behind an object reference."""
        loads = [actor.load_weights.remote(weights, policy_version) for actor in self._actors]
        await _all(loads, "syncing weights to the sampling actors")


class RayLearner:
    """Training actors behind one name."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors

    async def join(self) -> None:
        """Let the ranks meet; nothing to do for one rank."""
        count = len(self._actors)
        if count > 1:
            doing = "joining the training ranks"
            (address,) = await _all([self._actors[0].address.remote()], doing)
            joins = [a.join.remote(address, rank, count) for rank, a in enumerate(self._actors)]
            await _all(joins, doing)

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """One train step on all ranks; their metrics are the same, so rank 0's are returned."""
        parts = shard(batch, len(self._actors))
        updates = [a.update.remote(part) for a, part in zip(self._actors, parts, strict=True)]
        metrics: dict[str, float] = (await _all(updates, "training"))[0]
        return metrics

    async def weights(self) -> Any:
        """A reference to rank 0's weights in the object store."""
        return self._actors[0].weights.remote()

    async def save(self, path: Path) -> Path:
        """Let rank 0 write the student."""
        return Path((await _all([self._actors[0].save.remote(str(path))], "saving"))[0])


async def start_actors(config: ExperimentConfig) -> tuple[RaySampler, RayLearner]:
    """Start all actors and wait until their models are loaded.

    Raises :class:`TrainingError` with the actor's own reason if one does not come up, and with
    what was asked and what there is if they are not all ready after ``ray.startup_limit_s``.
    """
    limit = config.ray.startup_limit_s
    ranks, samplers = config.training.actors, config.sampling.actors
    shares = gpu_shares(config.student.gpus, ranks, samplers)
    doing = "loading the student"
    try:
        async with asyncio.timeout(limit):
            training = _start(TrainingActor, config, ranks, shares[0])
            if 0 < shares[0] < 1:
                # Two samplers placed first could share the GPU that the last rank needs.
                await _all([actor.ready.remote() for actor in training], doing)
            sampling = _start(SamplingActor, config, samplers, shares[1])
            await _all([actor.ready.remote() for actor in [*training, *sampling]], doing)
            learner = RayLearner(training)
            await learner.join()
    except TimeoutError:
        total, free = ray.cluster_resources(), ray.available_resources()
        raise TrainingError(not_ready(ranks, samplers, shares, limit, total, free)) from None
    return RaySampler(sampling), learner


def not_ready(
    ranks: int,
    samplers: int,
    shares: tuple[float, float],
    limit_s: float,
    total: Mapping[str, float],
    free: Mapping[str, float],
) -> str:
    """The message for actors that are not ready in time: what was asked, what the cluster has."""
    return (
        f"the student's actors were not ready after {limit_s:g} s. Asked for: {ranks} training "
        f"actors (1 CPU and {shares[0]:g} GPUs each), {samplers} sampling actors (1 CPU and "
        f"{shares[1]:g} GPUs each). The cluster has {total.get('CPU', 0):g} CPUs and "
        f"{total.get('GPU', 0):g} GPUs; free now: {free.get('CPU', 0):g} and "
        f"{free.get('GPU', 0):g}. If they can never fit, lower training.actors or sampling.actors "
        "or wait for a free cluster; if the model loads slowly, raise ray.startup_limit_s"
    )


def _start(kind: type, config: ExperimentConfig, count: int, gpus: float) -> list[Any]:
    options = {
        "num_cpus": 1,
        "num_gpus": gpus,
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(config.student.cpu_threads)}},
    }
    return [ray.remote(kind).options(**options).remote(config) for _ in range(count)]


def connect() -> None:
    """Join the cluster that this job runs in."""
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=True)


async def _all(references: Sequence[Any], doing: str) -> list[Any]:
    try:
        return list(await asyncio.gather(*references))
    except RayError as error:
        raise _own_error(error) or TrainingError(f"{doing}: {_plain(error)}") from None


def _sampling_error(error: RayError) -> OPDError:
    if isinstance(error, RayActorError):
        return SamplingError(f"a sampling actor died: {_plain(error)}")
    return _own_error(error) or SamplingError(f"a sampling actor failed: {_plain(error)}")


def _own_error(error: RayError) -> OPDError | None:
    """The error of this project that an actor raised, if it was one."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, OPDError) else None


def _plain(error: RayError) -> str:
    """The last lines of a Ray error: the actor's own words."""
    return "\n".join(str(error).strip().splitlines()[-12:])
