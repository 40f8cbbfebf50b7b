"""Where the actors live: one placement group, one bundle for each actor or each shared GPU."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from opd_core.config import ExperimentConfig
from opd_core.config.student import gpu_shares
from opd_core.errors import TrainingError
from opd_core.training.actors import SamplingActor, TrainingActor
from opd_core.training.handles import RayLearner, all_of
from opd_core.training.ray_sampler import RaySampler


def connect() -> None:
    """Join the cluster that this job runs in."""
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=True)


async def start_actors(config: ExperimentConfig) -> tuple[RaySampler | None, RayLearner]:
    """Start all actors in one placement group and wait until the student is loaded; no sampler
    where servers sample.

    Raises :class:`TrainingError` with the actor's own reason if one does not come up, and with
    what was asked and what there is if they are not all ready after ``ray.startup_limit_s``.
    """
    limit = config.ray.startup_limit_s
    ranks, samplers = config.training.actors, config.sampling_actors
    shares = gpu_shares(config.training_gpus, ranks, samplers)
    first = 0 if shared_gpus(shares) else ranks
    try:
        async with asyncio.timeout(limit):
            bundles = bundles_of(ranks, samplers, shares)
            group = placement_group(bundles, strategy=config.ray.placement)
            await group.ready()

            def spawn_sampler(number: int) -> Any:
                return _start(SamplingActor, config, group, first + number, shares[1])

            training = [_start(TrainingActor, config, group, i, shares[0]) for i in range(ranks)]
            sampling = [spawn_sampler(number) for number in range(samplers)]
            ready = [actor.ready.remote() for actor in [*training, *sampling]]
            nodes = (await all_of(ready, "loading the student"))[:ranks]
            # Neighbouring ranks on one node: those that share a copy speak most.
            by_node = sorted(zip(nodes, range(ranks), strict=True))
            learner = RayLearner([training[number] for _, number in by_node])
            await learner.join()
    except TimeoutError:
        total, free = ray.cluster_resources(), ray.available_resources()
        raise TrainingError(not_ready(ranks, samplers, shares, limit, total, free)) from None
    if not sampling:
        return None, learner
    max_restarts = config.sampling.max_restarts
    return RaySampler(sampling, spawn_sampler, max_restarts=max_restarts, limit_s=limit), learner


def shared_gpus(shares: tuple[float, float]) -> bool:
    """Whether a sampling actor lives on the GPU of a training actor."""
    return 0 < shares[0] < 1


def bundles_of(ranks: int, samplers: int, shares: tuple[float, float]) -> list[dict[str, float]]:
    """What the placement group reserves: a bundle for each actor, training actors first. Where GPUs
    are shared, the i-th training and the i-th sampling actor are in one bundle, of one GPU."""
    if shared_gpus(shares):
        return [
            {"CPU": float((i < ranks) + (i < samplers)), "GPU": 1.0}
            for i in range(max(ranks, samplers))
        ]
    each = [shares[0]] * ranks + [shares[1]] * samplers
    return [{"CPU": 1.0} | ({"GPU": gpus} if gpus else {}) for gpus in each]


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


def _start(kind: type, config: ExperimentConfig, group: Any, place: int, gpus: float) -> Any:
    variables = {"OMP_NUM_THREADS": str(config.student.cpu_threads)}
    if config.deterministic:
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what torch's switch asks for
    options = {
        "num_cpus": 1,
        "num_gpus": gpus,
        "runtime_env": {"env_vars": variables},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, place),
    }
    return ray.remote(kind).options(**options).remote(config)
