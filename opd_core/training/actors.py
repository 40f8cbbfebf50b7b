"""The loop's organs as Ray actors: sampling actors and training actors (ranks)."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import ray
import torch
from torch import Tensor

from opd_core.config import ExperimentConfig
from opd_core.errors import SamplingError
from opd_core.sampling.protocol import Completion, SampleRequest
from opd_core.sampling.transformers_engine import TransformersEngine
from opd_core.training import models, sharding
from opd_core.training.batch import TrainBatch
from opd_core.training.learner import Learner, is_out_of_memory


class SamplingActor:
    """A copy of the student that samples."""

    def __init__(self, config: ExperimentConfig) -> None:
        _settle(config)
        tokenizer = models.load_tokenizer(config.student.model)
        model = models.load_model(
            config.student.model, config.student.dtype, models.pick_device(config.student)
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
        """Stream completions as they finish. Raises :class:`SamplingError` if memory runs out."""
        try:
            yield from self._engine.sample(requests)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise SamplingError(
                f"out of memory on {self._engine.device} while sampling "
                f"({str(error).splitlines()[0][:200]}): lower sampling.max_rows (now "
                f"{self._engine.max_rows}) or sampling.max_new_tokens"
            ) from None

    def load_weights(self, weights: dict[str, Tensor], policy_version: int) -> int:
        """Take over the student's weights."""
        self._engine.load_weights(weights, policy_version)
        return policy_version


class TrainingActor:
    """One rank of the learner."""

    def __init__(self, config: ExperimentConfig) -> None:
        _settle(config)
        self._config = config
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
        )
        return self._learner.why_padded or ""

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Train on this rank's part of the batch."""
        return self._learner.update(batch)

    def weights(self) -> tuple[dict[str, Tensor], None]:
        """The current weights, into the object store, of which rank 0 has them; and a word, for
        those who only wait for it."""
        return self._learner.weights(), None

    def save(self, path: str) -> None:
        """Write the student in Hugging Face format."""
        self._learner.save(Path(path))

    def start_checkpoint(self, folder: str) -> None:
        """Begin to write this rank's part."""
        self._learner.start_checkpoint(Path(folder))

    def finish_checkpoint(self) -> None:
        """Wait until it is written."""
        self._learner.finish_checkpoint()

    def restore(self, folder: str) -> None:
        """Take over a checkpoint."""
        self._learner.restore(Path(folder))


def _settle(config: ExperimentConfig) -> None:
    """What holds for torch in every actor."""
    torch.set_num_threads(config.student.cpu_threads)
    # Only a warning where a GPU has no such kernel (the sampler's sum over the vocabulary).
    torch.use_deterministic_algorithms(config.deterministic, warn_only=True)
