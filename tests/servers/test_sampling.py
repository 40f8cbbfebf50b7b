"""What a real server must do when it samples the student, through the sampler that a run uses.

The model served has random weights: its answers are long enough to be interrupted and their
logprobs are spread. LMDeploy takes weights by other ways than files, which have their own tests:
here it keeps those it loaded.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from opd_core.config import Backend, LaunchConfig
from opd_core.errors import SamplingError
from opd_core.lifecycle.errors import ChildDied
from opd_core.lifecycle.handle import Supervisor
from opd_core.lifecycle.ports import reserve_ports
from opd_core.quiet import DEFAULTS
from opd_core.sampling.protocol import Completion, SampleRequest
from opd_core.sampling.server_sampler import ServerSampler
from opd_core.sampling.weight_paths import DiskPath, WeightPath
from opd_core.scoring.proof import TOLERANCE
from opd_core.serving.child import server_child
from opd_core.serving.commands import START_RACE
from opd_core.serving.readiness import wait_until_healthy
from opd_core.serving.servers import SamplingRole, Server

from .conftest import KEY, STARTUP_LIMIT_S, Measure, interpreter, report_of

TINY = Path(__file__).parents[2] / "deployments/recipes/assets/tiny"
VOCAB_SIZE, END = 32, 1
MAX_ROWS = 64
ALMOST_GREEDY = 1e-3
"""A temperature at which a token 0.02 nats behind the best is drawn once in e^20 times."""

pytestmark = [
    pytest.mark.timeout(2 * STARTUP_LIMIT_S),
    pytest.mark.slow,
    pytest.mark.servers,
]
only_sglang = pytest.mark.parametrize("backend", ["sglang"], scope="module", indirect=True)


@dataclass
class Weights:
    """A model as a learner that writes it."""

    model: Any

    async def save_weights(self, path: Path) -> Path:
        await asyncio.to_thread(self.model.save_pretrained, path)
        return path

    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """[N - 1, V] after each prefix of N ids, one sequence at a time."""
        with torch.no_grad():
            logits: torch.Tensor = self.model(input_ids=torch.tensor([list(ids)])).logits
        return logits[0, :-1].float().log_softmax(-1)


class OwnWeights:
    """Leaves a server those that it loaded."""

    async def prepare(self, learner: Any, policy_version: int) -> None:
        return None

    async def load(self, servers: Any, policy_version: int) -> dict[str, SamplingError]:
        return {}

    async def aclose(self) -> None:
        return None


@pytest.fixture(scope="module", params=["sglang", "lmdeploy"])
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.param
    return found


@pytest.fixture(scope="module")
def note(request: pytest.FixtureRequest, backend: Backend) -> Measure:
    """Notes a figure for the report."""
    return report_of(request.config, f"{backend}, sampling", interpreter(backend), backend)


@pytest.fixture(scope="module")
def wide() -> Weights:
    torch.manual_seed(0)
    return Weights(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY / "student")))


@pytest.fixture(scope="module")
def teacher() -> Weights:
    return Weights(AutoModelForCausalLM.from_pretrained(TINY / "teacher", dtype=torch.float32))


class Served:
    """Where the server answers now; it can be killed and started again."""

    def __init__(self, backend: Backend, model: Path, folder: Path, runs: ExitStack) -> None:
        self.backend = backend
        self.endpoint = ""
        self._model = model
        self._folder = folder
        self._runs = runs
        self._starts = 0
        self._pid = 0

    def start(self) -> None:
        """Returns once it is healthy."""
        starts = 3 if self.backend == "lmdeploy" else 1  # it may lose a race of its own
        for left in reversed(range(starts)):
            try:
                self._start()
                break
            except ChildDied as died:
                if not left or START_RACE["lmdeploy"] not in str(died):
                    raise

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def _start(self) -> None:
        with reserve_ports(1) as reserved:
            (port,) = reserved.ports
        launch = LaunchConfig(
            model=str(self._model),
            python=interpreter(self.backend),
            dtype=None if self.backend == "lmdeploy" else "float32",
            cpu_threads=1,
            env=dict(DEFAULTS),
        )
        server = Server(
            None, 0, self.backend, launch, port, SamplingRole(MAX_ROWS, shares_devices=False)
        )
        self._starts += 1
        run_dir = self._folder / f"start-{self._starts}"
        run_dir.mkdir()
        supervisor = self._runs.enter_context(
            Supervisor.start(run_dir=run_dir, run_id=f"sampling-{self.backend}-{port}")
        )
        spec = server_child(server, port=port, key=KEY, cwd=run_dir, log=run_dir / "server.log")
        self._pid = supervisor.spawn(spec).pid
        wait_until_healthy(
            server.endpoint,
            self.backend,
            limit_s=STARTUP_LIMIT_S,
            still_alive=supervisor.raise_if_dead,
        )
        self.endpoint = server.endpoint


@pytest.fixture(scope="module")
def served(
    backend: Backend, wide: Weights, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(f"sampling-{backend}-")
    wide.model.save_pretrained(folder / "model")
    for file in TINY.glob("student/tokenizer*"):
        shutil.copy(file, folder / "model")
    with ExitStack() as runs:
        server = Served(backend, folder / "model", folder, runs)
        server.start()
        yield server


@pytest.fixture
async def sampler(served: Served, tmp_path: Path) -> AsyncIterator[ServerSampler]:
    path: WeightPath = OwnWeights() if served.backend == "lmdeploy" else DiskPath(tmp_path)
    async with ServerSampler(
        served.backend,
        [served.endpoint],
        path,
        vocab_size=VOCAB_SIZE,
        end_ids=(END,),
        max_rows=MAX_ROWS,
        current_endpoints=lambda: [served.endpoint],
        api_key=KEY,
    ) as sampler:
        yield sampler


def requests(count: int, **more: Any) -> list[SampleRequest]:
    draw = random.Random(count)
    fields: dict[str, Any] = {"max_new_tokens": 48} | more
    prompts = [tuple(draw.randrange(2, VOCAB_SIZE) for _ in range(8)) for _ in range(count)]
    return [SampleRequest((n, 0), ids, n, **fields) for n, ids in enumerate(prompts)]


async def all_of(sampler: ServerSampler, asked: Sequence[SampleRequest]) -> list[Completion]:
    return await asyncio.gather(*map(sampler.sample, asked))


def gap(weights: Weights, request: SampleRequest, done: Completion) -> float:
    """The largest difference of an answer's logprobs from those of transformers, in nats."""
    if not done.response_ids:
        return 0.0
    rows = weights.logprobs((*request.token_ids, *done.response_ids))[-len(done.response_ids) :]
    own = rows.gather(-1, torch.tensor(done.response_ids).unsqueeze(-1)).squeeze(-1)
    return float((own - torch.tensor(done.rollout_logprobs)).abs().max())


