"""The loop's organs as Ray actors: sampling actors and training actors (ranks).

Ray sees batches: one call a train step for the ranks, one stream a train step for the samplers.
Weights travel through the object store by reference; the driver never holds them.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError
from torch import Tensor

from opd_core.config import ExperimentConfig
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
        model = models.load_model(config.student.model, config.student.dtype, device)
        tokenizer = models.load_tokenizer(config.student.model)
        self._learner = Learner(model, tokenizer, config.training, config.opd)

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
        """Completions of all actors as they finish; a group stays on one actor."""
        queue: asyncio.Queue[list[Completion] | None] = asyncio.Queue()

        async def pump(actor: Any, share: list[SampleRequest]) -> None:
            try:
                async for reference in actor.sample.remote(share):
                    await queue.put(await reference)
            except RayError as error:
                raise SamplingError(f"a sampling actor was lost: {_plain(error)}") from None
            finally:
                await queue.put(None)

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
                completions = await queue.get()
                if completions is None:
                    running -= 1
                else:
                    yield completions
            await asyncio.gather(*pumps)  # raises what a pump raised
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
            address = await self._actors[0].address.remote()
            joins = [a.join.remote(address, rank, count) for rank, a in enumerate(self._actors)]
            await _all(joins, "joining the training ranks")

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

    Raises :class:`TrainingError` with the actor's own reason if one does not come up.
    """
    count = config.sampling.actors + config.training.actors
    gpus = sum(
        device != "cpu" and not device.startswith("cpu:") for device in config.student.devices
    )
    options = {
        "num_cpus": 1,
        "num_gpus": min(1.0, gpus / count),
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(config.student.cpu_threads)}},
    }
    sampling = [
        ray.remote(SamplingActor).options(**options).remote(config)
        for _ in range(config.sampling.actors)
    ]
    training = [
        ray.remote(TrainingActor).options(**options).remote(config)
        for _ in range(config.training.actors)
    ]
    await _all([a.ready.remote() for a in [*sampling, *training]], "loading the student")
    learner = RayLearner(training)
    await learner.join()
    return RaySampler(sampling), learner


def connect() -> None:
    """Join the cluster that this job runs in."""
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=True)


async def _all(references: Sequence[Any], doing: str) -> list[Any]:
    try:
        return list(await asyncio.gather(*references))
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, OPDError):
            raise cause from None
        raise TrainingError(f"{doing}: {_plain(error)}") from None


def _plain(error: RayError) -> str:
    """The last lines of a Ray error: the actor's own words."""
    return "\n".join(str(error).strip().splitlines()[-12:])
