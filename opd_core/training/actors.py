"""The loop's organs as Ray actors: sampling actors and training actors (ranks)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray
import torch
import transformers
from torch import Tensor

from opd_core.config import Backend, ExperimentConfig
from opd_core.sampling.protocol import SampleRequest, Ticketed
from opd_core.sampling.transformers_engine import TransformersEngine
from opd_core.training import models, sharding
from opd_core.training.batch import TrainBatch
from opd_core.training.engine_thread import Engine, EngineThread
from opd_core.training.learner import Learner
from opd_core.training.weight_buckets import Bucket, HeldWeights, MeetingPoint


class SamplingActor:
    """A copy of the student that samples, in a thread; calls are answered while it does."""

    def __init__(
        self,
        config: ExperimentConfig,
        make_engine: Callable[[ExperimentConfig], Engine] | None = None,
    ) -> None:
        _settle(config)
        engine = (make_engine or _student_engine)(config)
        self._device = str(engine.device)
        self._finished: list[Ticketed] = []
        self._failure: Exception | None = None
        self._news = asyncio.Event()
        self._thread = EngineThread(engine, self._deliver, self._fail)

    async def ready(self) -> str:
        """The device, once the model is loaded."""
        return self._device

    async def submit(self, asked: Sequence[tuple[int, SampleRequest]]) -> None:
        """Take requests with their tickets."""
        self._thread.submit(asked)

    async def completions(self) -> AsyncIterator[list[Ticketed]]:
        """All completions with their tickets as they finish, without an end; for one listener.

        Raises :class:`~opd_core.errors.SamplingError`, or what else the engine failed with.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            if self._failure is not None:
                raise self._failure
            finished, self._finished = self._finished, []
            yield finished

    async def interrupt(self, before: int) -> None:
        """Let all requests with tickets below ``before`` be completions as they are."""
        await self._thread.interrupt(before)

    async def load_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> int:
        """Take over the student's weights; their version."""
        await self._thread.load_weights(weights, policy_version)
        return policy_version

    def _deliver(self, finished: Sequence[Ticketed]) -> None:
        self._finished += finished
        self._news.set()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._news.set()


class TrainingActor:
    """One rank of the learner. ``empty_cache`` is a seam for tests."""

    def __init__(
        self,
        config: ExperimentConfig,
        empty_cache: Callable[[], None] = torch.cuda.empty_cache,
    ) -> None:
        _settle(config)
        self._config = config
        self._empty_cache = empty_cache
        # On the host: with several ranks only a share of it goes to the device, layer by layer.
        cpu = torch.device("cpu")
        self._model = models.load_model(config.student.model, "float32", cpu)

    def ready(self) -> str:
        """The node's address, once the model is loaded."""
        return str(ray.util.get_node_ip_address())

    def address(self) -> str:
        """``host:port`` where rank 0 can meet the others."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    def join(self, address: str, rank: int, ranks: int) -> str:
        """Meet the other ranks and take this rank's part of the student; why it pads, if so."""
        config = self._config
        if ranks > 1:
            backend = sharding.backend_of(config.training, models.pick_device(config.student))
            sharding.join(address, rank, ranks, backend)
        self._learner = Learner(
            self._model,
            models.load_tokenizer(config.student.model),
            config.student,
            config.training,
            config.opd,
            device=models.pick_device(config.student),
            seed=config.seed,
            importance_cap=config.importance_cap,
        )
        return self._learner.why_padded or ""

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Train on this rank's part of the batch."""
        with self._leaving_room():
            return self._learner.update(batch)

    def weights(self) -> tuple[dict[str, Tensor], None]:
        """The current weights, into the object store, of which rank 0 has them; and a word, for
        those who only wait for it."""
        with self._leaving_room():
            return self._learner.weights(), None

    def save(self, path: str) -> None:
        """Write the student in Hugging Face format."""
        self._learner.save(Path(path))

    def save_weights(self, path: str) -> None:
        """Write the weights as servers read them."""
        with self._leaving_room():
            self._learner.save_weights(Path(path))

    def hold_weights(self) -> tuple[Bucket, ...]:
        """Keep the weights as they are now, for servers that take them from here."""
        with self._leaving_room():
            self._held = HeldWeights(self._learner.served_weights(), self._learner.device)
        return self._held.buckets

    def lend_bucket(self, number: int, backend: Backend) -> dict[str, str]:
        """What opens a bucket on this rank's device, or on its host."""
        with self._leaving_room():
            return self._held.lend(number, backend)

    def give_back_bucket(self) -> None:
        """Free what was lent last."""
        with self._leaving_room():
            self._held.give_back()

    def meeting_point(self) -> MeetingPoint:
        """Where this rank would open a process group."""
        return self._held.meeting_point(self.address())

    def join_group(self, meeting: MeetingPoint, world_size: int) -> None:
        """Open it, and wait for the servers."""
        self._held.join(meeting, world_size)

    def broadcast_bucket(self, number: int) -> None:
        """Send a bucket to them."""
        self._held.broadcast(number)

    def leave_group(self) -> None:
        """Close it."""
        self._held.leave()

    def start_checkpoint(self, folder: str) -> None:
        """Begin to write this rank's part."""
        self._learner.start_checkpoint(Path(folder))

    def finish_checkpoint(self) -> None:
        """Wait until it is written."""
        self._learner.finish_checkpoint()

    def restore(self, folder: str) -> None:
        """Take over a checkpoint."""
        self._learner.restore(Path(folder))

    @contextmanager
    def _leaving_room(self) -> Iterator[None]:
        """Give what torch keeps of the device's memory for later to servers that share it."""
        yield
        if self._config.shares_gpus:
            self._empty_cache()


def _student_engine(config: ExperimentConfig) -> TransformersEngine:
    tokenizer = models.load_tokenizer(config.student.model)
    device = models.pick_device(config.student)
    model = models.load_model(config.student.model, config.student.dtype, device)
    return TransformersEngine(
        model.requires_grad_(False),
        end_ids=models.end_ids(model, tokenizer),
        pad_id=models.pad_id(tokenizer),
        max_rows=config.sampling.max_rows,
    )


def _settle(config: ExperimentConfig) -> None:
    """What holds for torch and transformers in every actor."""
    transformers.utils.logging.disable_progress_bar()  # one for every weight sync
    torch.set_num_threads(config.student.cpu_threads)
    # Only a warning where a GPU has no such kernel (the sampler's sum over the vocabulary).
    torch.use_deterministic_algorithms(config.deterministic, warn_only=True)