async def test_sampled_tokens_have_transformers_logprobs_and_the_end_token_is_one(
    sampler: ServerSampler, wide: Weights, note: Measure
) -> None:
    await sampler.sync(wide, 3)
    asked = requests(128, stop_ids=(7,))
    began = time.monotonic()
    done = await all_of(sampler, asked)
    seconds = time.monotonic() - began
    assert {c.finish_reason for c in done} == {"stop", "length"}
    for completion in done:
        *before, last = completion.response_ids
        assert not {END, 7} & set(before)
        assert (last in (END, 7)) == (completion.finish_reason == "stop")
        assert set(completion.policy_versions) == {3}
    assert {c.response_ids[-1] for c in done if c.finish_reason == "stop"} == {END, 7}
    largest = max(gap(wide, *pair) for pair in zip(asked, done, strict=True))
    assert largest <= TOLERANCE["float32"]
    tokens = sum(len(c.response_ids) for c in done)
    note("largest difference from transformers (nats)", largest)
    note("tokens sampled", tokens)
    note("tokens per second, 128 requests at once", round(tokens / seconds))


async def test_the_drawn_tokens_follow_the_models_distribution(
    sampler: ServerSampler, wide: Weights
) -> None:
    await sampler.sync(wide, 3)
    prompt = (5, 6, 7, 8)
    count = 600
    asked = [SampleRequest((n, 0), prompt, n, max_new_tokens=1) for n in range(count)]
    done = await all_of(sampler, asked)
    drawn = torch.bincount(torch.tensor([c.response_ids[0] for c in done]), minlength=VOCAB_SIZE)
    expected = wide.logprobs((*prompt, 0))[-1].exp() * count
    statistic = float(((drawn - expected) ** 2 / expected).sum())
    assert statistic < 80  # chi-squared of 31 degrees of freedom: above it once in 100,000 times


