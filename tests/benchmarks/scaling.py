"""What more teacher replicas and more sampling actors bring, on one machine.

Replicas: serial teachers that only take time, through the scoring client; so what is measured is
the client, not the machine. Actors: real ones on a Ray of their own, through the run's sampler,
with enough requests to fill them all; on two cores the driver has no core to itself.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from opd_core.config import ExperimentConfig, OPDTeacherConfig
from opd_core.data import load_prompts
from opd_core.sampling.protocol import SampleRequest, rollout_seed
from opd_core.scoring.client import TeacherLogprobClient
from opd_core.scoring.facts import TeacherFacts
from opd_core.training import models
from opd_core.training.actors import SamplingActor
from opd_core.training.engine_thread import Engine
from opd_core.training.ray_sampler import RaySampler
from tests.benchmarks.scoring import PROMPT, RESPONSE, fixed_latency_server
from tests.benchmarks.simulated import SimulatedEngine

ASSETS = Path("deployments/recipes/assets/tiny").absolute()
REPLICAS, SERVICE_S, SCORES = (1, 2, 4), 0.025, 400
ACTORS, ROWS, ANSWERS, NEW_TOKENS, STEP_S = (1, 2), 64, 1024, 48, 0.01
ROUNDS = 2


def run() -> Iterator[str]:
    """Speeds, and their ratios to that of one."""
    yield from _replicas()
    with tempfile.TemporaryDirectory() as folder, _ray():
        tiny, wide = str(ASSETS / "student"), _random_model(Path(folder))
        yield from _actors(f"{STEP_S * 1e3:g} ms a token", tiny, _simulated)
        yield from _actors("tiny student", tiny)
        yield from _actors("6 layers of 256", wide)


def _replicas() -> Iterator[str]:
    one = 0.0
    for count in REPLICAS:
        with ExitStack() as servers:
            endpoints = [
                servers.enter_context(fixed_latency_server(SERVICE_S, serial=True))
                for _ in range(count)
            ]
            speed = max(asyncio.run(_score(endpoints)) for _ in range(ROUNDS))
        one = one or speed
        yield (
            f"teacher replicas, {SERVICE_S * 1e3:g} ms a score each: {count}: {speed:,.0f} "
            f"scores/s, {speed / one:.2f} x one, {speed * SERVICE_S / count:.3f} of what they allow"
        )


async def _score(endpoints: list[str]) -> float:
    """Scores per second; every request is a group of its own."""
    teacher = OPDTeacherConfig.model_validate(
        {
            "name": "teacher",
            "replicas": [{"endpoint": e, "backend": "embedded"} for e in endpoints],
            "adaptive": False,
        }
    )
    async with TeacherLogprobClient(teacher, TeacherFacts(32)) as client:
        began = time.perf_counter()
        await asyncio.gather(*(client.score(PROMPT, RESPONSE, group_id=i) for i in range(SCORES)))
        return SCORES / (time.perf_counter() - began)


def _actors(
    name: str, student: str, make_engine: Callable[[ExperimentConfig], Engine] | None = None
) -> Iterator[str]:
    one = 0.0
    for count in ACTORS:
        spawn = ray.remote(SamplingActor).options(num_cpus=1)
        actors = [spawn.remote(_config(student), make_engine) for _ in range(count)]
        speed = asyncio.run(_sample(student, actors))
        for actor in actors:
            ray.kill(actor)
        one = one or speed
        yield (
            f"sampling actors, {name}, {ROWS} rows each: {count}: {speed:,.0f} tokens/s, "
            f"{speed / one:.2f} x one"
        )


async def _sample(student: str, actors: list[Any]) -> float:
    """Tokens per second, the best round after one that warms up."""
    tokenizer = models.load_tokenizer(student)
    prompts = load_prompts(ASSETS / "train.jsonl", tokenizer, 32, limit=ANSWERS).prompts
    await asyncio.gather(*(actor.ready.remote() for actor in actors))
    sampler = RaySampler(actors, _no_other, max_restarts=0, limit_s=60)

    async def tokens(round_: int) -> int:
        requests = (
            SampleRequest((i, 0), p.token_ids, rollout_seed(round_, i), NEW_TOKENS)
            for i, p in enumerate(prompts)
        )
        completions = await asyncio.gather(*map(sampler.sample, requests))
        return sum(len(completion.response_ids) for completion in completions)

    best = 0.0
    for round_ in range(ROUNDS + 1):
        began = time.perf_counter()
        sampled = await tokens(round_)
        best = max(best, sampled / (time.perf_counter() - began) if round_ else 0.0)
    return best


def _simulated(config: ExperimentConfig) -> SimulatedEngine:
    return SimulatedEngine(ROWS, STEP_S)


def _no_other(place: int) -> Any:
    raise AssertionError(f"sampling actor {place} died")


def _random_model(folder: Path) -> str:
    """The tiny student's tokenizer with a model of random weights, whose answers are as long as
    the geometric distribution makes them."""
    config = Qwen3Config.from_pretrained(ASSETS / "student")
    config.update(
        {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 6,
            "layer_types": ["full_attention"] * 6,
        }
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    models.load_tokenizer(str(ASSETS / "student")).save_pretrained(folder)
    return str(folder)


@contextmanager
def _ray() -> Iterator[None]:
    """A local Ray, and nothing left of it."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=max(ACTORS),
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=80 * 2**20,
            _temp_dir=folder,
            runtime_env={"env_vars": {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}},
        )
        try:
            yield
        finally:
            ray.shutdown()


def _config(student: str) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "name": "scaling",
            "student": {"model": student, "cpu_threads": 1},
            "data": {"train": "none"},
            "task": {"group_size": 2, "judge": "opd_core.agent_loop.judges:arithmetic"},
            "sampling": {"max_new_tokens": NEW_TOKENS, "max_rows": ROWS},
            "opd": None,
            "training": {"steps": 1, "prompts_per_step": 1, "learning_rate": 1e-3},
        }
    )