@only_sglang
async def test_after_a_sync_from_disk_the_answers_are_those_of_the_new_weights(
    sampler: ServerSampler, wide: Weights, teacher: Weights, note: Measure
) -> None:
    await sampler.sync(wide, 0)
    for version, weights in ((1, teacher), (2, wide)):
        began = time.monotonic()
        await sampler.sync(weights, version)
        note("seconds of a sync from disk", round(time.monotonic() - began, 2))
        asked = requests(16, temperature=ALMOST_GREEDY, max_new_tokens=24)
        for request, done in zip(asked, await all_of(sampler, asked), strict=True):
            ids = (*request.token_ids, *done.response_ids)
            rows = weights.logprobs(ids)[-len(done.response_ids) :]
            own = rows.gather(-1, torch.tensor(done.response_ids).unsqueeze(-1)).squeeze(-1)
            assert float((rows.max(-1).values - own).max()) < 0.02
            assert set(done.policy_versions) == {version}


async def test_a_sync_interrupts_answers_and_they_go_on_with_the_new_weights(
    sampler: ServerSampler, served: Served, wide: Weights, teacher: Weights
) -> None:
    later = wide if served.backend == "lmdeploy" else teacher
    await sampler.sync(wide, 0)
    asked = requests(MAX_ROWS, max_new_tokens=200)
    running = [asyncio.create_task(sampler.sample(request)) for request in asked]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    await sampler.sync(later, 1)
    done = [await task for task in running]
    cut = [(r, c) for r, c in zip(asked, done, strict=True) if c.finish_reason == "abort"]
    assert any(c.response_ids for _, c in cut)
    assert max(gap(wide, *pair) for pair in zip(asked, done, strict=True)) <= TOLERANCE["float32"]
    more = [
        SampleRequest(r.key, (*r.token_ids, *c.response_ids), r.seed, 200 - len(c.response_ids))
        for r, c in cut
    ]
    rest = await all_of(sampler, more)
    assert max(gap(later, *pair) for pair in zip(more, rest, strict=True)) <= TOLERANCE["float32"]
    assert {version for c in rest for version in c.policy_versions} == {1}


@only_sglang
async def test_after_its_sleep_a_server_samples_with_the_weights_that_it_is_given(
    sampler: ServerSampler, wide: Weights, teacher: Weights
) -> None:
    await sampler.sync(wide, 0)
    await sampler.sleep()
    await sampler.wake()
    await sampler.sync(teacher, 1)
    asked = requests(8)
    done = await all_of(sampler, asked)
    assert max(gap(teacher, *p) for p in zip(asked, done, strict=True)) <= TOLERANCE["float32"]


@only_sglang
async def test_a_killed_server_comes_back_elsewhere_with_the_current_weights(
    sampler: ServerSampler, served: Served, teacher: Weights, note: Measure
) -> None:
    await sampler.sync(teacher, 5)
    asked = requests(MAX_ROWS, max_new_tokens=200)
    running = [asyncio.create_task(sampler.sample(request)) for request in asked]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    served.kill()
    await asyncio.to_thread(served.start)
    began = time.monotonic()
    done = [await task for task in running]
    note("seconds from its health to the last answer", round(time.monotonic() - began, 1))
    assert sampler.replaced == 1
    assert max(gap(teacher, *p) for p in zip(asked, done, strict=True)) <= TOLERANCE["float32"]
    assert {version for c in done for version in c.policy_versions} == {5}
